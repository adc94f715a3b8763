"""Define the operator's commands: each makes calls of nobackfill.wire and prints the answers."""

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
    exit_on_error,
    format_examples,
    print_result,
    read_tuning_file,
)
from nobackfill.terminal import escape_control
from nobackfill.v1 import gallery_pb2, release_pb2, upgrade_pb2
from nobackfill.v1 import release_pb2 as pb
from nobackfill.wire.connection import call_until_success, open_channel
from nobackfill.wire.gateway import ROLLOUTS, Gateway


def format_healing(healing: upgrade_pb2.Healing) -> str:
    """Describe in one line how many items of a gallery are re-embedded, and what that has cost.

    It says `counting items` while the share is not known. The last failure is at the end, if there
    is one; it is not escaped.
    """
    share = "counting items"
    if healing.HasField("carried"):
        native = healing.items - healing.carried
        share = f"{native} of {healing.items} native ({native / max(1, healing.items):.1%})"
    seconds = healing.seconds.ToTimedelta().total_seconds()
    line = (
        f"  healing: {share}, {healing.today} of {healing.a_day} today, "
        f"{healing.embedded} embedded in {seconds:.1f} s from {healing.bytes_read} bytes, "
        f"{healing.failed} failed"
    )
    return line + (f": {healing.last_failure}" if healing.last_failure else "")


_STATE = release_pb2.ReleaseState.Name
_STATES = release_pb2.ReleaseState.values()
_PHASE = release_pb2.Phase.Name


@contextmanager
def connect(address: str) -> Iterator[Gateway]:
    """Connect to a gateway for the length of a block.

    Credentials come from the variables NOBACKFILL_*_FILE.

    Args:
        address: one address, or several with commas, of which the first that answers is used. One
            address is first called by the block, and its calls are not retried.

    Raises:
        UnavailableError: none of several gateways answers.
        NotPermittedError: several are named, and the one that answers refuses the token.
        ConfigurationError: the address has another form, or a credential file cannot be used.
    """
    several = "," in address
    with Gateway(address, retries=several) as gateway:
        if several:
            gateway.list_releases()
        yield gateway


