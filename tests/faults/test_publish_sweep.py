"""Every durable step of publishing fails once: the release is wholly visible or not at all.

After each failure the old release is as it was, one more run converges, and nothing stale is left.
The quick set kills at every third step; `make faults` kills at each, and adds I/O errors, full
disks and torn writes.
"""

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nobackfill.errors import AlreadyExistsError, CannotWriteError
from nobackfill.release.publishing.metadata import read_signed_metadata
from nobackfill.release.publishing.publish import publish
from nobackfill.release.publishing.renew import resign, rotate, withdraw
from tests.support.crash import KILLED, count_steps, first_of, run_with_fault, sweep
from tests.support.publication import Workshop, files_of, seen, workshop

pytestmark = pytest.mark.timeout(1800)

# Kinds of failures, and how many steps lie between two of them.
FAULTS = [
    ("kill", 3),
    pytest.param("kill", 1, marks=pytest.mark.faults),
    pytest.param("short", 1, marks=pytest.mark.faults),
    pytest.param("eio", 1, marks=pytest.mark.faults),
    pytest.param("enospc", 1, marks=pytest.mark.faults),
]


def expected_status(kind: str) -> int:
    return KILLED if kind in ("kill", "short") else CannotWriteError.exit_code


@pytest.mark.long
@pytest.mark.usefixtures("near_gate")
@pytest.mark.parametrize(("kind", "stride"), FAULTS)
def test_a_second_release_is_wholly_there_or_not_at_all(
    kind: str, stride: int, fast_tmp: Path
) -> None:
    shop, _, second = workshop(fast_tmp)
    state = fast_tmp / "state"

    def run() -> None:
        publish(shop.repo, second)

    steps, swept = count_steps(run), 0
    for step, outcome in sweep(kind, run, shop.restore, first_of(steps, stride), stride):
        swept = step
        assert outcome.status == expected_status(kind), f"step {step}: {outcome.error}"
        old = files_of(shop.repo, 1)
        before = old()
        visible = seen(shop.repo, state)
        assert visible in ({1: None}, {1: None, 2: None}), f"step {step}"
        if 2 in visible:
            with pytest.raises(AlreadyExistsError):
                publish(shop.repo, second)
        else:
            publish(shop.repo, second)
        assert seen(shop.repo, state) == {1: None, 2: None}, f"step {step}"
        assert old() == before, f"step {step}: release 1 was touched"
        assert shop.stale() == [], f"step {step}"
    assert swept == steps
    print(f"{kind}: {steps} steps of publishing a second release, each {stride}.")


@pytest.mark.long
@pytest.mark.usefixtures("near_gate")
@pytest.mark.parametrize(("kind", "stride"), FAULTS)
def test_a_first_release_is_wholly_there_or_not_at_all(
    kind: str, stride: int, fast_tmp: Path
) -> None:
    shop, first, _ = workshop(fast_tmp)
    for path in list(shop.top.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
    shop.keep()

    def run() -> None:
        publish(shop.repo, first)

    steps, swept = count_steps(run), 0
    for step, outcome in sweep(kind, run, shop.restore, first_of(steps, stride), stride):
        swept = step
        assert outcome.status == expected_status(kind), f"step {step}: {outcome.error}"
        if read_signed_metadata(shop.repo) is None:
            publish(shop.repo, first)
        else:
            with pytest.raises(AlreadyExistsError):
                publish(shop.repo, first)
        assert seen(shop.repo, fast_tmp / "state") == {1: None}, f"step {step}"
        assert shop.stale() == [], f"step {step}"
    assert swept == steps > 50
    print(f"{kind}: {steps} steps of publishing a first release, each {stride}.")


CHANGES: list[tuple[str, Callable[[Path], object]]] = [
    ("withdraw", lambda repo: withdraw(repo, 1, "it was wrong")),
    ("resign", resign),
    ("rotate", lambda repo: rotate(repo, ["timestamp", "snapshot", "targets", "root"])),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "stride"), FAULTS)
@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_changes_of_metadata_leave_a_valid_publication_at_each_step(
    name: str, change: Callable[[Path], object], kind: str, stride: int, fast_tmp: Path
) -> None:
    shop, _, _ = workshop(fast_tmp)

    def run() -> None:
        change(shop.repo)

    steps, swept = count_steps(run), 0
    for step, outcome in sweep(kind, run, shop.restore, first_of(steps, stride), stride):
        swept = step
        assert outcome.status == expected_status(kind), f"step {step}: {outcome.error}"
        before = seen(shop.repo, fast_tmp / "state")
        assert before in ({1: None}, {1: "it was wrong"}), f"step {step}"
        change(shop.repo)
        after = seen(shop.repo, fast_tmp / "state")
        assert after == {1: "it was wrong" if name == "withdraw" else None}, f"step {step}"
        assert shop.stale() == [], f"step {step}"
        assert_keys_settled(shop)
    assert swept == steps > 10
    print(f"{kind}: {steps} steps of {name}, each {stride}.")


def assert_keys_settled(shop: Workshop) -> None:
    assert {path.name for path in (shop.top / "repo.keys").iterdir()} == {
        "root.pem",
        "targets.pem",
        "snapshot.pem",
        "timestamp.pem",
    }


@pytest.mark.usefixtures("near_gate")
def test_a_disk_that_is_really_full_leaves_the_old_release(fast_tmp: Path) -> None:
    """The kernel refuses to let files grow, as it does on a full disk: no hook is involved."""
    shop, _, second = workshop(fast_tmp)

    def publish_without_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        publish(shop.repo, second)

    outcome = run_with_fault(None, publish_without_room)
    assert outcome.status == CannotWriteError.exit_code
    assert "cannot be written" in outcome.error
    assert seen(shop.repo, fast_tmp / "state") == {1: None}
    publish(shop.repo, second)
    assert seen(shop.repo, fast_tmp / "state") == {1: None, 2: None}
    assert shop.stale() == []
