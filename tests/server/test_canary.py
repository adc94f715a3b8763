"""A share of the callers meets a release first, and it is stopped where it is worse."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from typer.testing import CliRunner

from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    InvalidInputError,
    PreconditionError,
    UnavailableError,
)
from nobackfill.release.manifest import Manifest
from nobackfill.server.cli import canary as canary_commands
from nobackfill.server.cli.app import app
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.rollout.rollout import Phase
from nobackfill.v1 import release_pb2 as pb
from nobackfill.v1 import search_pb2
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
from tests.server.support import Client, embedding, images, refused, vectors_of
from tests.support.blocks import png


@pytest.fixture
def gateway(served: tuple[GatewayServer, Client]) -> GatewayServer:
    return served[0]


def test_one_search_is_answered_by_one_pair(client: Client, one: Manifest, two: Manifest) -> None:
    assert begin(client, pb.Canary(share=0.25)) == "release 2 answers 25% of the callers"
    for share in (0.25, 0.6):
        begin(client, pb.Canary(share=share))
        for n, session in enumerate(SESSIONS):
            number = n % ITEMS
            picture = images(ITEMS)[number]
            old, new = embedding(one, picture), embedding(two, picture)
            want = expected(session, share)
            assert whole(ask(client, session, number), f"i{number}") == want
            both = client.search("g", embeddings=vectors_of(old, new), k=3, session=session)
            assert whole(both, f"i{number}") == want
            # Who brings the old space alone is answered in it, at once: nothing else could.
            by_old = client.search("g", embeddings=vectors_of(old), k=3, session=session)
            assert whole(by_old, f"i{number}") == 1
        assert {expected(session, share) for session in SESSIONS} == {1, 2}
    batch = search_pb2.SearchBatchRequest(
        gallery="g", queries=[search_pb2.Query(image=png(image)) for image in images(ITEMS)]
    )
    for session in SESSIONS[:8]:
        answers = client.raw.searches.SearchBatch(batch, metadata=(("x-session", session),))
        assert {answer.release for answer in answers.responses} == {expected(session, 0.6)}
    with refused(PreconditionError, "expected a share of at least 0.6"):
        begin(client, pb.Canary(share=0.1))
    with refused(BusyError):
        next(iter(client.activate(2)))


def test_galleries_come_and_go_beside_a_canary_and_follow_its_promotion(client: Client) -> None:
    begin(client, pb.Canary(share=0.5))
    assert {report(client).state for _ in range(500)} == {pb.CANARY_STATE_RUNNING}
    client.put_images(images(ITEMS + 1)[ITEMS:], first=ITEMS)
    for name in ("late", "gone"):
        client.create_gallery(name)
    client.put_images(images(ITEMS), name="late")
    client.delete_gallery("gone")
    for session in SESSIONS[:6]:
        found = client.search("g", image=png(images(ITEMS + 1)[ITEMS]), session=session)
        assert whole(found, f"i{ITEMS}") == expected(session, 0.5)
        assert client.search("late", image=png(images(1)[0]), session=session).release == 1
    assert client.states()[2] == "ACTIVATING"
    last = [*client.promote(2)][-1]
    assert (last.phase, last.message) == (pb.PHASE_DONE, "")
    for name in ("g", "late"):
        for session in SESSIONS[:6]:
            found = client.search(name, image=png(images(1)[0]), session=session)
            assert whole(found, "i0") == 2
            assert not found.request_id
    assert report(client).state == pb.CANARY_STATE_PROMOTED
    with refused(PreconditionError, "no canary"):
        next(iter(client.promote(2)))
    client.delete_gallery("late")


def test_a_rollback_ends_a_canary(client: Client) -> None:
    begin(client, pb.Canary(share=1.0))
    assert whole(ask(client, "any", 0), "i0") == 2
    assert client.rollback(confirm=True, to=1).lost_items == 0
    assert whole(ask(client, "any", 0), "i0") == 1
    assert client.states()[1] == "ACTIVE"
    assert report(client).state == pb.CANARY_STATE_ENDED


def test_a_withdrawal_ends_a_canary(
    client: Client, gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(client, pb.Canary(share=1.0))
    withdrawals = {1: None, 2: "mistakes cats for dogs"}
    monkeypatch.setattr(gateway.catalog, "withdrawal_by_release", withdrawals)
    wait_for(lambda: report(client).state == pb.CANARY_STATE_STOPPED)
    assert report(client).message == "the release was withdrawn: mistakes cats for dogs"
    wait_for(lambda: whole(ask(client, "any", 0), "i0") == 1)


@pytest.fixture
def before_two(
    gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], None]], None]:
    """What it is given is done from then on before release 2 embeds an image."""
    embed = gateway.models.embed_images

    def begin(work: Callable[[], None]) -> None:
        def instead(manifest: Manifest, images: Any) -> Any:
            if manifest.release == 2:
                work()
            return embed(manifest, images)

        monkeypatch.setattr(gateway.models, "embed_images", instead)

    return begin


def broken() -> None:
    raise UnavailableError("the model of release 2 is broken")


@pytest.mark.parametrize("shadow", [False, True])
def test_errors_stop_it_and_no_caller_sees_one(
    client: Client, before_two: Callable[[Callable[[], None]], None], shadow: bool
) -> None:
    begin(client, pb.Canary(share=0.5, shadow=shadow))
    before_two(broken)
    asked = 0
    while report(client).state == pb.CANARY_STATE_RUNNING:
        asked += 1
        assert whole(ask(client, f"session {asked}", 0), "i0") == 1
        assert asked < 500
    shown = report(client)
    assert shown.state == pb.CANARY_STATE_STOPPED
    assert shown.message.startswith("errors: ")
    assert shown.new_pair.errors >= 2
    wait_for(lambda: client.states() == {1: "ACTIVE", 2: "FAILED"})
    (reason,) = [r.reason for r in client.list_releases() if r.number == 2]
    assert "the bound is 1.0%" in reason
    assert not ask(client, "after", 0).request_id


def test_answers_that_take_much_longer_stop_it(
    client: Client, before_two: Callable[[Callable[[], None]], None]
) -> None:
    begin(client, pb.Canary(share=0.5, largest_p99_ratio=3))
    by_pair = {pair: [s for s in SESSIONS if expected(s, 0.5) == pair] for pair in (1, 2)}
    # What takes long is told from the old pair's 99th percentile, once that is known.
    for n in range(200):
        assert whole(ask(client, by_pair[1][n % len(by_pair[1])], n % ITEMS), f"i{n % ITEMS}") == 1
    usual = report(client).old_pair.p99
    before_two(lambda: time.sleep(4 * usual))
    asked = 0
    while report(client).state == pb.CANARY_STATE_RUNNING:
        asked += 1
        ask(client, f"another {asked}", 0)
        assert asked < 200
    shown = report(client)
    assert shown.state == pb.CANARY_STATE_STOPPED
    assert re.match(
        r"latency: the new release's p99 is .* ms, the old one's .* 3 times", shown.message
    )
    assert (shown.new_pair.errors, shown.new_pair.p99 > 3 * usual) == (0, True)
    wait_for(lambda: client.states() == {1: "ACTIVE", 2: "FAILED"})
    assert whole(ask(client, by_pair[2][0], 0), "i0") == 1


@pytest.mark.long
def test_searches_that_are_expensive_for_both_pairs_do_not_stop_it(
    client: Client, gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends them: seven of one caller stopped any canary."""
    begin(client, pb.Canary(share=0.5, largest_p99_ratio=3))
    for n in range(500):
        ask(client, f"ordinary {n}", n % ITEMS)
    embed, usual = gateway.models.embed_images, report(client).old_pair.p99

    def slowly(manifest: Manifest, pictures: Any) -> Any:
        time.sleep(4 * usual)
        return embed(manifest, pictures)

    monkeypatch.setattr(gateway.models, "embed_images", slowly)
    before = report(client)
    for n in range(30):
        ask(client, f"expensive {n}", 0)
    new = report(client)
    assert new.new_pair.p99 > 3 * usual
    # Whatever was slow has been looked at again.
    wait_for(lambda: report(client).compared + report(client).skipped >= new.new_pair.queries)
    assert report(client).state == pb.CANARY_STATE_RUNNING
    assert report(client).evidence["latency"] <= max(1.0, before.evidence["latency"])


