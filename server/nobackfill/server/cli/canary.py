"""A canary in the operator's words: shares in percent, times, a line for what it shows."""

import re

import typer

from nobackfill.errors import InvalidInputError
from nobackfill.shares import percent
from nobackfill.v1 import release_pb2 as pb

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
        asked.every.FromMilliseconds(int(1000 * _seconds(every)))
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


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or not float(found[1]):
        raise typer.BadParameter(f"--every: expected a time as 30s, 10m, 2h or 1d, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]
