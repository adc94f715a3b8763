"""`gateway canary …`: let a few callers meet a release before all others do."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.digests import percent
from nobackfill.errors import InvalidInputError, PreconditionError
from nobackfill.server.cli.app import (
    CANARY,
    DEFAULT_SERVER,
    Json,
    Number,
    Server,
    app,
    exit_codes,
    settings_option,
    tuning,
)
from nobackfill.server.cli.operations import asking, plain, report, show_rollback
from nobackfill.terminal import visible
from nobackfill.v1 import release_pb2 as pb
from nobackfill.wire.gateway import Gateway

canary_commands = typer.Typer(
    no_args_is_help=True, help="Let a few callers meet a release before all others do."
)
app.add_typer(canary_commands, name="canary")

_Steps = Annotated[str | None, typer.Option(help="shares that follow, one after the other: 25,100")]
_Every = Annotated[
    str | None, typer.Option(help="time of each step: 30s, 10m, 2h, 1d; goes with --steps")
]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@canary_commands.command()
def start(
    number: Number,
    share: Annotated[
        str | None, typer.Option(help="share of the callers: 5%", show_default="the first step")
    ] = None,
    steps: _Steps = None,
    every: _Every = None,
    shadow: Annotated[
        bool,
        typer.Option("--shadow", help="only compare: the release before answers the share, too"),
    ] = False,
    settings: Annotated[Path | None, settings_option(CANARY)] = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Let a share of the callers be answered by a new release.

    The galleries are carried over first. The command returns when the canary has begun. It ends by
    itself where the release is measurably worse than the one before.
    """
    canary = _canary_of(share, steps, every)
    canary.shadow = shadow
    with exit_codes(), asking(server) as gateway:
        numbers = tuning(settings, CANARY)
        canary.most_errors = numbers["most_errors"]
        canary.largest_p99_ratio = numbers["largest_p99_ratio"]
        events = gateway.activate(
            number,
            spare_cores=numbers["spare_cores"],
            old_space_seconds=int(numbers["old_space_seconds"]),
            canary=canary,
        )
        report(number, events, as_json, canary=True)


@canary_commands.command()
def step(
    number: Number,
    share: Annotated[
        str | None, typer.Option(help="a larger share: 25%", show_default="the next step")
    ] = None,
    steps: _Steps = None,
    every: _Every = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Let a larger share of the callers meet the release of a canary.

    Without --share and --steps, go to the canary's next step now. With --share alone, stay there
    until the next command.
    """
    wanted = _canary_of(share, steps, every) if share or steps or every else None
    with exit_codes(), asking(server) as gateway:
        canary = _under_way(gateway, number)
        if wanted is not None:
            canary.share, canary.steps[:] = wanted.share, wanted.steps
            canary.every.CopyFrom(wanted.every)
        elif canary.steps:
            canary.share = canary.steps.pop(0)
        else:
            raise PreconditionError(
                f"the canary of release {number} has no further step; name a share, as with "
                f"`gateway canary step {number} --share 50%`"
            )
        report(number, gateway.activate(number, canary=canary), as_json, canary=True)


@canary_commands.command()
def promote(number: Number, server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Let all callers be answered by the release of a canary."""
    with exit_codes(), asking(server) as gateway:
        report(number, gateway.promote(number), as_json)


@canary_commands.command()
def stop(number: Number, server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """End a canary: the release before answers all callers again."""
    with exit_codes(), asking(server) as gateway:
        # A gateway of an older version knows nothing of `canary`: these two looks guard it there.
        _under_way(gateway, number)
        before = gateway.rollback().number
        answer = gateway.rollback(confirm=True, to=before, canary=number)
    show_rollback(answer, as_json)


@canary_commands.command()
def watch(server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Follow a canary to its end: what both releases answer, and how they compare.

    It prints a line a second.
    """
    with exit_codes(), asking(server) as gateway:
        for shown in gateway.watch_canary():
            typer.echo(json.dumps(plain(shown)) if as_json else visible(line(shown)))


def _canary_of(share: str | None, steps: str | None, every: str | None) -> pb.Canary:
    """Read the shares and times of a canary. Raises BadParameter."""
    if bool(steps) != bool(every):
        raise typer.BadParameter("--steps and --every go together: --steps 25,100 --every 10m")
    shares = [_share(one, "--steps") for one in steps.split(",")] if steps else []
    if share is not None:
        first = _share(share, "--share")
        # `--share 5% --steps 5,25,100` says the first step twice.
        shares = [first, *(shares[1:] if shares[:1] == [first] else shares)]
    if not shares:
        raise typer.BadParameter("expected --share 5%, or --steps 5,25,100 --every 10m")
    canary = pb.Canary(share=shares[0], steps=shares[1:])
    if every:
        canary.every.FromMilliseconds(int(1000 * _interval_seconds(every)))
    return canary


def _under_way(gateway: Gateway, number: int) -> pb.Canary:
    """Ask for the canary of a release. Raises PreconditionError where there is none."""
    shown = next(iter(gateway.watch_canary()))
    if shown.release != number or not shown.HasField("canary"):
        raise PreconditionError(
            f"no canary of release {number} is under way at this gateway; `gateway canary start "
            f"{number} --share 5%` begins one"
        )
    return shown.canary


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