def test_nobody_met_it_so_it_is_not_promoted(client: Client) -> None:
    """By an operator or by its last step: behind one token a share is nobody or everybody."""
    session = next(s for s in SESSIONS if expected(s, 0.5) == 1)
    begin(client, pb.Canary(share=0.5))
    for n in range(20):
        assert whole(ask(client, session, n % ITEMS), f"i{n % ITEMS}") == 1
    with refused(PreconditionError, "no evidence for promoting it"):
        next(iter(client.promote(2)))
    client.rollback(confirm=True, to=1)
    wait_for(lambda: client.states()[2] != "ACTIVATING")
    begin(client, pb.Canary(share=1.0, every=Duration(nanos=10**8)))
    time.sleep(1.5)
    assert report(client).state == pb.CANARY_STATE_RUNNING
    assert whole(ask(client, session, 0), "i0") == 2
    wait_for(lambda: client.states() == {1: "PREVIOUS", 2: "ACTIVE"})


def test_feedback_stops_it(client: Client) -> None:
    """Every answer of the old pair is confirmed, none of the new one."""
    begin(client, pb.Canary(share=0.5))
    session = 0
    while report(client).state == pb.CANARY_STATE_RUNNING:
        session += 1
        answer = ask(client, f"session {session}", session % ITEMS)
        if answer.release == 1 and answer.request_id:
            client.feedback("g", answer.request_id, answer.hits[0].id, "confirmed")
            assert not client.feedback("g", answer.request_id, "another", "confirmed")
        assert session < 200
    assert report(client).message.startswith("feedback: 0 of ")
    wait_for(lambda: client.states() == {1: "ACTIVE", 2: "FAILED"})
    # Nobody asks any more.
    assert not client.feedback("g", "1", "i0", "clicked")
    with refused(InvalidInputError):
        client.feedback("g", "", "i0", "clicked")


