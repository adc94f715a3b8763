"""Rollbacks lead where they were told to, once, and beside no activation."""

import threading
from pathlib import Path

import pytest

from nobackfill.errors import BusyError, PreconditionError
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.rollout import rollback
from nobackfill.v1 import release_pb2, upgrade_pb2
from tests.server.conftest import Stages, publish_stage
from tests.server.support import TIMEOUT_S, Client, images, refused, running


@pytest.fixture
def third(client: Client, repo: Path, stages: Stages) -> Client:
    """A gallery carried from release 1 over 2 to 3."""
    client.create_gallery("g")
    client.put_images(images(3))
    publish_stage(repo, stages[3])
    client.swap(2)
    client.swap(3)
    return client


def test_a_retry_goes_back_no_further(third: Client) -> None:
    told = third.rollback(confirm=False)
    for _ in range(2):
        answer = third.rollback(confirm=True, to=told.number)
        assert (answer.number, answer.done) == (2, True)
        assert third.find(images(1)[0]).release == 2
    assert third.rollback(confirm=True, to=1).number == 1


def test_a_rollback_to_where_none_leads_changes_nothing(third: Client) -> None:
    with refused(PreconditionError, "expected 2, the release that a rollback leads to"):
        third.rollback(confirm=True, to=1)
    assert third.states()[3] == "ACTIVE"


def test_a_client_that_knows_no_target_retries_without_harm(
    third: Client, gateway: GatewayServer
) -> None:
    """As clients of before send it. A look in between, or time, makes it another rollback."""
    for _ in range(2):
        assert third.rollback(confirm=True).number == 2
    third.rollback(confirm=False)
    assert third.rollback(confirm=True).number == 1


def test_a_retry_after_some_time_is_another_rollback(
    third: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert third.rollback(confirm=True).number == 2
    monkeypatch.setattr(rollback, "RETRY_S", 0.0)
    assert third.rollback(confirm=True).number == 1


def test_a_retry_after_a_restart_goes_back_no_further(stages: Stages, tmp_path: Path) -> None:
    publish_stage(tmp_path / "repo", stages[1])
    with running(tmp_path / "repo", tmp_path / "data") as gateway, Client(gateway.address) as one:
        publish_stage(tmp_path / "repo", stages[3])
        one.swap(2)
        one.swap(3)
        assert one.rollback(confirm=True).number == 2
    with running(tmp_path / "repo", tmp_path / "data") as gateway, Client(gateway.address) as one:
        assert one.rollback(confirm=True).number == 2
        assert one.states()[2] == "ACTIVE"


def test_nothing_begins_beside_a_rollback(
    third: Client, gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nobackfill.server.rollout import activation

    monkeypatch.setattr(activation, "_LOCK_SECONDS", 0.1)
    reached, go_on, settle = threading.Event(), threading.Event(), gateway.serving.retire_plans

    def slowly(old: list[object]) -> None:
        reached.set()
        go_on.wait(TIMEOUT_S)
        settle(old)  # type: ignore[arg-type]

    monkeypatch.setattr(gateway.serving, "retire_plans", slowly)
    answers: list[release_pb2.RollbackReleaseResponse] = []
    thread = threading.Thread(target=lambda: answers.append(third.rollback(confirm=True, to=2)))
    thread.start()
    assert reached.wait(TIMEOUT_S)
    for call in (
        lambda: third.swap(3),
        lambda: third.rollback(confirm=True, to=2),
        lambda: third.retire(),
        lambda: third.create_gallery("late"),
    ):
        with refused(BusyError, "try again"):
            call()
    # Searches go on.
    assert third.find(images(1)[0]).release == 2
    go_on.set()
    thread.join()
    assert answers[0].done
    assert third.swap(3).phase == release_pb2.PHASE_DONE


def test_an_upgrade_just_begun_is_the_one_that_is_watched(third: Client) -> None:
    """Its gallery has a finished job from before."""
    third.rollback(confirm=True, to=2)
    # What a pause holds: an item that is still to be carried.
    third.put_images(images(4)[3:], first=3)
    third.pause_upgrade("g")
    events = third.activate(3, rollout="cutover")
    next(events)
    watched = third.watch_upgrade("g")
    first = next(watched)
    assert (first.from_release, first.to_release) == (2, 3)
    assert first.state == upgrade_pb2.UPGRADE_STATE_PAUSED
    third.start_upgrade("g", 0)
    (*_, last) = watched
    assert last.state == upgrade_pb2.UPGRADE_STATE_DONE
    assert last.to_release == 3
    # Held back or not, what has ended has ended.
    assert third.pause_upgrade("g").state == upgrade_pb2.UPGRADE_STATE_PAUSED
    assert third.start_upgrade("g", 0).state == upgrade_pb2.UPGRADE_STATE_DONE


def test_a_watch_ends_with_an_activation_that_is_called_off(third: Client) -> None:
    third.rollback(confirm=True, to=2)
    # What a pause holds: an item that is still to be carried.
    third.put_images(images(4)[3:], first=3)
    third.pause_upgrade("g")
    third.begin(3, "cutover")
    watched = third.watch_upgrade("g")
    next(watched)
    third.rollback(confirm=True, to=2)
    third.start_upgrade("g", 0)
    (*_, last) = watched
    assert last.state == upgrade_pb2.UPGRADE_STATE_FAILED
    assert "was cancelled" in last.message
