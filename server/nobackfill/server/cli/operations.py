"""The operator's commands: thin over the calls of nobackfill.wire, each of them made once."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from nobackfill.digests import percent
from nobackfill.errors import InvalidInputError
from nobackfill.server.cli.app import (
    DEFAULT_SERVER,
    Json,
    Rollout,
    Server,
    SpareCores,
    app,
    exit_codes,
    show,
)
from nobackfill.terminal import visible
from nobackfill.v1 import gallery_pb2, release_pb2, upgrade_pb2
from nobackfill.v1 import release_pb2 as pb
from nobackfill.wire.gateway import ROLLOUTS, Gateway

# A canary in the operator's words: shares in percent, times, a line for what it shows.

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def canary_of(
    canary: str, shadow: str, steps: str, every: str, most_errors: str, ratio: float
) -> pb.Canary | None:
    """What the options of `gateway activate` ask for; None: no canary. Raises BadParameter."""
    if canary and shadow:
        raise typer.BadParameter("expected --canary or --shadow, not both")
    if bool(steps) != bool(every):
        raise typer.BadParameter("--steps and --every go together: --steps 5,25,100 --every 10m")
    given = [_share(step, "--steps") for step in steps.split(",")] if steps else []
    first = canary or shadow
    if first:
        given.insert(0, _share(first, "--shadow" if shadow else "--canary"))
    if not given:
        if most_errors or ratio:
            raise typer.BadParameter("--max-errors and --max-p99-ratio need --canary or --shadow")
        return None
    if len(given) > 1 and given[0] == given[1]:
        # `--canary 5% --steps 5,25,100` says the first step twice.
        del given[0]
    asked = pb.Canary(
        share=given[0],
        steps=given[1:],
        shadow=bool(shadow),
        most_errors=_share(most_errors, "--max-errors") if most_errors else 0.0,
        largest_p99_ratio=ratio,
    )
    if every:
        asked.every.FromMilliseconds(int(1000 * _interval_seconds(every)))
    return asked


def line(answer: pb.WatchCanaryResponse) -> str:
    """One line of what it shows so far."""
    if not answer.release:
        return "no canary since the gateway's start"
    state = pb.CanaryState.Name(answer.state).removeprefix("CANARY_STATE_").lower()
    share = f" {answer.canary.share:.3g} of the callers," if answer.canary.share else ""
    kind = "shadow" if answer.canary.shadow else "canary"
    alike = f"{answer.compared} compared"
    if answer.HasField("overlap"):
        alike += f", overlap {answer.overlap:.3f}"
    if answer.HasField("rank_correlation"):
        alike += f", rank correlation {answer.rank_correlation:.3f}"
    evidence = max(answer.evidence.items(), key=lambda item: item[1], default=("none", 0.0))
    against = f"evidence {evidence[1]:.2g} of {answer.stops_at:.0f} ({evidence[0]})"
    return (
        f"{kind} of release {answer.release} {state},{share} {alike}; old {_pair(answer.old_pair)};"
        f" new {_pair(answer.new_pair)}; {against}{'; ' if answer.message else ''}{answer.message}"
    )


def _pair(pair: pb.CanaryPair) -> str:
    parts = [f"{pair.queries} queries", f"{pair.errors} errors", f"{pair.empty} empty"]
    if pair.HasField("p99"):
        parts.append(f"p50 {1000 * pair.p50:.1f} p99 {1000 * pair.p99:.1f} ms")
    if pair.HasField("score"):
        parts.append(f"score {pair.score:.3f}")
    if pair.approved or pair.rejected:
        parts.append(f"{pair.approved} approved {pair.rejected} rejected of {pair.sessions}")
    return " ".join(parts)


def _share(text: str, option: str) -> float:
    try:
        return percent(text)
    except InvalidInputError as error:
        raise typer.BadParameter(f"{option}: {error}") from error


def _interval_seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or not float(found[1]):
        raise typer.BadParameter(f"--every: expected a time as 30s, 10m, 2h or 1d, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


# How far a gallery has healed, in words.


def healed(healing: upgrade_pb2.Healing) -> str:
    """One line: how far a gallery has healed, and what that has cost."""
    share = "counted"
    if healing.HasField("carried"):
        native = healing.items - healing.carried
        share = f"{native} of {healing.items} native ({native / max(1, healing.items):.1%})"
    seconds = healing.seconds.ToTimedelta().total_seconds()
    line = (
        f"  healing: {share}, {healing.today} of {healing.a_day} today, {healing.embedded} made in "
        f"{seconds:.1f} s from {healing.bytes_read} bytes, {healing.failed} in vain"
    )
    return line + (f": {healing.last_failure}" if healing.last_failure else "")


_STATE = release_pb2.ReleaseState.Name
_PHASE = release_pb2.Phase.Name


@contextmanager
def asking(server: str) -> Iterator[Gateway]:
    """A connection; of several gateways, to one that answers. Raises UnavailableError where none
    does."""
    several = "," in server
    with Gateway(server, retries=several) as gateway:
        if several:
            gateway.list_releases()
        yield gateway


@app.command()
def releases(server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """What is published, and what this gateway does with it."""
    with exit_codes(), asking(server) as gateway:
        answer = release_pb2.ListReleasesResponse(releases=gateway.list_releases())
    rows = [["release", "state", "dim", "metric", "upgrades from", "searches directly"]]
    rows[0] += ["old queries until", "reason"]
    rows += [
        [
            str(r.number), _word(_STATE(r.state)), str(r.dim), r.metric,
            _numbers(r.upgrades_from), _numbers(r.searches_directly), _end(r), r.reason,
        ]
        for r in answer.releases
    ]  # fmt: skip
    result = plain(answer)
    for entry in result.get("releases", []):
        entry["manifest"] = json.loads(entry["manifest"])
    show(as_json, result, rows)


@app.command()
def status(server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Galleries, their spaces, why one stays behind or is set aside, and releases that failed."""
    with exit_codes(), asking(server) as gateway:
        answer = gallery_pb2.ListGalleriesResponse(galleries=gateway.list_galleries())
        failed = {
            release.number: release.reason
            for release in gateway.list_releases()
            if release.state == release_pb2.RELEASE_STATE_FAILED
        }
    rows = [["gallery", "items", "answers with", "spaces", "note"]]
    for g in answer.galleries:
        spaces = ", ".join(
            f"{s.release}: {s.items} {_word(gallery_pb2.SpaceState.Name(s.state))}"
            + (f" until {_end(s)}" if _end(s) else "")
            for s in g.spaces
        )
        if g.set_aside:
            rows.append([g.name, "?", "set aside", "", g.set_aside])
        else:
            rows.append([g.name, str(g.items), f"release {g.release}", spaces, g.note])
    for number, reason in failed.items():
        again = f"`gateway activate {number}` tries it again"
        rows.append(["", "", "", "", f"release {number} failed: {reason}; {again}"])
    show(as_json, plain(answer) | {"failed_releases": failed}, rows)


