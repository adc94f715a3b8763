"""Several gateways with one database: none has state of its own, and each answer is whole."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nobackfill.errors import BusyError, NotFoundError
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import upgrade_pb2
from tests.server import process
from tests.server.conftest import Stages, publish_stage
from tests.server.crowd import Crowd
from tests.server.support import Client, embedding, images, refused, settings
from tests.server.test_cli import run, run_json
from tests.support import postgres as servers
from tests.support.blocks import manifest
from tests.support.ports import free_port
from tests.support.waiting import wait_until

PICTURES = images(60)


@dataclass
class Fleet:
    """Gateways of this process, each at an address that it keeps over a restart."""

    folder: Path
    repo: Path
    url: str
    addresses: list[str] = field(default_factory=list)
    gateways: list[GatewayServer] = field(default_factory=list)

    def start(self, number: int) -> GatewayServer:
        gateway = GatewayServer(
            settings(
                self.repo, self.folder / f"data{number}", store=self.url,
                address=self.addresses[number], drain_seconds=5,
            )
        )  # fmt: skip
        gateway.start()
        return gateway

    def stop(self) -> None:
        for gateway in self.gateways:
            gateway.stop()

    def restart(self, number: int) -> None:
        self.gateways[number].stop()
        self.gateways[number] = self.start(number)


@pytest.fixture(scope="module")
def fleet(
    near_trials: None, stages: Stages, tmp_path_factory: pytest.TempPathFactory,
    postgres: servers.Server,
) -> Iterator[Fleet]:  # fmt: skip
    """Three gateways that serve release 1, with gallery `g` of `PICTURES`; release 2 is there."""
    folder = tmp_path_factory.mktemp("fleet")
    shutil.copytree(stages[1], folder / "repo")
    with postgres.database() as url, ExitStack() as closing:
        fleet = Fleet(folder, folder / "repo", url)
        fleet.addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        closing.callback(fleet.stop)
        for number in range(3):
            fleet.gateways.append(fleet.start(number))
        with Client(fleet.addresses[0]) as client:
            client.create_gallery("g")
            client.put_images(PICTURES)
        publish_stage(fleet.repo, stages[2])
        yield fleet


@pytest.fixture(scope="module")
def clients(fleet: Fleet) -> Iterator[list[Client]]:
    with ExitStack() as closing:
        yield [closing.enter_context(Client(address)) for address in fleet.addresses]


def active(client: Client) -> int:
    return next(number for number, state in client.states().items() if state == "ACTIVE")


def return_to_one(clients: list[Client]) -> None:
    """However the test before has left them."""
    if active(clients[0]) == 2:
        assert clients[0].rollback(confirm=True).number == 1
    wait_until(lambda: {active(client) for client in clients} == {1}, "all answer with release 1")


def test_what_one_gateway_does_all_have_done(clients: list[Client]) -> None:
    first, second, third = clients
    first.create_gallery("h")
    with refused(NotFoundError, "create it first"):
        third.find(PICTURES[0], name="nowhere")
    second.put_images(PICTURES[:4], name="h")
    assert third.find(PICTURES[0], name="h").hits[0].id == "i0"
    for year in (1999, 2026):
        # Nothing of an item is remembered by a gateway.
        first.set_metadata("h", {"year": year}, ids=["i0"])
        assert third.find(PICTURES[0], name="h").hits[0].metadata == {"year": year}
    third.delete("h", ["i0"])
    assert first.find(PICTURES[0], name="h").hits[0].id != "i0"
    wait_until(lambda: second.get_gallery("h").items == 3, "the second counts anew")
    second.pause_upgrade("h")
    wait_until(lambda: state_of(third, "h") == "PAUSED", "the third knows of the pause")
    third.delete_gallery("h")
    second.create_gallery("h")
    wait_until(lambda: first.get_gallery("h").items == 0, "another of the same name")
    assert state_of(first, "h") == "DONE"
    first.delete_gallery("h")
    for client in clients:
        wait_until(lambda one=client: [g.name for g in one.list_galleries()] == ["g"], "h is gone")  # type: ignore[misc]


def state_of(client: Client, gallery: str) -> str:
    job = next(iter(client.watch_upgrade(gallery)))
    return upgrade_pb2.UpgradeState.Name(job.state).removeprefix("UPGRADE_STATE_")


@pytest.mark.long
def test_swaps_and_a_rolling_restart_fail_no_call(fleet: Fleet, clients: list[Client]) -> None:
    """Both rollouts that this release allows, begun, undone and found by different gateways."""
    return_to_one(clients)
    both = [manifest(fleet.repo, number) for number in (1, 2)]
    with Crowd(fleet.addresses, PICTURES, both).asking() as crowd:
        for rollout, undone_by in (("cutover", 1), ("dual", 2)):
            clients[0].swap(2, rollout)
            wait_until(lambda: {active(client) for client in clients} == {2}, "all answer with 2")
            assert clients[undone_by].rollback(confirm=True).lost_items == 0
            wait_until(lambda: {active(client) for client in clients} == {1}, "all answer with 1")
        clients[0].swap(2, old_space_seconds=3600)
        for number in range(3):
            fleet.restart(number)
        seen = len(crowd.answers)
        wait_until(lambda: len(crowd.answers) > seen + 30, "answers go on")
    assert crowd.failures == []
    assert set(crowd.answers) == {1, 2}
    # What one announced, all say, restarted or not.
    old = embedding(both[0], PICTURES[1])
    ends = {client.find_by(old).space_end_time for client in clients}
    assert len(ends) == 1 and None not in ends


def test_commands_ask_the_next_where_one_is_gone(fleet: Fleet) -> None:
    gone = ",".join(f"127.0.0.1:{free_port()}" for _ in range(8))
    at = f"--server={gone},{fleet.addresses[0]}"
    assert [gallery["name"] for gallery in run_json("status", at)["galleries"]] == ["g"]
    # A stream that is begun once.
    # The log of the gateways in this process is no output of the command.
    assert "release 9" in run("activate", "9", at, code=66, process=True)


def test_a_gateway_that_has_heard_nothing_puts_nothing_where_it_is_not_found(
    fleet: Fleet, clients: list[Client]
) -> None:
    return_to_one(clients)
    fleet.gateways[1].following.close()
    clients[0].swap(2)
    # An answer of before, whole by itself.
    before = clients[1].find(PICTURES[0])
    assert (before.release, before.hits[0].id) == (1, "i0")
    late = images(61)[60:]
    clients[1].put_images(late, first=60)
    assert clients[0].find(late[0]).hits[0].id == "i60"
    assert clients[1].find(late[0]).release == 2
    # It searches no table that is gone, either.
    fleet.gateways[1].following.close()
    clients[0].retire()
    deeds = [
        (deed.who, deed.what, deed.of_what) for deed in fleet.gateways[2].state.audit_entries()
    ]
    assert deeds[-2:] == [
        ("local", "activate", "release 2"), ("local", "retire", "releases 1"),
    ]  # fmt: skip
    assert clients[1].find(PICTURES[0]).hits[0].id == "i0"
    clients[0].delete("g", ["i60"])
    fleet.restart(1)


def test_a_gallery_made_while_its_gateway_looks_is_kept(
    fleet: Fleet, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    galleries, state = fleet.gateways[0].galleries, fleet.gateways[0].state
    fleet.gateways[0].following.close()
    look = state.refresh

    def looked() -> Mapping[str, tuple[int, int]]:
        seen = look()
        galleries.create("late")
        return seen

    monkeypatch.setattr(state, "refresh", looked)
    fleet.gateways[0].following.catch_up()
    monkeypatch.undo()
    made = galleries.searchable_gallery("late")
    assert made is not None
    fleet.gateways[0].following.catch_up()
    assert galleries.searchable_gallery("late") is made
    clients[0].delete_gallery("late")
    fleet.restart(0)


@pytest.mark.long
def test_another_leads_on_when_the_leader_is_killed(
    fleet: Fleet, clients: list[Client], stages: Stages, tmp_path: Path
) -> None:
    publish_stage(fleet.repo, stages[3])
    both = [manifest(fleet.repo, number) for number in (2, 3)]
    # It gets to the upgrade, and no further.
    clients[0].pause_upgrade("g")
    options = ["--triton=in-process", f"--store={fleet.url}"]
    leader = process.start(fleet.repo, tmp_path / "leader", *options)
    with Client(leader.address) as client:
        client.begin(3)
        with refused(BusyError, "release 3 is being activated"):
            clients[1].swap(3)
        assert state_of(clients[1], "g") == "PAUSED"
        with Crowd(fleet.addresses, PICTURES, both).asking() as crowd:
            leader.process.kill()
            leader.process.wait(60)
            clients[1].start_upgrade("g", 0)
            # On a busy machine a trial of the models takes minutes.
            wait_until(lambda: {active(client) for client in clients} == {3}, "carried on", 240)
            seen = len(crowd.answers)
            wait_until(lambda: len(crowd.answers) > seen + 30, "answers go on")
    assert crowd.failures == []
    assert set(crowd.answers) == {2, 3}
    wait_until(lambda: state_of(clients[2], "g") == "DONE", "the job has ended")
