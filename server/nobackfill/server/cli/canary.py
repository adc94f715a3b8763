"""Define `gateway canary …`: let a new release answer a share of the callers before all others."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.digests import parse_percent
from nobackfill.errors import InvalidInputError, PreconditionError
from nobackfill.server.cli.app import (
    CANARY,
    DEFAULT_SERVER,
    Json,
    Number,
    Server,
    app,
    exit_on_error,
    format_examples,
    read_tuning_file,
    settings_option,
)
from nobackfill.server.cli.operations import (
    connect,
    message_to_json,
    print_activation_progress,
    show_rollback,
)
from nobackfill.terminal import escape_control
from nobackfill.v1 import release_pb2 as pb
from nobackfill.wire.gateway import Gateway

canary_commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Let a new release answer a share of the callers first.",
)
app.add_typer(canary_commands, name="canary")

_Steps = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT,…",
        help="Raise the share to each of these percentages in turn, such as 25,100, and stay at "
        "each for the time of --every. After 100, the release is promoted: it answers all callers. "
        "Without it, the share stays as it is.",
    ),
]
_Every = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Stay so long at each share of --steps: a number and s, m, h or d (seconds, minutes, "
        "hours, days), such as 10m. Required with --steps, and refused without --steps.",
    ),
]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@canary_commands.command(
    epilog=format_examples(
        "gateway canary start 2 --share 5%",
        "gateway canary start 2 --steps 5,25,100 --every 10m",
        "gateway canary start 2 --share 100% --shadow",
    )
)
def start(
    number: Number,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Let the new release answer this share of the callers at first, such as 5%. "
            "Required unless --steps is given.",
            show_default="the first of --steps",
        ),
    ] = None,
    steps: _Steps = None,
    every: _Every = None,
    shadow: Annotated[
        bool,
        typer.Option(
            "--shadow",
            help="Only compare: the old release answers all callers, and the new one repeats the "
            "queries of the share. Without it, callers of the share get the new answers.",
        ),
    ] = False,
    settings: Annotated[Path | None, settings_option(CANARY)] = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Let a new release answer a share of the callers.

    The galleries are upgraded first. The command returns once the canary has begun. The gateway
    stops the canary if the new release is measurably worse than the old one.

    It fails if the release is not published, is older than the active one, or another activation
    runs.
    """
    canary = _canary_of(share, steps, every)
    canary.shadow = shadow
    with exit_on_error(), connect(server) as gateway:
        numbers = read_tuning_file(settings, CANARY)
        canary.most_errors = numbers["most_errors"]
        canary.largest_p99_ratio = numbers["largest_p99_ratio"]
        events = gateway.activate(
            number,
            spare_cores=numbers["spare_cores"],
            old_space_seconds=int(numbers["old_space_seconds"]),
            canary=canary,
        )
        print_activation_progress(number, events, as_json, stop_at_canary=True)


@canary_commands.command(
    epilog=format_examples("gateway canary step 2", "gateway canary step 2 --share 25%")
)
def step(
    number: Number,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Let the release answer this larger share of the callers, such as 25%.",
            show_default="the next of the canary's --steps",
        ),
    ] = None,
    steps: _Steps = None,
    every: _Every = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Let the release of a canary answer a larger share of the callers.

    Without --share and --steps, go to the canary's next step now. With --share alone, the share
    stays until the next command. --steps and --every need each other, and the first step
    holds at once.

    It fails if no canary of the release runs, if there is no further step, or if the share would
    shrink.
    """
    change = _canary_of(share, steps, every) if share or steps or every else None
    with exit_on_error(), connect(server) as gateway:
        canary = _running_canary(gateway, number)
        if change is not None:
            canary.share, canary.steps[:] = change.share, change.steps
            canary.every.CopyFrom(change.every)
        elif canary.steps:
            canary.share = canary.steps.pop(0)
        else:
            raise PreconditionError(
                f"the canary of release {number} has no further step; raise its share with "
                f"`gateway canary step {number} --share 50%`, or end it with `gateway canary "
                f"promote {number}`"
            )
        print_activation_progress(
            number, gateway.activate(number, canary=canary), as_json, stop_at_canary=True
        )


@canary_commands.command(epilog=format_examples("gateway canary promote 2"))
def promote(number: Number, server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """End a canary by letting its release answer all callers.

    The command returns when the switch has ended. It fails if no canary of the release runs, or if
    the canary has not answered a query yet.
    """
    with exit_on_error(), connect(server) as gateway:
        print_activation_progress(number, gateway.promote(number), as_json)


@canary_commands.command(epilog=format_examples("gateway canary stop 2"))
def stop(number: Number, server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """End a canary: the old release answers all callers again.

    It fails if no canary of the release runs, also if it was promoted before. Items that the old
    release does not find are listed.
    """
    with exit_on_error(), connect(server) as gateway:
        # A gateway of an older version ignores `canary`: these two calls guard the rollback there.
        _running_canary(gateway, number)
        before = gateway.rollback().number
        answer = gateway.rollback(confirm=True, to=before, canary=number)
    show_rollback(answer, as_json)


@canary_commands.command(
    epilog=format_examples("gateway canary watch", "gateway canary watch --json")
)
def watch(server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Follow a canary to its end: the counts of both releases, and how they compare.

    Prints a block of lines at each change, at most one a second. With --json, it prints one object
    a second.

    Without a canary since the gateway started, it prints one line that says so.
    """
    with exit_on_error(), connect(server) as gateway:
        block = ""
        for snapshot in gateway.watch_canary():
            if as_json:
                typer.echo(json.dumps(message_to_json(snapshot)))
            elif block != (block := describe_canary(snapshot)):
                typer.echo(block)


