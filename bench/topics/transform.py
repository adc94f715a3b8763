"""The transform alone: ours against onnxruntime bare, torch, and the processor's own limit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from bench import bare, data
from bench.harness import Bench, Contender, Table, comparison_table, measure_rate, run_interleaved
from bench.models import build_transform, count_multiplications
from bench.published import INNER, NARROW, make_publication
from nobackfill.release.models import UpgradeModel, open_upgrade

Engine = Callable[[data.ItemVectors], object]

BATCHES = (1, 32, 1024)
NOTE = (
    "Items a second on one thread, 128 + 128 -> 128 dims; `limit` is what the processor's matrix "
    "multiplication (numpy's sgemm) would allow for the multiplications of FCT's size in fp32. "
    "`release` is our checked code around onnxruntime."
)


def run(bench: Bench) -> list[Table]:
    """Sizes of the transform, batches, engines."""
    inners = {"FCT": bench.size(64, INNER, INNER), "narrow": bench.size(32, NARROW, NARROW)}
    engines: dict[str, Engine] = {}
    for name, inner in inners.items():
        pair = make_publication(bench.shared, inner=inner)
        manifest = pair.manifests[2]
        upgrade = manifest.upgrades[0]
        for kind in ("fp32", "int8"):
            session = bare.open_session(bare.upgrade_file(pair, kind))
            engines[f"onnxruntime {kind}, {name}"] = _bare(session)
            ours = open_upgrade(pair.repo, manifest, upgrade, int8=kind == "int8")
            engines[f"release {kind}, {name}"] = _checked(ours)
    module = build_transform(inners["FCT"])
    engines["torch eager fp32, FCT"] = _torch(module)
    work = count_multiplications(module)
    return [_table(bench, engines, batch, work) for batch in BATCHES]


def _table(bench: Bench, engines: dict[str, Engine], batch: int, work: int) -> Table:
    items = data.draw_items(batch, seed=5)
    size = bench.size(64, 1024, 2048)
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    least = 0.01 if size == 64 else 0.1

    def limit() -> float:
        with threadpool_limits(1):
            return measure_rate(lambda: a @ a, 1, at_least=least) * size**3 / work

    contenders = [Contender("limit", limit)]
    for name, engine in engines.items():

        def one(engine: Engine = engine) -> float:
            return measure_rate(lambda: engine(items), batch, at_least=least)

        contenders.append(Contender(name, one))
    measured = run_interleaved(contenders, bench.size(1, 3, 7))
    title = f"Transform, batches of {batch}"
    return comparison_table(title, "items/s", measured, "limit", NOTE if batch == 1 else "")


def _bare(session: Any) -> Engine:
    return lambda some: session.run(None, {"embedding": some.old, "side": some.side})


def _checked(model: UpgradeModel) -> Engine:
    return lambda some: model.run(some.old, some.side)


def _torch(module: torch.nn.Module) -> Engine:
    torch.set_num_threads(1)

    def work(some: data.ItemVectors) -> object:
        with torch.inference_mode():
            return module(torch.from_numpy(some.old), torch.from_numpy(some.side))

    return work
