"""How many items a token's galleries may hold, in files and in a database with three gateways."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from nobackfill.errors import ConfigurationError, ItemQuotaError, QuotaExceededError
from nobackfill.server.grpc.context import Tokens
from tests.server.conftest import Stages
from tests.server.support import Client, images, refused, running
from tests.support import postgres as servers
from tests.support.blocks import png

PICTURES = images(40)
ROLES = {"boss": "admin", "app": "writer:mine,more", "free": "writer:mine"}


def tokens(path: Path, items: str = "items=10") -> Path:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ROLES}
    lines = [f"{name} {role} {digests[name]}" for name, role in ROLES.items()]
    path.write_text("\n".join(line + (f" {items}" * line.startswith("app")) for line in lines))
    return path


@contextmanager
def clients(stages: Stages, folder: Path, store: str | None, many: int) -> Iterator[list[str]]:
    """Addresses of gateways with one store."""
    file = tokens(folder / "tokens")
    given = {} if store is None else {"store": store}
    with ExitStack() as closing:
        yield [
            closing.enter_context(
                running(stages[1], folder / f"data{n}", tokens_file=file, **given)
            ).address
            for n in range(many)
        ]


def fill_up(addresses: list[str]) -> None:
    """Ten items in all, whoever is asked."""
    app, other = Client(addresses[0], "app"), Client(addresses[-1], "app")
    boss, free = Client(addresses[0], "boss"), Client(addresses[0], "free")
    app.create_gallery("mine")
    other.create_gallery("more")
    app.put_images(PICTURES[:4], "mine")
    other.put_images(PICTURES[:4], "more")
    with refused(ItemQuotaError, "at most 10 items in mine, more for this token") as caught:
        app.put_images(PICTURES[4:7], "mine", 4)
    assert isinstance(caught.value, QuotaExceededError) and "found 8 and 3" in str(caught.value)
    app.put_images(PICTURES[4:6], "mine", 4)
    # What is there may be put anew, and other content under the same ids; nothing else.
    other.put_images(PICTURES[10:14], "more")
    assert other.find(PICTURES[11], "more").hits[0].id == "i1"
    with refused(ItemQuotaError):
        other.put_images(PICTURES[:5], "more")
    assert app.delete("more", ["i0"]) == 1
    app.put_images(PICTURES[:4], "more")
    # Who has no quota puts on; then its holder does not.
    free.put_images(PICTURES[6:9], "mine", 6)
    boss.put_images(PICTURES[:5], "more")
    with refused(ItemQuotaError, "found 14 and 1 new"):
        app.put_images(PICTURES[:1], "mine", 20)
    app.delete_gallery("mine")
    app.put_images(PICTURES[20:25], "more", 20)


def test_in_files(stages: Stages, tmp_path: Path) -> None:
    with clients(stages, tmp_path, None, 1) as addresses:
        fill_up(addresses)
        app = Client(addresses[0], "app")
        app.delete_gallery("more")
        app.create_gallery("mine")

        assert put_at_once(addresses) == 10 == app.get_gallery("mine").items


def put_at_once(addresses: list[str]) -> int:
    """How many of 24 items were taken of streams at once, each of an item."""
    clients = [Client(address, "app") for address in addresses]

    def put(number: int) -> bool:
        try:
            clients[number % len(clients)].put("mine", {f"{number}": png(PICTURES[number])})
        except ItemQuotaError:
            return False
        return True

    with ThreadPoolExecutor(12) as pool:
        return sum(pool.map(put, range(24)))


def test_in_a_database(stages: Stages, tmp_path: Path, postgres: servers.Server) -> None:
    with postgres.database() as url, clients(stages, tmp_path, url, 3) as addresses:
        fill_up(addresses)
        app = Client(addresses[0], "app")
        app.delete_gallery("more")
        app.create_gallery("mine")
        # Whichever gateway is asked: never more than there is room for, and all of it.
        assert put_at_once(addresses) == 10 == app.get_gallery("mine").items


@pytest.mark.parametrize("wrong", ["items=", "items=-1", "items=1e3", "items=1 items=2", "it=1"])
def test_a_quota_that_cannot_be(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="line 2"):
        Tokens(tokens(tmp_path / "tokens", wrong))


def test_a_quota_is_of_named_galleries_that_are_written(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    for role in ("writer", "admin", "reader:mine", "device"):
        (tmp_path / "tokens").write_text(f"x {role} {digest} items=5")
        with pytest.raises(
            ConfigurationError, match="items=N needs the role writer with galleries"
        ):
            Tokens(tmp_path / "tokens")
    line = f"x writer:mine {digest} 2099-01-01T00:00:00+00:00 items=5 rate=3"
    (tmp_path / "tokens").write_text(line)
    assert Tokens(tmp_path / "tokens").identify_caller("Bearer x").max_items == 5
