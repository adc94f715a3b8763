"""Power loss and random kills while a release is published: wholly visible or not at all."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nobackfill.durable import FAULT_INJECTOR, DurableStep
from nobackfill.errors import AlreadyExistsError, NobackfillError
from nobackfill.release.publishing.publish import publish
from tests.support.powerloss import WAYS, record, states
from tests.support.publication import seen, workshop


@pytest.mark.long
@pytest.mark.usefixtures("near_gate")
@pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.faults), pytest.param(7)], ids=["all", "some"]
)
def test_after_power_loss_the_release_is_wholly_there_or_not_at_all(
    stride: int, fast_tmp: Path
) -> None:
    shop, _, second = workshop(fast_tmp)
    steps: list[DurableStep] = []
    record(steps)
    try:
        publish(shop.repo, second)
    finally:
        FAULT_INJECTOR.observer = None
    committed = [i for i, step in enumerate(steps, 1) if commits(step, shop.repo)]
    assert len(committed) == 1
    visible_from, tried = committed[0], 0
    for count, way, disk in states(shop.top, shop.pristine, steps):
        # Always the steps around the commit point, where a missing fsync would show.
        if count % stride and abs(count - visible_from) > 2:
            continue
        tried += 1
        shutil.rmtree(shop.top)
        disk.restore(shop.top, way)
        for path in (shop.top / "repo.keys").iterdir():
            path.chmod(0o600)
        visible = seen(shop.repo, fast_tmp / "state")
        assert visible in ({1: None}, {1: None, 2: None}), f"step {count}, {way}"
        # The commit is durable once the folder that holds timestamp.json was synced.
        if count > visible_from:
            assert 2 in visible, f"step {count}, {way}: an acknowledged release was lost"
        if 2 not in visible:
            publish(shop.repo, second)
        else:
            with pytest.raises(AlreadyExistsError):
                publish(shop.repo, second)
        assert seen(shop.repo, fast_tmp / "state") == {1: None, 2: None}, f"step {count}, {way}"
        assert shop.stale() == [], f"step {count}, {way}"
    assert tried >= len(WAYS) * len(steps) // stride
    print(f"power loss: {tried} states of {len(steps)} steps")


def commits(step: DurableStep, repo: Path) -> bool:
    return step.kind == "rename" and step.rename_target == repo / "timestamp.json"


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("gate", "kills"), [("real_gate", 40), ("near_gate", 160)])
def test_random_kills(
    gate: str, kills: int, fast_tmp: Path, request: pytest.FixtureRequest
) -> None:
    """Most of a publish is the ONNX check's process; without it the kills fall among the writes."""
    if gate == "near_gate":
        request.getfixturevalue(gate)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    shop, _, second = workshop(fast_tmp)
    seconds = timed(lambda: publish(shop.repo, second))
    early = late = 0
    for _ in range(kills):
        shop.restore()
        killed_after(rng.uniform(0, 1.1 * seconds), lambda: publish(shop.repo, second))
        visible = seen(shop.repo, fast_tmp / "state")
        assert visible in ({1: None}, {1: None, 2: None})
        if 2 in visible:
            late += 1
            with pytest.raises(AlreadyExistsError):
                publish(shop.repo, second)
        else:
            early += 1
            publish(shop.repo, second)
        assert seen(shop.repo, fast_tmp / "state") == {1: None, 2: None}
        assert shop.stale() == []
    print(f"{kills} random kills: {early} before the commit, {late} after it")
    assert early


def timed(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def killed_after(seconds: float, action: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        try:
            action()
        except NobackfillError:
            os._exit(1)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
