"""A canary goes on: step by step, at other steps, and over a restart."""

import time
from pathlib import Path

from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import release_pb2 as pb
from tests.server.canaried import (
    ITEMS,
    SESSIONS,
    ask,
    begin,
    expected,
    report,
    wait_for,
    whole,
)
from tests.server.canaried import (
    client as client,
)
from tests.server.canaried import (
    served as served,
)
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, running


def test_it_goes_its_steps_by_itself(client: Client) -> None:
    canary = pb.Canary(share=0.25, steps=[0.5, 1.0])
    canary.every.FromMilliseconds(300)
    begin(client, canary)
    wait_for(lambda: report(client).canary.share == 1)
    # Somebody has to meet it before it is promoted.
    assert whole(ask(client, SESSIONS[0], 0), "i0") == 2
    wait_for(lambda: client.states()[2] == "ACTIVE")
    assert report(client).state == pb.CANARY_STATE_PROMOTED


def test_steps_that_are_given_later_take_their_time(
    client: Client, served: tuple[GatewayServer, Client]
) -> None:
    begin(client, pb.Canary(share=0.25, shadow=True))
    time.sleep(1)
    canary = pb.Canary(share=0.25, steps=[0.5])
    canary.every.FromMilliseconds(1000)
    began = time.monotonic()
    begin(client, canary)
    wait_for(lambda: report(client).canary.share == 0.5)
    assert time.monotonic() - began >= 1
    deeds = [(deed.what, deed.of_what) for deed in served[0].state.audit_entries()]
    assert deeds[-1] == ("canary", "release 2 answers 25% of the callers")


def test_a_restart_goes_on_with_the_same_share(
    stages: Stages, tmp_path: Path, near_gate: None
) -> None:
    repo, data = tmp_path / "repo", tmp_path / "data"
    publish_stage(repo, stages[1])
    for start in range(2):
        with running(repo, data) as gateway, Client(gateway.address) as client:
            if not start:
                client.create_gallery("g")
                client.put_images(images(ITEMS))
                publish_stage(repo, stages[2])
                begin(client, pb.Canary(share=0.4))
            for n, session in enumerate(SESSIONS):
                answer = ask(client, session, n % ITEMS)
                assert whole(answer, f"i{n % ITEMS}") == expected(session, 0.4)
            assert report(client).canary.share == 0.4
