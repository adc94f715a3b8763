"""Servers side by side, each under a closed loop of clients."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness import Bench, Contender, Measurement, Row, Table, run_interleaved
from demo.load import Load, Run

# Where, which method, and the file of the requests.
Target = tuple[str, str, Path]


@dataclass(frozen=True)
class Latency:
    """Milliseconds that so large a share of calls stayed within."""

    p50: float
    p99: float
    p999: float


def latency_percentiles(seconds: Sequence[float]) -> Latency:
    """Of at least two calls."""
    cuts = statistics.quantiles([1000 * s for s in seconds], n=1000, method="inclusive")
    return Latency(cuts[499], cuts[989], cuts[998])


def measure_under_load(
    bench: Bench,
    load: Load,
    targets: Mapping[str, Target],
    clients: int,
    processes: Mapping[str, int],
) -> dict[str, tuple[Measurement, Latency, float]]:
    """Queries a second of each target, what its calls took, and microseconds of processor time of
    its one of the `processes` a call (0: none is given), all without the warm-up round.

    Raises RuntimeError when a call fails.
    """
    runs: dict[str, list[Run]] = {name: [] for name in targets}
    used: dict[str, list[float]] = {name: [] for name in targets}

    def one(name: str) -> float:
        process = processes.get(name)
        before = processor_seconds(process) if process else 0.0
        run = load.run(*targets[name], clients, bench.size(0.3, 0.5, 0.7))
        if run.failures:
            raise RuntimeError(f"{name}: {len(run.failures)} calls failed: {run.failures[0]}")
        runs[name].append(run)
        used[name].append(processor_seconds(process) - before if process else 0.0)
        return len(run.latencies) / run.seconds

    contenders = [Contender(name, partial(one, name)) for name in targets]
    measured = run_interleaved(contenders, bench.size(1, 3, 7))
    return {
        name: (
            measured[name],
            latency_percentiles([s for run in all_[1:] for s in run.latencies]),
            # Each client asks once before it is timed.
            1e6 * sum(used[name][1:]) / sum(len(run.latencies) + clients for run in all_[1:]),
        )
        for name, all_ in runs.items()
    }


def processor_seconds(process: int) -> float:
    """Processor time that a process has used so far, all its threads together."""
    # Linux's clock of a process, as clock_getcpuclockid gives it; threads that ended count, too.
    return time.clock_gettime((~process << 3) | 2)


def load_table(
    bench: Bench,
    title: str,
    note: str,
    targets: Mapping[str, Target],
    limits: Sequence[str],
    of: str,
    facts: Mapping[str, Row] | None = None,
    processes: Mapping[str, int] | None = None,
) -> Table:
    """A row for each number of clients and each target, with its ratio to the better of `limits`.

    `facts`: what else is to be said of a target; `processes`: whose processor time is told.
    """
    rows: list[Row] = []
    rounds: dict[str, Sequence[float]] = {}
    with Load() as load:
        for clients in bench.clients:
            met = measure_under_load(bench, load, targets, clients, processes or {})
            limit = max((met[name][0] for name in limits), key=lambda rate: rate.median)
            for name, (rate, within, cost) in met.items():
                rounds[f"{name}, {clients} clients"] = rate.rounds
                rows.append(
                    {
                        "clients": clients,
                        "server": name,
                        **(facts or {}).get(name, {}),
                        "queries/s": rate.median,
                        "spread": rate.spread_text,
                        f"of {of}": rate.ratio(limit),
                        "p50 ms": within.p50,
                        "p99 ms": within.p99,
                        **({"processor us a call": round(cost)} if processes else {}),
                    }
                )
    return Table(title, rows, note, rounds)
