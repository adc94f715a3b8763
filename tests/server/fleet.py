"""Three gateway processes with one database, killed at random moments."""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from nobackfill.errors import NobackfillError, UnavailableError
from nobackfill.images import Pixels
from tests.server import process
from tests.server.conftest import publish_stage
from tests.server.support import Client
from tests.support.ports import free_port

_GATEWAYS = 3
_ANSWERED_S = 120.0
Result = TypeVar("Result")


class Fleet:
    """Each at an address that it keeps."""

    def __init__(self, folder: Path, repo: Path, url: str, chance: random.Random) -> None:
        self._folder, self._repo, self._url = folder, repo, url
        # Who is asked, and who is killed, each by a generator of its own: threads take turns as
        # they come.
        self._asking, self._killing = (random.Random(chance.random()) for _ in range(2))
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(_GATEWAYS)]
        self._served = [self._start(number) for number in range(_GATEWAYS)]

    @classmethod
    @contextmanager
    def serving(
        cls, folder: Path, url: str, first: Path, newest: Path, pictures: Pixels
    ) -> Iterator[tuple["Fleet", Path]]:
        """Three with a gallery of `pictures` by the publication `first`, when `newest` has come,
        and their repository. Who is killed is by REPORT_SEED, else by one that is drawn."""
        repo = folder / "repo"
        shutil.copytree(first, repo)
        seed = int(os.environ.get("SEED", random.randrange(10**6)))
        # Shown where a test fails.
        print(f"REPORT_SEED={seed}")
        with ExitStack() as closing:
            fleet = cls(folder, repo, url, random.Random(seed))
            closing.callback(fleet.stop)
            with Client(fleet.addresses[0]) as client:
                client.create_gallery("g")
                client.put_images(pictures)
            publish_stage(repo, newest)
            yield fleet, repo

    def _start(self, number: int) -> process.Served:
        options = [f"--store={self._url}", f"--address={self.addresses[number]}"]
        data = self._folder / f"data{number}"
        return process.start(self._repo, data, "--triton=in-process", *options)

    def kill(self, number: int) -> None:
        """kill -9, and start again."""
        self._served[number].process.kill()
        self._served[number].process.wait(60)
        self._served[number] = self._start(number)

    def restart(self, number: int) -> None:
        assert self._served[number].stop() == 0
        self._served[number] = self._start(number)

    def stop(self) -> None:
        for served in self._served:
            served.stop()

    @contextmanager
    def killed(self, count: int, within: float) -> Iterator[Future[list[int]]]:
        """`count` of them are killed, one after the other, whichever it is, each within so many
        seconds after the one before is back: their numbers. The block's end ends it earlier."""
        over = threading.Event()

        def kill() -> list[int]:
            numbers: list[int] = []
            while len(numbers) < count and not over.wait(self._killing.uniform(0, within)):
                numbers.append(self._killing.randrange(_GATEWAYS))
                self.kill(numbers[-1])
            return numbers

        with ThreadPoolExecutor(1) as thread:
            killing = thread.submit(kill)
            try:
                yield killing
            finally:
                over.set()
                # What a gateway says that does not start explains whatever failed meanwhile.
                if (failure := killing.exception()) is not None:
                    raise failure

    def active(self) -> set[int]:
        """What each answers with that is not being killed: it plans anew when it is back."""
        found = set()
        for address in self.addresses:
            with suppress(UnavailableError), Client(address) as client:
                states = client.states().items()
                found |= {number for number, state in states if state == "ACTIVE"}
        return found

    def until(self, release: int, ask: Callable[[Client], object]) -> None:
        """Ask one after the other, until all answer with a release."""

        def work(client: Client) -> bool:
            if self.active() == {release}:
                return True
            ask(client)
            return False

        while not self.asked(work):
            pass

    def asked(self, ask: Callable[[Client], Result]) -> Result:
        """What one of them answers: one that is being killed does not, and one refuses while
        another leads."""
        deadline = time.monotonic() + _ANSWERED_S
        while True:
            try:
                with Client(self._asking.choice(self.addresses)) as client:
                    return ask(client)
            except NobackfillError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def there_and_back(self, release: int, rollout: str) -> None:
        """From release 1 to another by a rollout, and rolled back: its space is dropped, so that it
        is filled anew the next time."""
        self.until(release, lambda client: client.swap(release, rollout))
        self.until(1, lambda client: client.rollback(confirm=True, to=1))
        self.asked(lambda client: client.retire())
