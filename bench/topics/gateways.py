"""Gateways that share one PostgreSQL: what two answer beside one, and what swaps cost clients that
know three."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from bench import data
from bench.harness import Bench, Contender, Row, Table, comparison_table, run_interleaved
from bench.loaded import latency_percentiles
from bench.published import INNER, SIZE, Publication, make_publication
from bench.serving import fill_gallery, image_requests
from demo import gateway as calls
from demo import serve
from demo.children import Children
from demo.latency import ActivationWindow
from demo.load import OK, SEARCH, Load, Run, write_requests
from tests.support.postgres import running

QUERIES = 64
CLIENTS = 16
SERVED = (
    "{size:,} items of 128 dims, searches by image, k = 10; {clients} clients without a pause, "
    "half of them in each of two processes, on the same cores as the gateways and the database. "
    "`two gateways`: each process asks its own."
)
SWAPPED = (
    "{clients} clients search by image without a pause, each of three gateways in its list; "
    "activations of release 2 and rollbacks in turn, by cutover and dual, led by whichever gateway "
    "is asked; only the first carries {size:,} items. A call counts as `during` if it was under "
    "way at any moment of a swap. A call that failed is one whose retries all did."
)


def run(bench: Bench) -> list[Table]:
    pair = make_publication(bench.shared, inner=bench.size(64, INNER, INNER))
    size = bench.size(500, 10_000, 100_000)
    repo = pair.copy_first(bench.folder / "publication")
    requests = bench.folder / "requests"
    write_requests(requests, image_requests(data.draw_jpegs(QUERIES, SIZE, seed=1)))
    with (
        running() as server, server.database() as url,
        _gateways(bench.folder, repo, url, 3) as addresses,
    ):  # fmt: skip
        old, items = pair.manifests[1], data.draw_items(size)
        assert old.side_space is not None
        fill_gallery(addresses[0], old.space, old.side_space, items.old, items.side)
        # The first searches of each load its model.
        shared = _served(bench, addresses[:2], requests, size)
        swapped = _swapped(bench, addresses, requests, size, pair, repo)
    return [shared, swapped]


@contextmanager
def _gateways(folder: Path, repo: Path, url: str, count: int) -> Iterator[list[str]]:
    """Addresses of so many `gateway serve` on one database."""
    with Children(folder / "logs") as children:
        places = [serve.free_addresses(2) for _ in range(count)]
        for number, place in enumerate(places):
            serve.start_gateway(
                children, repo, folder / f"data{number}", place, "--store", url, "--triton",
                "in-process", name=f"gateway-{number}",
            )  # fmt: skip
        yield [address for address, _ in places]


def _served(bench: Bench, addresses: Sequence[str], requests: Path, size: int) -> Table:
    """Calls a second of one gateway and of two."""
    seconds = bench.size(0.5, 5.0, 10.0)
    with ExitStack() as closing:
        loads = [closing.enter_context(Load()) for _ in range(2)]
        threads = closing.enter_context(ThreadPoolExecutor(len(loads)))

        def rate(asked: Sequence[str]) -> float:
            runs = [
                threads.submit(
                    load.run, asked[n % len(asked)], SEARCH, requests, CLIENTS // 2, seconds
                )
                for n, load in enumerate(loads)
            ]
            met = [one.result() for one in runs]
            failed = [failure for one in met for failure in one.failures]
            assert not failed, f"{len(failed)} calls failed: {failed[0]}"
            return sum(len(one.latencies) / one.seconds for one in met)

        ways = [
            Contender("one gateway", partial(rate, addresses[:1])),
            Contender("two gateways", partial(rate, addresses)),
        ]
        measured = run_interleaved(ways, bench.size(1, 5, 5))
    note = SERVED.format(size=size, clients=CLIENTS)
    return comparison_table(
        "Searches of one gateway and of two", "calls/s", measured, "one gateway", note
    )


def _swapped(
    bench: Bench, addresses: Sequence[str], requests: Path, size: int, pair: Publication, repo: Path
) -> Table:
    """What clients of three gateways meet during swaps."""
    least, swaps = bench.size(300, 100_000, 100_000), bench.size(2, 8, 8)
    every = ",".join(addresses)
    pair.publish_second(repo)
    with Load() as load:
        load.begin(every, SEARCH, requests, CLIENTS, least=least, judged=True)
        time.sleep(bench.size(0.5, 5.0, 5.0))
        windows = [_swap(addresses[n % 3], n, bench.size(0.2, 5.0, 5.0)) for n in range(swaps)]
        met = load.end()
    note = SWAPPED.format(size=size, clients=CLIENTS)
    title = f"{swaps} swaps, three gateways, {size:,} items: {len(met.failures)} calls failed"
    return Table(title, _rows(met, windows), note)


def _swap(address: str, number: int, pause: float) -> ActivationWindow:
    """Forward, or back, by the gateway at `address`; then serve on for `pause` seconds."""
    with calls.connect(address) as connection:
        begun = time.monotonic()
        if number % 2 == 0:
            serve.activate_release(connection, 2, "dual" if number % 4 else "cutover")
        else:
            connection.rollback(confirm=True)
        window = ActivationWindow(begun, time.monotonic())
    time.sleep(pause)
    return window


def _rows(met: Run, windows: Sequence[ActivationWindow]) -> list[Row]:
    answers = met.answers
    swapped = [answer for answer in answers if any(window.overlaps(answer) for window in windows)]
    first, last = windows[0].start, windows[-1].end
    phases = {
        "before": [answer for answer in answers if answer.start + answer.seconds < first],
        "during swaps": swapped,
        "all": answers,
        "after": [answer for answer in answers if answer.start > last],
    }
    rows: list[Row] = []
    for name, found in phases.items():
        if len(found) < 2:
            continue
        within = latency_percentiles([answer.seconds for answer in found])
        rows.append(
            {
                "phase": name, "calls": len(found),
                "failed": sum(answer.outcome != OK for answer in found),
                "p50 ms": within.p50, "p99 ms": within.p99,
                "worst ms": 1000 * max(answer.seconds for answer in found),
                "of release 2": f"{100 * sum(a.release == 2 for a in found) / len(found):.0f} %",
            }
        )  # fmt: skip
    return rows