def test_a_shadow_is_compared_and_answers_nobody(client: Client, gateway: GatewayServer) -> None:
    begin(client, pb.Canary(share=1.0, shadow=True))
    for n, session in enumerate(SESSIONS):
        assert whole(ask(client, session, n % ITEMS), f"i{n % ITEMS}") == 1
    wait_for(lambda: report(client).compared == len(SESSIONS))
    shown = report(client)
    # The upgrade turns one block into the other, so that every neighbour is kept.
    assert shown.overlap == 1
    assert shown.rank_correlation == pytest.approx(1)
    assert (shown.old_pair.queries, shown.new_pair.queries) == (len(SESSIONS), len(SESSIONS))
    assert not shown.new_pair.HasField("p99")
    series = {
        sample.name: sample.value
        for family in gateway.metrics.registry.collect()
        for sample in family.samples
    }
    assert series["nobackfill_canary_overlap"] == 1
    assert series["nobackfill_canary_compared_total"] == len(SESSIONS)
    assert series["nobackfill_canary_share"] == 1


def test_the_command_begins_steps_watches_and_promotes_one(client: Client, tmp_path: Path) -> None:
    def gateway(*words: str) -> str:
        result = CliRunner().invoke(app, ["canary", *words, "--server", client.address])
        assert result.exit_code == 0, result.output
        return result.output

    numbers = tmp_path / "canary.toml"
    numbers.write_text("most_errors = 0.02\nlargest_p99_ratio = 3\n")
    started = gateway("start", "2", "--share", "25%", "--settings", str(numbers))
    assert "release 2 answers 25% of the callers" in started
    setting = report(client).canary
    assert (setting.most_errors, setting.largest_p99_ratio) == (0.02, 3)
    # A step keeps what it does not name.
    assert "answers 50% of the callers" in gateway("step", "2", "--share", "50%")
    assert "answers 60% of" in gateway("step", "2", "--steps", "60,70,100", "--every", "1d")
    assert "answers 70% of the callers" in gateway("step", "2")
    setting = report(client).canary
    assert (setting.share, list(setting.steps), setting.every.seconds) == (0.7, [1.0], 86400)
    assert (setting.most_errors, setting.largest_p99_ratio) == (0.02, 3)
    for session in SESSIONS:
        ask(client, session, 0)
    assert any("done" in line for line in gateway("promote", "2").splitlines())
    watched = gateway("watch").splitlines()
    assert watched[0] == "canary of release 2 promoted"
    assert any(" compared, overlap 1.000, rank correlation 1.000" in line for line in watched)
    assert max(map(len, watched)) <= 80
    # The promotion found every vector written by the canary, and counts them as done.
    status = CliRunner().invoke(app, ["status", "--json", "--server", client.address])
    for gallery in json.loads(status.stdout)["galleries"]:
        words = ["watch", gallery["name"], "--json", "--server", client.address]
        last = json.loads(CliRunner().invoke(app, words).stdout.splitlines()[-1])
        assert (last["state"], last["done"]) == ("UPGRADE_STATE_DONE", last["total"])
    for command in ("step", "stop"):
        said = CliRunner().invoke(app, ["canary", command, "2", "--server", client.address])
        assert said.exit_code == PreconditionError.exit_code
        assert "gateway canary start 2" in said.output
    for wrong in (
        ("--share", "0%"), ("--share", "101"), (), ("--steps", "5,25"),
        ("--steps", "5", "--every", "1y"),
    ):  # fmt: skip
        assert CliRunner().invoke(app, ["canary", "start", "2", *wrong]).exit_code == 2
    for text in ("most_errors = 0", "most_errors = 'x'", "most = 1", "=", "spare_cores = inf"):
        numbers.write_text(text)
        words = ["canary", "start", "2", "--share", "5%", "--settings", str(numbers)]
        said = CliRunner().invoke(app, [*words, "--server", client.address])
        assert said.exit_code == ConfigurationError.exit_code, said.output
        assert str(numbers) in said.output.replace("\n", "")


