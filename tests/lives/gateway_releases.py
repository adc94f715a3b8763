"""Operations on the gateway's releases and galleries: activate, roll back, retire, kill."""

import copy
from functools import partial
from typing import Any

from nobackfill.errors import BusyError, PreconditionError
from nobackfill.v1 import release_pb2
from tests.lives.life import Life
from tests.lives.model import Rollout, Server
from tests.lives.world import KilledError, spaces_of
from tests.server.support import Client
from tests.support.waiting import wait_until

SMALL = ("a", "b", "c", "d")


def activate(life: Life) -> None:
    """A newer release, to the end; or a refusal that changes nothing."""
    end(life)
    release, rollout = _choose(life)
    refused = release < life.server.active or release in life.publication.withdrawn
    try:
        last = life.world.ask(lambda client: client.swap(release, rollout))
    except PreconditionError:
        assert refused
        return
    except KilledError:
        if not refused:
            _settle(life, release, rollout, paused=False)
        return
    assert not refused and last.phase == release_pb2.PHASE_DONE, f"{last}"
    life.server.begin(release, rollout)
    life.server.advance(paused=False)
    _wait_idle(life)


def begin(life: Life) -> None:
    """An activation that stays half-way, as its galleries are paused."""
    end(life)
    release, rollout = _choose(life)
    if release < life.server.active or release in life.publication.withdrawn:
        return
    try:
        for name in sorted(life.server.galleries):
            life.world.ask(partial(Client.pause_upgrade, gallery=name))
        life.world.ask(lambda client: client.begin(release, rollout))
    except KilledError:
        _settle(life, release, rollout, paused=True)
    else:
        life.server.begin(release, rollout)
        life.server.advance(paused=True)
    _wait_arrived(life)


def end(life: Life) -> None:
    """Let everything that is held up go on, to its end."""
    for name in sorted(life.server.galleries):
        life.world.read(partial(Client.start_upgrade, gallery=name, release=0))
        if life.server.begun is None:
            _wait_idle(life)
            _retry(life, name)
    if life.server.begun is not None:
        life.server.advance(paused=False)
        _wait_idle(life)


def _retry(life: Life, name: str) -> None:
    """StartUpgrade carries a gallery that stayed behind, if its release still counts."""
    server = life.server
    if server.galleries[name].active == server.active:
        return
    if server.active not in life.publication.withdrawn:
        server.begin(server.active, "cutover", name)
        server.advance(paused=False, only=name)


def rollback(life: Life) -> None:
    """Told what it costs, then done."""
    server = life.server
    target = server.target()
    if target is None:
        try:
            life.world.read(lambda client: client.rollback(confirm=False))
        except PreconditionError:
            return
        raise AssertionError("rolled back to nothing")
    told = life.world.read(lambda client: client.rollback(confirm=False))
    lost = server.lost()
    assert (told.number, told.lost_items, told.done) == (target, lost, False), f"{told}, {lost}"
    before = _copy(server)
    server.rollback()
    try:
        life.world.ask(lambda client: client.rollback(confirm=True))
    except KilledError:
        if not _as_told(life):
            vars(server).update(before)
            if server.begun is not None and life.world.idle():
                # Called off, and no more than that.
                server.begun = None


def retire(life: Life) -> None:
    """No way back from here; refused while an activation is under way."""
    server = life.server
    if server.begun is not None:
        try:
            life.world.read(lambda client: client.retire())
        except BusyError:
            return
        raise AssertionError("retired during an activation")
    before = _copy(server)
    gone = server.retire()
    try:
        assert life.world.ask(lambda client: client.retire()) == gone
    except KilledError:
        states = life.world.states()
        if gone and states[gone[0]] not in ("RETIRED", "WITHDRAWN"):
            vars(server).update(before)
        # Spaces that nothing needs may still be there.
        server.galleries = before["galleries"]
        for name, told in life.world.galleries().items():
            gallery = server.galleries[name]
            there = {space.release for space in told.spaces}
            assert set(server.kept(gallery)) <= there <= set(gallery.states)
            gallery.drop(set(gallery.states) - there)