@app.command()
def activate(
    number: Annotated[int, typer.Argument(min=1, max=2**31 - 1, help="release to serve")],
    rollout: Rollout = None,
    spare_cores: SpareCores = None,
    old_space_seconds: Annotated[
        int, typer.Option(help="answer old queries so long; 0: until `gateway retire`")
    ] = 0,
    canary: Annotated[str, typer.Option(help="share of callers that meet it first: 5%")] = "",
    shadow: Annotated[str, typer.Option(help="share that it answers only to compare: 5%")] = "",
    steps: Annotated[str, typer.Option(help="shares one after the other: 5,25,100")] = "",
    every: Annotated[str, typer.Option(help="time of each step: 30s, 10m, 2h, 1d")] = "",
    promote: Annotated[bool, typer.Option("--promote", help="end its canary: for all")] = False,
    max_errors: Annotated[
        str, typer.Option(help="errors that stop a canary", show_default="1%")
    ] = "",
    max_p99_ratio: Annotated[
        float | None, typer.Option(help="p99 by the old one's that does", show_default="2")
    ] = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Make a release the one that answers; progress on stderr. Ctrl-C leaves it running. With
    --canary, --shadow or --steps it returns when that has begun."""
    if rollout is not None and rollout not in ROLLOUTS:
        raise typer.BadParameter(f"expected one of {', '.join(sorted(ROLLOUTS))}, got {rollout!r}")
    tried = canary_of(canary, shadow, steps, every, max_errors, max_p99_ratio or 0.0)
    if promote and tried is not None:
        raise typer.BadParameter("expected --promote alone: it ends a canary")
    with exit_codes(), asking(server) as gateway:
        event = release_pb2.ActivateReleaseResponse()
        events = gateway.promote(number) if promote else gateway.activate(
            number, rollout=rollout or "unspecified", spare_cores=spare_cores or 0.0,
            old_space_seconds=old_space_seconds, canary=tried,
        )  # fmt: skip
        for event in events:
            progress = f" {event.done}/{event.total}" if event.total else ""
            text = f"{_word(_PHASE(event.phase))}{progress} {event.message}"
            typer.echo(visible(text.rstrip()), err=True)
            if event.phase == release_pb2.PHASE_CANARY and not promote:
                break
        what = "canary" if event.phase == release_pb2.PHASE_CANARY else "left behind"
        show(as_json, plain(event), [["release", what], [str(number), event.message]])


@app.command()
def rollback(
    confirm: Annotated[bool, typer.Option("--yes", help="do it; else only say what it costs")] = (
        False
    ),
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Return to the release before. Without --yes: count and list what would not be found then."""
    with exit_codes(), asking(server) as gateway:
        answer = gateway.rollback()
        if confirm:
            # To the release that was looked at: repeated, this goes back no further.
            answer = gateway.rollback(confirm=True, to=answer.number)
    rows = [["release", "done", "items not found there"]]
    rows.append([str(answer.number), "yes" if answer.done else "no", str(answer.lost_items)])
    rows += [["", "", f"{lost.gallery}: {lost.id}"] for lost in answer.lost[:20]]
    show(as_json, plain(answer), rows)


@app.command()
def retire(server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Drop the spaces and models of every older release. No rollback after it."""
    with exit_codes(), asking(server) as gateway:
        answer = release_pb2.RetireReleaseResponse(retired=gateway.retire())
    show(as_json, plain(answer), [["retired"], [_numbers(answer.retired) or "none"]])


@app.command()
def estimate(
    gallery: Annotated[str, typer.Argument(help="gallery")],
    number: Annotated[int, typer.Argument(min=1, max=2**31 - 1, help="release to carry it to")],
    spare_cores: SpareCores = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Items, seconds and bytes of an upgrade, measured on a few items; nothing is changed."""
    with exit_codes(), asking(server) as gateway:
        answer = gateway.estimate_upgrade(gallery, number, spare_cores=spare_cores or 0.0)
    rows = [
        ["items", "seconds", "then indexed", "bytes", "memory", "route", "kept of new/new",
         "left behind"],
        [
            str(answer.items), _seconds(answer.duration), _seconds(answer.index_duration),
            str(answer.bytes), str(answer.memory_bytes), " > ".join(map(str, answer.route)),
            f"{answer.expected_kept:.1%}", str(answer.left_behind),
        ],
    ]  # fmt: skip
    show(as_json, plain(answer), rows)


@app.command()
def watch(
    gallery: Annotated[str | None, typer.Argument(help="its upgrade; without: releases")] = None,
    by: Annotated[
        str, typer.Option(help="metadata key: quality of each of its values, worst first")
    ] = "",
    canary: Annotated[bool, typer.Option("--canary", help="both pairs of a canary")] = False,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Follow one gallery's upgrade or a canary to its end, or the releases until Ctrl-C, a line
    each."""
    with exit_codes(), asking(server) as gateway:
        if canary:
            for shown in gateway.watch_canary():
                typer.echo(json.dumps(plain(shown)) if as_json else visible(line(shown)))
            return
        if gallery is None:
            for seen in gateway.watch_releases():
                states = [f"{r.number}: {_word(_STATE(r.state))}" for r in seen]
                by_number = {str(r.number): _word(_STATE(r.state)) for r in seen}
                typer.echo(json.dumps(by_number) if as_json else ", ".join(states))
            return
        quality = None
        for job in gateway.watch_upgrade(gallery, by=by):
            if as_json:
                typer.echo(json.dumps(plain(job)))
                continue
            typer.echo(visible(progress(job)))
            if job.HasField("healing"):
                typer.echo(visible(healed(job.healing)))
            for group in job.quality.subgroups if job.quality != quality else ():
                typer.echo(visible(_subgroup(group)))
            quality = job.quality


def progress(job: upgrade_pb2.UpgradeProgress) -> str:
    """One line: state, items done, and the rate and the time left while items are carried."""
    text = f"{_word(upgrade_pb2.UpgradeState.Name(job.state))} {job.done}/{job.total}"
    if job.items_per_second > 0:
        text += f" {job.items_per_second:.0f} items/s, {job.remaining.seconds} s left"
    return f"{text} {job.message}".rstrip()


def _subgroup(group: upgrade_pb2.Subgroup) -> str:
    """One line: value, share of right first answers, and what it was before."""
    value = getattr(group.value, group.value.WhichOneof("kind") or "text")
    if not group.HasField("cmc1"):
        return f"  {value}: {group.items} items, too few to ask"
    before = f" (before {group.cmc1_before:.1%})" if group.HasField("cmc1_before") else ""
    again = f"{group.re_embedded} of {group.items} items embedded again"
    return f"  {value}: right first {group.cmc1:.1%}{before}, {again}"


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON shows it, with the contract's field names and zeros written out."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _word(name: str) -> str:
    """RELEASE_STATE_ACTIVE -> active"""
    for prefix in ("RELEASE_STATE_", "SPACE_STATE_", "PHASE_", "UPGRADE_STATE_"):
        name = name.removeprefix(prefix)
    return name.lower()


def _end(message: release_pb2.Release | gallery_pb2.SpaceInfo) -> str:
    """When queries in a space are refused, in UTC; empty where no end is announced."""
    if not message.HasField("ends_at"):
        return ""
    return f"{message.ends_at.ToDatetime():%Y-%m-%d %H:%M} UTC"


def _seconds(duration: Duration) -> str:
    return f"{duration.ToTimedelta().total_seconds():.1f}"


def _numbers(numbers: Any) -> str:
    return ", ".join(map(str, numbers))
