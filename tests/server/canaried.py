"""A canary of release 2 in gallery g, begun, asked and watched by tests.

Release n embeds into its own orthogonal block: a query that met a vector of another space would
find it at squared distance 2, and an item asked for by its own image is found at distance 0.
"""

import shutil
import time
from collections.abc import Callable, Iterator

import pytest

from nobackfill.digests import is_in_share, share_digest
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import release_pb2 as pb
from nobackfill.wire import Answer, Hit
from tests.server.conftest import Stages, publish_stage
from tests.server.support import TIMEOUT_S, Client, images, running
from tests.support.blocks import png

ITEMS = 6
SESSIONS = [f"session {n}" for n in range(24)]


@pytest.fixture(scope="module")
def served(
    stages: Stages, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GatewayServer, Client]]:
    """A gateway in release 1 with a gallery, beside which release 2 is published."""
    folder = tmp_path_factory.mktemp("canary")
    shutil.copytree(stages[1], folder / "repo")
    with running(folder / "repo", folder / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(ITEMS))
        publish_stage(folder / "repo", stages[2])
        wait_for(lambda: 2 in client.states())
        yield gateway, client


@pytest.fixture
def client(served: tuple[GatewayServer, Client], near_gate: None) -> Iterator[Client]:
    """The same for each test: release 1 answers all again when one has ended."""
    gateway, client = served
    yield client
    if gateway.state.current.active == 2 or gateway.state.current.activation is not None:
        client.rollback(confirm=True, to=1)
    wait_for(lambda: gateway.activations.current_run() is None)
    assert client.states()[1] == "ACTIVE"


def expected(session: str, share: float) -> int:
    return 2 if is_in_share(share_digest(2, session), share) else 1


def begin(client: Client, canary: pb.Canary) -> str:
    """Activate release 2 up to its canary; what that says."""
    events = client.activate(2, canary=canary)
    return next(event.message for event in events if event.phase == pb.PHASE_CANARY)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def whole(answer: Answer[Hit], item: str) -> int:
    """The release of an answer, all of which is of one pair."""
    assert answer.hits[0].id == item
    assert answer.hits[0].distance == pytest.approx(0, abs=1e-5)
    assert all(abs(hit.distance - 2) > 1e-4 for hit in answer.hits)
    assert {hit.release for hit in answer.hits} == {answer.release}
    return answer.release


def ask(client: Client, session: str, number: int) -> Answer[Hit]:
    return client.search("g", image=png(images(ITEMS)[number]), k=3, session=session)


def report(client: Client) -> pb.WatchCanaryResponse:
    return next(iter(client.watch_canary()))
