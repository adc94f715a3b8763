"""The operator's commands: thin over the calls of nobackfill.wire, each of them made once."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from nobackfill.server.cli.app import (
    ACTIVATION,
    DEFAULT_SERVER,
    ActivationSettings,
    Json,
    Number,
    Rollout,
    Server,
    app,
    exit_codes,
    show,
    tuning,
)
from nobackfill.terminal import visible
from nobackfill.v1 import gallery_pb2, release_pb2, upgrade_pb2
from nobackfill.v1 import release_pb2 as pb
from nobackfill.wire.gateway import ROLLOUTS, Gateway

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
    """List the published releases, and what this gateway does with each."""
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
    """Show every gallery, its spaces and items, and the releases that failed.

    A note says why a gallery stays behind or is set aside.
    """
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
    number: Number,
    rollout: Rollout = None,
    settings: ActivationSettings = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Make a release the one that answers.

    Progress goes to stderr. Ctrl-C ends the command and leaves the activation running.
    """
    if rollout is not None and rollout not in ROLLOUTS:
        raise typer.BadParameter(f"expected one of {', '.join(sorted(ROLLOUTS))}, got {rollout!r}")
    with exit_codes(), asking(server) as gateway:
        numbers = tuning(settings, ACTIVATION)
        events = gateway.activate(
            number,
            rollout=rollout or "unspecified",
            spare_cores=numbers["spare_cores"],
            old_space_seconds=int(numbers["old_space_seconds"]),
        )
        report(number, events, as_json)


def report(
    number: int,
    events: Iterable[pb.ActivateReleaseResponse],
    as_json: bool,
    *,
    canary: bool = False,
) -> None:
    """Tell of an activation on stderr until it ends or, with `canary`, until a canary has begun."""
    event = pb.ActivateReleaseResponse()
    for event in events:
        progress = f" {event.done}/{event.total}" if event.total else ""
        text = f"{_word(_PHASE(event.phase))}{progress} {event.message}"
        typer.echo(visible(text.rstrip()), err=True)
        if canary and event.phase == pb.PHASE_CANARY:
            break
    what = "canary" if event.phase == pb.PHASE_CANARY else "left behind"
    show(as_json, plain(event), [["release", what], [str(number), event.message]])


@app.command()
def rollback(
    confirm: Annotated[bool, typer.Option("--yes", help="do it; else only say what it costs")] = (
        False
    ),
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Return to the release before.

    Without --yes, only count and list the items that would not be found then.
    """
    with exit_codes(), asking(server) as gateway:
        answer = gateway.rollback()
        if confirm:
            # To the release that was looked at: repeated, this goes back no further.
            answer = gateway.rollback(confirm=True, to=answer.number)
    show_rollback(answer, as_json)


def show_rollback(answer: pb.RollbackReleaseResponse, as_json: bool) -> None:
    """Show what a rollback has done or would do."""
    rows = [["release", "done", "items not found there"]]
    rows.append([str(answer.number), "yes" if answer.done else "no", str(answer.lost_items)])
    rows += [["", "", f"{lost.gallery}: {lost.id}"] for lost in answer.lost[:20]]
    show(as_json, plain(answer), rows)


@app.command()
def retire(server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Drop the spaces and models of every older release.

    No rollback is possible after it.
    """
    with exit_codes(), asking(server) as gateway:
        answer = release_pb2.RetireReleaseResponse(retired=gateway.retire())
    show(as_json, plain(answer), [["retired"], [_numbers(answer.retired) or "none"]])


@app.command()
def estimate(
    gallery: Annotated[str, typer.Argument(help="gallery")],
    number: Number,
    settings: ActivationSettings = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Estimate the items, seconds and bytes of an upgrade.

    A few items are measured. Nothing is changed.
    """
    with exit_codes(), asking(server) as gateway:
        share = tuning(settings, ACTIVATION)["spare_cores"]
        answer = gateway.estimate_upgrade(gallery, number, spare_cores=share)
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
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Follow the upgrade of a gallery to its end, or the states of all releases until Ctrl-C.

    Each change is one line.
    """
    with exit_codes(), asking(server) as gateway:
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
