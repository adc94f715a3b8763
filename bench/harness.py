"""Measuring contenders side by side: interleaved rounds, medians, spreads, paired ratios."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

Size = TypeVar("Size")


class Scale(StrEnum):
    """How large a topic is: tiny for the tests, small by default, full with FULL=1."""

    TINY = "tiny"
    SMALL = "small"
    FULL = "full"


@dataclass(frozen=True)
class Bench:
    """What a topic is given.

    `folder` is its own, empty; what takes long to make is kept in `shared` for the topics after it.
    """

    scale: Scale
    folder: Path
    shared: Path

    @property
    def tiny(self) -> bool:
        return self.scale is Scale.TINY

    @property
    def full(self) -> bool:
        return self.scale is Scale.FULL

    @property
    def clients(self) -> tuple[int, ...]:
        """How many clients a server meets, one number after the other."""
        return self.size((4,), (1, 32), (1, 8, 32))

    def size(self, tiny: Size, small: Size, full: Size) -> Size:
        """The one of three that fits the scale."""
        return {Scale.TINY: tiny, Scale.SMALL: small, Scale.FULL: full}[self.scale]


@dataclass(frozen=True)
class Contender:
    """`run` does one round and returns its figure: a rate, seconds, bytes."""

    name: str
    run: Callable[[], float]


@dataclass(frozen=True)
class Measurement:
    """One figure a round, in the order of the rounds."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Half the distance of the outermost rounds, as a share of the median."""
        half = (max(self.rounds) - min(self.rounds)) / 2
        return half / abs(self.median) if self.median else 0.0

    @property
    def spread_text(self) -> str:
        """The spread as tables show it."""
        return f"±{100 * self.spread:.0f} %"

    def ratio(self, other: "Measurement") -> float:
        """Median of this over the other, round by round, so that what slowed both cancels."""
        return statistics.median(
            mine / its for mine, its in zip(self.rounds, other.rounds, strict=True)
        )


def run_interleaved(
    contenders: Sequence[Contender], rounds: int, *, warm: bool = True
) -> dict[str, Measurement]:
    """Run every contender once a round; who begins changes from round to round.

    With `warm`, an unmeasured round comes first and fills caches.
    """
    figures: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(-1 if warm else 0, rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            figure = contender.run()
            if number >= 0:
                figures[contender.name].append(figure)
    return {name: Measurement(tuple(values)) for name, values in figures.items()}


def time_call(work: Callable[[], object]) -> float:
    """Wall-clock seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure_rate(work: Callable[[], object], items: int, *, at_least: float) -> float:
    """Items a second: `work` does `items` of them, again and again for `at_least` seconds."""
    done, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < at_least or not done:
        work()
        done += items
    return done / elapsed if elapsed > 0 else float("inf")


Value = str | float | int | None
Row = Mapping[str, Value]


@dataclass(frozen=True)
class Table:
    """Rows of named values. `rounds`: the single figures behind them, by what they measure."""

    title: str
    rows: Sequence[Row]
    note: str = ""
    rounds: Mapping[str, Sequence[float]] | None = None


def comparison_table(
    title: str, unit: str, measured: Mapping[str, Measurement], limit: str, note: str = ""
) -> Table:
    """A row for each contender, with its ratio to contender `limit`."""
    rows: list[Row] = [
        {
            "contender": name,
            unit: figures.median,
            "spread": figures.spread_text,
            f"of {limit}": figures.ratio(measured[limit]),
        }
        for name, figures in measured.items()
    ]
    return Table(title, rows, note, {name: f.rounds for name, f in measured.items()})