def test_the_command_stops_one(client: Client) -> None:
    def gateway(*words: str) -> str:
        result = CliRunner().invoke(app, ["canary", *words, "--server", client.address])
        assert result.exit_code == 0, result.output
        return result.output

    gateway("start", "2", "--share", "50%", "--shadow")
    assert (
        "no further step"
        in CliRunner().invoke(app, ["canary", "step", "2", "--server", client.address]).output
    )
    assert json.loads(gateway("stop", "2", "--json").splitlines()[-1])["done"]
    wait_for(lambda: client.states()[1] == "ACTIVE")
    assert "canary of release 2 ended" in gateway("watch")


def test_a_promotion_between_look_and_stop_is_not_taken_back(
    client: Client, gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway decides in one step: whichever of the two comes first wins."""

    def stop() -> Any:
        return CliRunner().invoke(app, ["canary", "stop", "2", "--server", client.address])

    with refused(PreconditionError, "no canary of release 2"):
        client.rollback(confirm=True, canary=2)
    begin(client, pb.Canary(share=0.5))
    with refused(PreconditionError, "no canary of release 3"):
        client.rollback(confirm=True, canary=3)
    assert report(client).state == pb.CANARY_STATE_RUNNING
    for session in SESSIONS:
        ask(client, session, 0)
    look = canary_commands._running_canary

    def promoted_after(gateway: Any, number: int) -> pb.Canary:
        found = look(gateway, number)
        assert [*client.promote(2)][-1].phase == pb.PHASE_DONE
        return found

    with monkeypatch.context() as between:
        between.setattr(canary_commands, "_running_canary", promoted_after)
        done = stop()
    assert done.exit_code == PreconditionError.exit_code, done.output
    assert "it was promoted" in done.output
    assert client.states() == {1: "PREVIOUS", 2: "ACTIVE"}
    assert client.rollback(confirm=True, to=1).done
    # Promoted, and not switched yet.
    begin(client, pb.Canary(share=1.0))
    ask(client, "any", 0)
    run = gateway.activations.promote_canary(2)
    with refused(PreconditionError, "it was promoted"):
        client.rollback(confirm=True, canary=2, to=1)
    assert [*run.events()][-1].phase is Phase.DONE
    assert client.states()[2] == "ACTIVE"


def test_what_is_no_canary_is_refused(client: Client) -> None:
    for canary in (
        pb.Canary(share=1.5), pb.Canary(share=float("nan")), pb.Canary(),
        pb.Canary(share=0.5, steps=[0.4]), pb.Canary(share=0.5, steps=[0.6]),
        pb.Canary(share=0.5, most_errors=2), pb.Canary(share=0.5, largest_p99_ratio=-1),
        pb.Canary(share=0.5, largest_p99_ratio=float("inf")),
        pb.Canary(share=0.5, every=Duration(seconds=2**62)),
    ):  # fmt: skip
        with refused(InvalidInputError, "canary"):
            next(iter(client.activate(2, canary=canary)))
    with refused(PreconditionError, "is active already"):
        next(iter(client.activate(1, canary=pb.Canary(share=0.5))))
    with refused(PreconditionError, "cutover"):
        next(iter(client.activate(2, canary=pb.Canary(share=0.5), rollout="dual")))