def _canary_of(share: str | None, steps: str | None, every: str | None) -> pb.Canary:
    """Make a canary's message from the options.

    Raises:
        typer.BadParameter: the options do not fit together, or one cannot be parsed.
    """
    if bool(steps) != bool(every):
        raise typer.BadParameter(
            "expected --steps and --every together, as --steps 25,100 --every 10m, got one of "
            "them; give both or neither"
        )
    shares = [_share(one, "--steps") for one in steps.split(",")] if steps else []
    if share is not None:
        first = _share(share, "--share")
        # `--share 5% --steps 5,25,100` names the first step twice.
        shares = [first, *(shares[1:] if shares[:1] == [first] else shares)]
    if not shares:
        raise typer.BadParameter(
            "expected a share of the callers, as --share 5%, or --steps 5,25,100 --every 10m; got "
            "neither, so give one of them"
        )
    canary = pb.Canary(share=shares[0], steps=shares[1:])
    if every:
        canary.every.FromMilliseconds(int(1000 * _interval_seconds(every)))
    return canary


def _running_canary(gateway: Gateway, number: int) -> pb.Canary:
    """Return the canary of a release that runs at a gateway.

    Raises:
        PreconditionError: no canary of this release runs.
    """
    snapshot = next(iter(gateway.watch_canary()))
    if snapshot.release != number or not snapshot.HasField("canary"):
        raise PreconditionError(
            f"no canary of release {number} runs at this gateway; run `gateway canary start "
            f"{number} --share 5%` to begin one"
        )
    return snapshot.canary


def describe_canary(answer: pb.WatchCanaryResponse) -> str:
    """Describe a canary in lines: its state, the counts of both releases, and the evidence.

    Without a canary since the gateway started it says so. A line has at most 80 characters up to a
    million queries; the gateway's message is the last line, and escaped.

    Raises:
        ValueError: the state is unknown here, as from a newer gateway.
    """
    if not answer.release:
        return "no canary since the gateway started"
    state = pb.CanaryState.Name(answer.state).removeprefix("CANARY_STATE_").lower()
    share = f", {100 * answer.canary.share:.3g}% of the callers" if answer.canary.share else ""
    kind = "shadow" if answer.canary.shadow else "canary"
    alike = f"  both {answer.compared} compared"
    if answer.HasField("overlap"):
        alike += f", overlap {answer.overlap:.3f}"
    if answer.HasField("rank_correlation"):
        alike += f", rank correlation {answer.rank_correlation:.3f}"
    bound, value = max(answer.evidence.items(), key=lambda item: item[1], default=("none", 0.0))
    lines = [
        f"{kind} of release {answer.release} {state}{share}",
        *_pair("old", answer.old_pair),
        *_pair("new", answer.new_pair),
        alike,
        f"  evidence {value:.2g} of {answer.stops_at:.0f} ({bound})",
    ]
    if answer.message:
        lines.append(f"  {answer.message}")
    return "\n".join(map(escape_control, lines))


def _pair(name: str, pair: pb.CanaryPair) -> list[str]:
    parts = [f"{pair.queries} queries", f"{pair.errors} errors", f"{pair.empty} empty"]
    if pair.HasField("p99"):
        parts.append(f"p50 {1000 * pair.p50:.1f} ms, p99 {1000 * pair.p99:.1f} ms")
    if pair.HasField("score"):
        parts.append(f"score {pair.score:.3f}")
    lines = [f"  {name}  {', '.join(parts)}"]
    if pair.approved or pair.rejected:
        sessions = f"of {pair.sessions} sessions"
        lines.append(f"       {pair.approved} approved, {pair.rejected} rejected {sessions}")
    return lines


def _share(text: str, option: str) -> float:
    try:
        return parse_percent(text)
    except InvalidInputError as error:
        raise typer.BadParameter(f"{option}: {error}") from error


def _interval_seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"--every: expected a time like 30s, 10m, 2h or 1d, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]