def make_or_delete(life: Life) -> None:
    """A small gallery comes or goes; refused while an activation is under way."""
    name, server = life.one_of(list(SMALL)), life.server
    exists = name in server.galleries
    if exists and len(server.galleries) < 3:
        return

    def call(client: Client) -> None:
        if exists:
            client.delete_gallery(name)
        else:
            client.create_gallery(name)

    try:
        life.world.ask(call)
    except KilledError:
        if (name in life.world.galleries()) == exists:
            return
    except BusyError as error:
        assert server.begun is not None, f"{error}"
        return
    else:
        assert server.begun is None, "galleries changed during an activation"
    if exists:
        del server.galleries[name]
    else:
        server.create(name)


def kill(life: Life) -> None:
    """SIGKILL at once, SIGTERM, or death at one of the gateway's own durable steps to come."""
    way = life.one_of(["kill", "kill", "end", "step", "step", "step"])
    life.world.stop(kill=way != "end")
    life.world.start(f"kill@{1 + life.below(60)}" if way == "step" else "")
    _wait_arrived(life)


def tell(life: Life) -> None:
    """What the gateway tells of releases."""
    server, states = life.server, life.world.states()
    assert states.keys() <= life.publication.sources.keys()
    assert states[server.active] == "ACTIVE", f"{states}, must be {server.active}"
    assert not {n for n in states if states[n] == "FAILED"}, f"{states}"


def _choose(life: Life) -> tuple[int, Rollout]:
    """Mostly the release after the active one, with a rollout that fits all galleries."""
    published = sorted(life.publication.sources)
    newer = [n for n in published if n > life.server.active]
    release = newer[0] if newer and life.chance(0.8) else life.one_of(published)
    rollouts: list[Rollout] = ["cutover", "dual"]
    behind = {g.active for g in life.server.galleries.values()} - {release}
    if release in life.publication.directly and behind == {release - 1}:
        rollouts += ["direct", "direct"]
    return release, life.one_of(rollouts)


def _settle(life: Life, release: int, rollout: Rollout, *, paused: bool) -> None:
    """After a kill an activation has not begun, or goes on by itself."""
    server = life.server
    before = _copy(server)
    if release in life.publication.withdrawn:
        return
    server.begin(release, rollout)
    server.advance(paused=paused)
    # It begins to go on before calls are answered. Galleries without a route hold nothing up.
    wait_until(
        lambda: life.world.idle() or (server.begun is not None and _as_told(life)),
        "an activation neither ends nor comes to the gallery that holds it up",
    )
    if not _as_told(life):
        vars(server).update(before)


def _as_told(life: Life) -> bool:
    """Whether the gateway is where the model is: releases, and what each gallery answers with."""
    server, states = life.server, life.world.states()
    if states[server.active] != "ACTIVE":
        return False
    if server.begun is not None and server.begun[0] != server.active:
        return states[server.begun[0]] == "ACTIVATING"
    return "ACTIVATING" not in states.values()


def _copy(server: Server) -> dict[str, Any]:
    return {k: copy.deepcopy(v) for k, v in vars(server).items() if k != "publication"}


def _wait_idle(life: Life) -> None:
    wait_until(lambda: life.world.idle(), "an activation does not end", seconds=300)


def _wait_arrived(life: Life) -> None:
    """An activation that goes on after a start comes to where the model has it."""
    wanted = {name: gallery.states for name, gallery in life.server.galleries.items()}

    def found() -> dict[str, dict[int, str]]:
        return {
            name: {release: state for release, (state, _) in spaces_of(told).items()}
            for name, told in life.world.galleries().items()
        }

    try:
        wait_until(lambda: found() == wanted, "galleries do not come to where they must")
    except AssertionError as error:
        error.add_note(f"{found()}, must be {wanted}; {life.server.begun}, {life.world.states()}")
        raise
    if life.server.begun is None:
        _wait_idle(life)
