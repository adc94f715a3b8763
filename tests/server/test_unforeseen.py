"""An error that nobody foresaw ends what it met, with its reason, and nothing else."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nobackfill.errors import PreconditionError
from nobackfill.gallery.search.view import LiveView
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries import indexing
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import upgrade_pb2
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, in_file, running
from tests.server.test_forgetting import COUNT
from tests.server.test_indexing import put
from tests.support.waiting import wait_until

ROOT = Path(indexing.__file__).parents[1]
# A call: where it is made, and what is called.
Site = tuple[str, int, str]


class UnforeseenError(Exception):
    """Of no class that anybody catches by name."""


class Calls:
    """The calls that a thread makes from some of our files, one of which is made to raise."""

    def __init__(self, thread: str, *files: str) -> None:
        self._thread = thread
        self._files = tuple(str(ROOT / file) for file in files)
        self.seen: dict[Site, None] = {}
        self.raising: Site | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Threads that are started meanwhile are watched."""
        threading.setprofile(self._look)
        try:
            yield
        finally:
            threading.setprofile(None)

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:
        if threading.current_thread().name != self._thread:
            sys.setprofile(None)
            return
        caller, callee = frame, getattr(arg, "__qualname__", "")
        if event == "call" and frame.f_back is not None:
            caller, callee = frame.f_back, frame.f_code.co_qualname
        elif event != "c_call":
            return
        path = caller.f_code.co_filename
        # The first and the last step of a thread are not made by what it runs, and what lets go of
        # a lock does not fail.
        frame_name = caller.f_code.co_name
        if not path.startswith(self._files) or frame_name in ("_run_work", "_work", "end"):
            return
        if callee.endswith("__exit__"):
            return
        site = (path.removeprefix(f"{ROOT}/"), caller.f_lineno, callee)
        self.seen.setdefault(site)
        if site == self.raising:
            self.raising = None
            raise UnforeseenError(f"{site}")


def unforeseen(gateway: GatewayServer, thread: str) -> float:
    """How many were counted."""
    # This counter alone: others are read from what a test has made fail.
    name = "nobackfill_unforeseen_errors_total"
    counted = gateway.metrics.registry.restricted_registry([name]).collect()
    samples = (sample for metric in counted for sample in metric.samples)
    return sum(s.value for s in samples if s.name == name and s.labels == {"thread": thread})


class Life:
    """Release 1 with a gallery, activations of release 2, and the way back."""

    def __init__(self, gateway: GatewayServer, client: Client) -> None:
        self.gateway = gateway
        self.client = client
        self.count = 3
        client.create_gallery("g")
        client.put_images(images(self.count))

    def activate(self, rollout: str) -> str:
        """Why it failed; empty where it did not."""
        failed = ""
        try:
            self.client.swap(2, rollout)
        except PreconditionError as error:
            failed = str(error)
        assert self.gateway.upgrading.job("g") is not None
        self.watch_ends()
        return failed

    def watch_ends(self) -> None:
        (*_, last) = self.client.watch_upgrade("g")
        assert last.state in (upgrade_pb2.UPGRADE_STATE_DONE, upgrade_pb2.UPGRADE_STATE_FAILED)

    def check(self) -> None:
        """Every item is found once, by its image, in the space of the release that answers."""
        for row, image in enumerate(images(self.count)):
            answer = self.client.find(image, k=self.count)
            assert answer.hits[0].id == f"i{row}"
            assert answer.hits[0].distance == pytest.approx(0, abs=1e-5)
            assert sorted(hit.id for hit in answer.hits) == sorted(
                f"i{i}" for i in range(self.count)
            )

    def put(self) -> None:
        self.client.put_images(images(self.count + 1)[self.count :], first=self.count)
        self.count += 1

    def back(self) -> None:
        """To release 1, as if 2 had never been."""
        self.client.rollback(confirm=True, to=1)
        self.gateway.serving.drop_unused_spaces()
        store = self.gateway.galleries.peek("g").store
        assert [info.spec.release for info in store.spaces()] == [1]
        last = f"i{self.count - 1}"
        if self.count > 3:
            store.delete([last])
            self.count -= 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("rollout", "every"),
    [
        ("cutover", 30),
        pytest.param("cutover", 1, marks=pytest.mark.faults),
        pytest.param("direct", 1, marks=pytest.mark.faults),
    ],
)
def test_an_error_at_any_call_ends_an_activation_with_its_reason(
    tmp_path: Path, stages: Stages, direct_stages: Stages, rollout: str, every: int
) -> None:
    published = stages if rollout == "cutover" else direct_stages
    publish_stage(tmp_path / "repo", published[1])
    calls = Calls(
        "activation",
        "rollout",
        "serving.py",
        "upgrades/upgrading.py",
    )
    with (
        running(tmp_path / "repo", tmp_path / "data") as gateway,
        Client(gateway.address) as client,
        calls.watched(),
    ):
        publish_stage(tmp_path / "repo", published[2])
        life = Life(gateway, client)
        for _ in range(2):
            # The first one tries the release's models, and no other does.
            calls.seen.clear()
            assert not life.activate(rollout)
            life.back()
        sites = list(calls.seen)
        assert len(sites) > 80
        for site in sites[::every]:
            counted = unforeseen(gateway, "activation")
            calls.raising = site
            failed = life.activate(rollout)
            assert calls.raising is None, f"{site} was not met"
            assert unforeseen(gateway, "activation") == counted + 1, f"{site}"
            assert not failed or "unexpected" in failed, f"{site}"
            life.check()
            life.put()
            again = life.activate(rollout)
            assert not again, f"{site}: {again}"
            life.check()
            life.back()


def test_the_indexing_thread_outlives_what_nobody_foresaw(
    gateway: GatewayServer, client: Client, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two galleries the first cannot be looked after; the second is, and later the first."""
    monkeypatch.setattr(indexing, "_FAILURE_PAUSE_SECONDS", 1.0)
    for name in ("broken", "whole"):
        client.create_gallery(name)
        put(client, one, name=name)
    broken, whole = in_file(gateway, "broken"), in_file(gateway, "whole")
    views = broken.views

    def no_views() -> Mapping[str, LiveView]:
        # A scrape of metrics asks for them, too.
        if threading.current_thread().name.startswith("index"):
            raise UnforeseenError
        return views()

    monkeypatch.setattr(broken, "views", no_views)
    put(client, one, COUNT, COUNT + 1, name="broken")
    wait_until(lambda: unforeseen(gateway, "indexing") > 1, "nothing is counted")
    wait_until(whole.index_path(one.space).exists, "the other gallery has no index")
    monkeypatch.setattr(broken, "views", views)
    wait_until(broken.index_path(one.space).exists, "it was not tried again")


def test_a_log_tells_where_and_holds_no_values() -> None:
    code = """
from nobackfill.server.grpc import logs
import structlog
logs.configure_logging()
vector = [0.123456789]
try:
    raise KeyError("one")
except KeyError:
    structlog.get_logger("x").exception("unforeseen")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "KeyError" in done.stderr
    assert "0.123456789" not in done.stderr