@app.command(
    epilog=format_examples("gateway releases", "gateway releases --server gateway.example:50051")
)
def releases(server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """List the published releases and their states at this gateway.

    Withdrawn releases are listed with their reason. Before the first publication the list is empty.
    """
    with exit_on_error(), connect(server) as gateway:
        answer = release_pb2.ListReleasesResponse(releases=gateway.list_releases())
    rows = [["release", "state", "dim", "metric", "upgrades from"]]
    rows += [
        [str(r.number), _word(_STATE(r.state)), str(r.dim), r.metric, _numbers(r.upgrades_from)]
        for r in answer.releases
    ]
    # Columns that few releases fill: left out where they are empty, so that a terminal of 80
    # characters shows whole words.
    for head, cells in (
        ("searches directly", [_numbers(r.searches_directly) for r in answer.releases]),
        ("adapter to", [_numbers(_adapted(r)) for r in answer.releases]),
        ("old queries until", [_end(r) for r in answer.releases]),
        ("reason", [r.reason for r in answer.releases]),
    ):
        if any(cells):
            for row, cell in zip(rows, [head, *cells], strict=True):
                row.append(cell)
    result = message_to_json(answer)
    for entry in result.get("releases", []):
        entry["manifest"] = json.loads(entry["manifest"])
    print_result(as_json, result, rows)


@app.command(epilog=format_examples("gateway status", "gateway status --json"))
def status(server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Show the galleries, and what keeps the gateway from answering.

    The column `note` says why a gallery has not moved to the active release, or why it is not
    served. Lines below the table name releases that failed or are being activated, and a model
    server that does not answer.

    Galleries are sorted by name.
    """
    with exit_on_error(), connect(server) as gateway:
        answer = gallery_pb2.ListGalleriesResponse(galleries=gateway.list_galleries())
        listed = gateway.list_releases()
        is_up = _can_embed(server)
    by_state = {state: [one for one in listed if one.state == state] for state in _STATES}
    failed = {one.number: one.reason for one in by_state[release_pb2.RELEASE_STATE_FAILED]}
    active = max((one.number for one in by_state[release_pb2.RELEASE_STATE_ACTIVE]), default=0)
    rows = [["gallery", "items", "answers with", "spaces", "note"]]
    for gallery in answer.galleries:
        spaces = ", ".join(
            f"{space.release}: {space.items} {_word(gallery_pb2.SpaceState.Name(space.state))}"
            + (f" until {_end(space)}" if _end(space) else "")
            for space in gallery.spaces
        )
        if gallery.set_aside:
            rows.append([gallery.name, "?", "set aside", "", gallery.set_aside])
        else:
            release = f"release {gallery.release}"
            rows.append([gallery.name, str(gallery.items), release, spaces, gallery.note])
    notes = [
        f"release {number} failed: {reason}; run `gateway activate {number}` to retry"
        for number, reason in failed.items()
    ]
    notes += [
        f"release {one.number} is being activated; follow it with `gateway watch`, and a canary "
        "with `gateway canary watch`"
        for one in by_state[release_pb2.RELEASE_STATE_ACTIVATING]
    ]
    if not active:
        notes.append(
            "no release is active yet, so galleries cannot be made or searched; the gateway begins "
            "with the newest published release that `gateway releases` lists"
        )
    if not is_up:
        notes.append(
            "the model server (Triton) does not answer, so images cannot be put or searched; read "
            "the log of the gateway"
        )
    result = {"failed_releases": failed, "active_release": active, "model_server_up": is_up}
    print_result(as_json, message_to_json(answer) | result, rows)
    for note in () if as_json else notes:
        typer.echo(escape_control(note))


def _can_embed(server: str) -> bool:
    """Ask the gateway's health service whether models can embed images and texts."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    request = health_pb2.HealthCheckRequest(service="nobackfill.v1.SearchService")
    with open_channel(server) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        count = server.count(",") + 1
        answer = call_until_success(
            lambda seconds: check(request, timeout=seconds), server, seconds=10, gateway_count=count
        )
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@app.command(epilog=format_examples("gateway activate 2", "gateway activate 2 --rollout dual"))
def activate(
    number: Number,
    rollout: Rollout = None,
    settings: ActivationSettings = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Upgrade every gallery to a release, and switch to it.

    Progress goes to stderr. Ctrl-C ends this command only; the activation goes on.

    If the release is active already, galleries that stayed behind are upgraded. It fails if the
    release is not published, is older than the active one, or another activation runs.
    """
    if rollout is not None and rollout not in ROLLOUTS:
        raise typer.BadParameter(
            f"--rollout: expected one of {', '.join(sorted(ROLLOUTS))}, got {rollout!r}"
        )
    with exit_on_error(), connect(server) as gateway:
        numbers = read_tuning_file(settings, ACTIVATION)
        events = gateway.activate(
            number,
            rollout=rollout or "unspecified",
            spare_cores=numbers["spare_cores"],
            old_space_seconds=int(numbers["old_space_seconds"]),
        )
        print_activation_progress(number, events, as_json)


def print_activation_progress(
    release: int,
    events: Iterable[pb.ActivateReleaseResponse],
    as_json: bool,
    *,
    stop_at_canary: bool = False,
) -> None:
    """Print the progress of an activation to stderr, and its last event to stdout; blocks until it
    ends.

    Errors of the call pass through, also when the activation fails. Without any event it prints an
    empty one.

    Args:
        release: the release that is activated.
        events: the answers of the call ActivateRelease, read to the end.
        as_json: print the last event as JSON, not as a table.
        stop_at_canary: return once a canary has begun, not only when the activation ends.

    Raises:
        ValueError: a phase is unknown here, as from a newer gateway.
    """
    event = pb.ActivateReleaseResponse()
    for event in events:
        progress = f" {event.done}/{event.total}" if event.total else ""
        text = f"{_word(_PHASE(event.phase))}{progress} {event.message}"
        typer.echo(escape_control(text.rstrip()), err=True)
        if stop_at_canary and event.phase == pb.PHASE_CANARY:
            break
    outcome = "canary" if event.phase == pb.PHASE_CANARY else "galleries left behind"
    rows = [["release", outcome], [str(release), event.message or "none"]]
    print_result(as_json, message_to_json(event), rows)


@app.command(epilog=format_examples("gateway rollback", "gateway rollback --yes"))
def rollback(
    confirm: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Roll back. Without it, only list the items that searches would no longer find, "
            "and change nothing.",
        ),
    ] = (False),
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Return to the release that was active before.

    Without --yes, only count and list the items that the older release would not find. Nothing is
    computed.

    It fails if there is no release to return to. A running activation is cancelled.
    """
    with exit_on_error(), connect(server) as gateway:
        answer = gateway.rollback()
        if confirm:
            # The explicit target makes a repeated call safe: it cannot go back two releases.
            answer = gateway.rollback(confirm=True, to=answer.number)
    show_rollback(answer, as_json)


def show_rollback(answer: pb.RollbackReleaseResponse, as_json: bool) -> None:
    """Print on stdout what a rollback has done or would do; a table shows the first 20 lost items.

    If nothing was done, a table is followed by a line on stderr that says so.

    Args:
        answer: the gateway's answer.
        as_json: print the whole answer as JSON.
    """
    rows = [["release", "done", "items not found there"]]
    rows.append([str(answer.number), "yes" if answer.done else "no", str(answer.lost_items)])
    rows += [["", "", f"{lost.gallery}: {lost.id}"] for lost in answer.lost[:20]]
    print_result(as_json, message_to_json(answer), rows)
    if not (answer.done or as_json):
        typer.echo("nothing was changed; `gateway rollback --yes` rolls back", err=True)


@app.command(epilog=format_examples("gateway retire"))
def retire(server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Delete the vectors and models of every older release.

    Rollback to them is impossible afterwards.

    It fails while an activation runs. Galleries that stayed with an older release keep their
    vectors.
    """
    with exit_on_error(), connect(server) as gateway:
        answer = release_pb2.RetireReleaseResponse(retired=gateway.retire())
    print_result(
        as_json, message_to_json(answer), [["retired"], [_numbers(answer.retired) or "none"]]
    )


@app.command(epilog=format_examples("gateway estimate photos 2"))
def estimate(
    gallery: Annotated[
        str, typer.Argument(help="Name of the gallery whose upgrade is estimated; not changed.")
    ],
    number: Number,
    settings: ActivationSettings = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Estimate what an upgrade to a release costs.

    The gateway upgrades a small sample and measures seconds, kB on disk and kB of memory. The
    indexes of the new vectors are built after the upgrade. The route is the list of releases whose
    upgrades are applied. The quality is the mAP after the upgrade as a share of the mAP after
    re-embedding, as the publisher measured it. Items that lack an input of the upgrade are counted
    as left behind. Nothing is changed.

    It fails if the gallery or the release does not exist, or if no upgrade leads there.
    """
    with exit_on_error(), connect(server) as gateway:
        share = read_tuning_file(settings, ACTIVATION)["spare_cores"]
        answer = gateway.estimate_upgrade(gallery, number, spare_cores=share)
    rows = [
        ["items", "seconds", "index seconds", "kB on disk", "kB of memory", "route", "quality",
         "left behind"],
        [
            str(answer.items), _seconds(answer.duration), _seconds(answer.index_duration),
            f"{answer.bytes / 1000:.0f}", f"{answer.memory_bytes / 1000:.0f}",
            " > ".join(map(str, answer.route)),
            f"{answer.expected_kept:.1%}", str(answer.left_behind),
        ],
    ]  # fmt: skip
    print_result(as_json, message_to_json(answer), rows)


@app.command(
    epilog=format_examples(
        "gateway watch", "gateway watch photos", "gateway watch photos --by camera"
    )
)
def watch(
    gallery: Annotated[
        str | None,
        typer.Argument(
            help="Name of the gallery whose upgrade is followed to its end.",
            show_default="the states of all releases, until Ctrl-C",
        ),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            help="Metadata key, such as camera: quality is measured for each of its values, too, "
            "and shown worst first. It needs a gallery. Without --by, no quality is shown.",
        ),
    ] = "",
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Follow a gallery's upgrade, or the states of all releases.

    Each change prints one line. An upgrade is followed to its end, releases until Ctrl-C.

    It fails if there is no such gallery, or no item has the key of --by. An upgrade that is over
    prints one line.
    """
    with exit_on_error(), connect(server) as gateway:
        if gallery is None:
            for snapshot in gateway.watch_releases():
                states = {str(release.number): _word(_STATE(release.state)) for release in snapshot}
                line = ", ".join(f"{number}: {state}" for number, state in states.items())
                typer.echo(json.dumps(states) if as_json else line)
            return
        quality = None
        for job in gateway.watch_upgrade(gallery, by_key=by):
            if as_json:
                typer.echo(json.dumps(message_to_json(job)))
                continue
            typer.echo(escape_control(format_upgrade_progress(job)))
            if job.HasField("healing"):
                typer.echo(escape_control(format_healing(job.healing)))
            for group in job.quality.subgroups if job.quality != quality else ():
                typer.echo(escape_control(_subgroup(group)))
            quality = job.quality


def format_upgrade_progress(job: upgrade_pb2.UpgradeProgress) -> str:
    """Describe an upgrade in one line: state, items done, and the rate and time left if known.

    The gateway's message is at the end, and not escaped.

    Raises:
        ValueError: the state is unknown here, as from a newer gateway.
    """
    text = f"{_word(upgrade_pb2.UpgradeState.Name(job.state))} {job.done}/{job.total}"
    if job.items_per_second > 0:
        text += f" {job.items_per_second:.0f} items/s, {job.remaining.seconds} s left"
    return f"{text} {job.message}".rstrip()


def _subgroup(group: upgrade_pb2.Subgroup) -> str:
    """Describe one value of a metadata key: the share of right first answers, now and before."""
    value = getattr(group.value, group.value.WhichOneof("kind") or "text")
    if not group.HasField("cmc1"):
        return f"  {value}: {group.items} items, too few to measure"
    before = f" (before {group.cmc1_before:.1%})" if group.HasField("cmc1_before") else ""
    re_embedded = f"{group.re_embedded} of {group.items} items re-embedded"
    return f"  {value}: right first {group.cmc1:.1%}{before}, {re_embedded}"


def message_to_json(message: Message) -> dict[str, Any]:
    """Convert a message to JSON types, with the protocol's field names and with zero values
    present.

    Enums become names (unknown ones numbers), integers of 64 bits text, bytes base64. A submessage
    that is not set is left out.
    """
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _word(name: str) -> str:
    """Shorten an enum name: RELEASE_STATE_ACTIVE -> active."""
    for prefix in ("RELEASE_STATE_", "SPACE_STATE_", "PHASE_", "UPGRADE_STATE_"):
        name = name.removeprefix(prefix)
    return name.lower()


def _end(message: release_pb2.Release | gallery_pb2.SpaceInfo) -> str:
    """Format the time (UTC) at which queries of a space end; empty if none is announced."""
    if not message.HasField("ends_at"):
        return ""
    return f"{message.ends_at.ToDatetime():%Y-%m-%d %H:%M} UTC"


def _seconds(duration: Duration) -> str:
    return f"{duration.ToTimedelta().total_seconds():.1f}"


def _numbers(numbers: Any) -> str:
    return ", ".join(map(str, numbers))


def _adapted(release: release_pb2.Release) -> list[int]:
    """Return the releases whose vectors a release searches through its query adapters."""
    return [one["to_release"] for one in json.loads(release.manifest).get("adapters", ())]
