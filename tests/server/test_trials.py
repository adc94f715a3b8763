"""Models that would end the gateway: tried in a child, given up after two resumptions."""

import sys
from pathlib import Path

import pytest

from nobackfill.errors import PreconditionError, VerificationError
from nobackfill.release import trial
from nobackfill.server.state import Activation, StateFile
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, ids, images, refused, running
from tests.support.waiting import wait_until


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial ends in its child's death, as by a graph that passes the rules and kills."""
    code = "import os, signal, sys; sys.stdin.read(); os.kill(os.getpid(), signal.SIGFPE)"
    monkeypatch.setattr(trial, "_COMMAND", [sys.executable, "-c", code])


def test_models_that_kill_their_trial_fail_the_release_and_nothing_else(
    client: Client, repo: Path, stages: Stages, deadly: None
) -> None:
    client.create_gallery("g")
    client.put_images(images(3))
    publish_stage(repo, stages[2])
    with refused(PreconditionError, "SIGFPE"):
        client.swap(2)
    assert client.states() == {1: "ACTIVE", 2: "FAILED"}
    assert ids(client.find(images(3)[1]))[0] == "i1"
    with refused(VerificationError, "SIGFPE"):
        client.estimate_upgrade("g", 2)


def test_an_activation_that_ends_the_gateway_again_and_again_is_not_resumed(
    repo: Path, stages: Stages, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with running(repo, data) as gateway:
        assert gateway.state.current.active == 1
    publish_stage(repo, stages[2])
    record = Activation(release=2, rollout="cutover", spare_cores=1.0, old_space_seconds=0)

    def restarted(resumed: int) -> tuple[int | None, dict[int, str]]:
        """What a start after so many deaths in a trial makes of it."""
        StateFile(data / "state.json").change(
            activation=record.model_copy(update={"resumed": resumed}), active=1, failed={}
        )
        with running(repo, data) as gateway:
            run = gateway.state.current.activation
            wait_until(lambda: gateway.state.current.activation is None, "it goes on")
            assert (run is None) == (resumed == 2)
            return gateway.state.current.active, dict(gateway.state.current.failed)

    active, failed = restarted(2)
    assert active == 1
    assert "crashed 3 times" in failed[2]
    assert restarted(1)[0] == 2
