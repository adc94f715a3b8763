"""Ten swaps under load: what clients meet before, during and after, and what it costs."""

import time
from collections.abc import Sequence

from bench import data
from bench.harness import Bench, Row, Table
from bench.loaded import latency_percentiles
from bench.published import INNER, SIZE, make_publication
from bench.serving import GALLERY, Gateway, fill_gallery, image_requests, run_gateway
from demo import gateway as calls
from demo import serve
from demo.latency import ActivationWindow
from demo.load import SEARCH, Load, Run, write_requests

CLIENTS = 8
QUERIES = 64
NOTE = (
    "{clients} clients search by image without a pause, cutover rollout, half of the cores left to "
    "searches (the default); swaps are activations of release 2 and rollbacks in turn, only the "
    "first upgrades {size:,} items and indexes them. A call counts as `during` if it was under way "
    "at any moment of a swap. `of before`: of the p99 before."
)


def run(bench: Bench) -> list[Table]:
    """Steady, the first swap with its upgrade, the others, steady again."""
    pair = make_publication(bench.shared, inner=bench.size(64, INNER, INNER))
    old = pair.manifests[1]
    assert old.side_space is not None
    size, swaps = bench.size(2500, 20_000, 100_000), bench.size(2, 10, 10)
    least = bench.size(200, 10_000, 100_000)
    steady = bench.size(1.0, 5.0, 10.0)
    repo = pair.copy_first(bench.folder / "publication")
    requests = bench.folder / "requests"
    write_requests(requests, image_requests(data.draw_jpegs(QUERIES, SIZE, seed=1)))
    with run_gateway(bench.folder, repo) as gateway, Load() as load:
        items = data.draw_items(size)
        fill_gallery(gateway.address, old.space, old.side_space, items.old, items.side)
        gateway.settle()
        warm = load.run(gateway.address, SEARCH, requests, CLIENTS, steady)
        # So that the requests are spread over all swaps.
        pause = least / (len(warm.latencies) / warm.seconds) / (swaps + 2)
        memory, triton = [gateway.resident_mib()], [gateway.triton_mib()]
        pair.publish_second(repo)
        load.begin(gateway.address, SEARCH, requests, CLIENTS, least=least)
        time.sleep(max(steady, pause))
        windows = [_swap(gateway, number, pause / 2) for number in range(swaps)]
        memory.append(gateway.resident_mib())
        triton.append(gateway.triton_mib())
        peak = gateway.peak_mib()
        time.sleep(steady)
        met = load.end()
    rows = _rows(met, windows)
    grown = memory[1] / memory[0] - 1
    cost: list[Row] = [
        {"what": "seconds of the first swap", "value": windows[0].end - windows[0].start},
        {"what": "seconds of the others, mean", "value": _mean(windows[1:])},
        {"what": "requests", "value": len(met.latencies)},
        {"what": "failures", "value": len(met.failures)},
        {"what": "gateway MiB before", "value": memory[0]},
        {"what": "gateway MiB after, with both spaces", "value": memory[1]},
        {"what": "grown by", "value": f"{100 * grown:.0f} %"},
        {"what": "gateway MiB at its peak", "value": peak},
        {"what": "Triton MiB before, resident", "value": triton[0]},
        {"what": "Triton MiB after", "value": triton[1]},
    ]
    note = NOTE.format(clients=CLIENTS, size=size)
    return [Table(f"{swaps} swaps, {size:,} items", rows, note), Table("Costs of the swaps", cost)]


def _swap(gateway: Gateway, number: int, pause: float) -> ActivationWindow:
    """Forward, or back; then serve on for `pause` seconds."""
    with calls.connect(gateway.address) as connection:
        begun = time.monotonic()
        if number % 2 == 0:
            serve.activate_release(connection, 2, "cutover")
        else:
            connection.rollback(confirm=True)
        window = ActivationWindow(begun, time.monotonic())
        assert connection.get_gallery(GALLERY).release == 2 - number % 2
    time.sleep(pause)
    return window


def _rows(met: Run, windows: Sequence[ActivationWindow]) -> list[Row]:
    spans = list(zip(met.starts, met.latencies, strict=True))

    def during(some: Sequence[ActivationWindow]) -> list[float]:
        return [s for start, s in spans if any(start < w.end and start + s > w.start for w in some)]

    first, last = windows[0].start, windows[-1].end
    before = [s for start, s in spans if start + s < first]
    after = [s for start, s in spans if start > last]
    phases = {
        "before": (before, first - met.starts[0]),
        "first swap, with the upgrade": (during(windows[:1]), windows[0].end - windows[0].start),
        "other swaps": (during(windows[1:]), sum(w.end - w.start for w in windows[1:])),
        "after": (after, met.starts[0] + met.seconds - last),
    }
    steady = latency_percentiles(before).p99
    rows: list[Row] = []
    for name, (calls_met, seconds) in phases.items():
        if len(calls_met) < 2:
            continue
        within = latency_percentiles(calls_met)
        rows.append(
            {
                "phase": name,
                "calls": len(calls_met),
                "calls/s": len(calls_met) / seconds,
                "p50 ms": within.p50,
                "p99 ms": within.p99,
                "p99.9 ms": within.p999,
                "worst ms": 1000 * max(calls_met),
                "of before": within.p99 / steady,
            }
        )
    return rows


def _mean(windows: Sequence[ActivationWindow]) -> float:
    return sum(w.end - w.start for w in windows) / max(1, len(windows))
