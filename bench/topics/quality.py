"""What a transform keeps against what it costs: trained weights, several sizes, fp32 and int8."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from bench import bare
from bench.harness import Bench, Contender, Row, Table, Value, measure_rate, run_interleaved
from bench.models import EmbeddingOnly, count_multiplications, int8_path
from bench.record import ROOT
from demo.data import prepare_images
from nobackfill.class_folders import ImageListing, decode_listing, list_images
from nobackfill.metrics.compatibility import retention
from nobackfill.metrics.ranking import relevance_by_label
from nobackfill.metrics.retrieval import mean_of_answerable
from nobackfill.quality.retrieval import search_and_measure
from nobackfill.training.export.onnx_export import export_onnx, quantise
from nobackfill.training.loop.upgrade import read_upgrade
from nobackfill.training.networks.frozen import encoder_of_run
from nobackfill.training.networks.transform import UpgradeNetwork
from nobackfill.vectors import Vectors

CONFIGS = ROOT / "configs" / "digits"
SETS = {"embedder-1": "embedder", "embedder-2": "embedder", "side_encoder-1": "side_encoder"}
NOTE = (
    "Scikit-learn's digits ({queries} queries, {items} gallery items, none trained on): the old "
    "model learnt 5 classes, the new one all 10. Queries are the new model's; mAP and CMC-1 in "
    "percent; `kept` is the share of new/new mAP. Items a second on one thread, batches of 1,024; "
    "width 2,048 is FCT's."
)


# A configuration of training/train.py.
Config = dict[str, Any]


def run(bench: Bench) -> list[Table]:
    """Train once, then measure each transform."""
    images, runs = bench.folder / "images", bench.folder / "runs"
    prepare_images(images, None, seed=0, limit=60 if bench.tiny else None)
    common: Config = {"images": str(images / "train")}
    if not bench.full:
        common |= {"epochs": bench.size(1, 20, 0), "warmup_epochs": bench.size(0, 2, 0)}
    _train([_config(runs, name, name, common) for name in SETS])
    sources = {"old": "embedder-1", "new": "embedder-2", "old_side": "side_encoder-1"}
    common |= {key: str(runs / name) for key, name in sources.items()} | {"side": "drops"}
    # Inner width of the mixer; the closed-form map is what a learned transform must beat.
    widths: tuple[int, ...] = bench.size((128,), (2048, 128), (2048, 512, 128))
    upgrades = {
        f"FCT, width {width}": _config(
            runs, "upgrade-1-2-fct", f"fct-{width}", common | {"method": "fct", "inner_dim": width}
        )
        for width in widths
    }
    linear = common | {"method": "affine", "reads_side": False}
    upgrades["linear map"] = _config(runs, "upgrade-1-2-fct", "affine", linear)
    _train(list(upgrades.values()))
    seen = {part: list_images(images / part) for part in ("queries", "server")}
    found = {
        (part, name): encoder.encode(decode_listing(listing, encoder.image_size))
        for name, kind in SETS.items()
        for encoder in [encoder_of_run(runs / name, kind)]
        for part, listing in seen.items()
    }
    rows, rounds = _rows(bench, seen, found, upgrades)
    note = NOTE.format(queries=len(seen["queries"]), items=f"{len(seen['server']):,}")
    return [Table("Quality against cost", rows, note, rounds)]


def _config(runs: Path, base: str, name: str, changed: Config) -> Config:
    """One of configs/digits with some keys changed, as a run called `name`."""
    config: Config = yaml.safe_load((CONFIGS / f"{base}.yaml").read_text(encoding="utf-8"))
    if changed.get("side") == "drops":
        config.pop("new_side", None)
    return config | {"run_dir": str(runs / name)} | changed


def _train(configs: list[Config]) -> None:
    """As many commands as cores at a time, each with its share of the trainings."""
    paths = [Path(config["run_dir"]).with_suffix(".yaml") for config in configs]
    for path, config in zip(paths, configs, strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
    cores = len(os.sched_getaffinity(0))
    commands = [
        [sys.executable, "training/train.py", *map(str, paths[core::cores])]
        for core in range(min(cores, len(paths)))
    ]
    working = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=ROOT) for command in commands
    ]
    codes = [process.wait() for process in working]
    if any(codes):
        raise RuntimeError("a training failed; its last words are above")


def _rows(
    bench: Bench,
    seen: dict[str, ImageListing],
    found: dict[tuple[str, str], Vectors],
    upgrades: dict[str, Config],
) -> tuple[list[Row], dict[str, Sequence[float]]]:
    relevance = relevance_by_label(seen["queries"].labels, seen["server"].labels)
    queries, old = found["queries", "embedder-2"], found["server", "embedder-1"]

    def quality(asked: Vectors, gallery: Vectors) -> dict[str, float]:
        found = search_and_measure(asked, gallery, relevance)
        return {"map": mean_of_answerable(found.map), "cmc1": mean_of_answerable(found.cmc1)}

    best = quality(queries, found["server", "embedder-2"])
    rows = [
        _row("old/old", quality(found["queries", "embedder-1"], old), best),
        _row("new/new (re-embedded)", best, best),
    ]
    contenders, costs = [], {}
    for name, config in upgrades.items():
        upgrade, _ = read_upgrade(Path(config["run_dir"]))
        path = Path(config["run_dir"]) / "model.onnx"
        inputs = {"embedding": old}
        if upgrade.reads_side:
            inputs["side"] = found["server", "side_encoder-1"]
        _export(upgrade, inputs, path)
        for kind, file in (("fp32", path), ("int8", int8_path(path))):
            session = bare.open_session(file)
            upgraded = session.run(None, inputs)[0]
            title = f"{name}, {kind}"
            rows.append(_row(title, quality(queries, upgraded), best))
            costs[title] = count_multiplications(upgrade)
            contenders.append(Contender(title, _work(bench, session, inputs)))
    measured = run_interleaved(contenders, bench.size(1, 3, 7))
    for row in rows:
        name = str(row["gallery"])
        if name in measured:
            row["MACs an item"] = costs[name]
            row["items/s"] = measured[name].median
            row["spread"] = measured[name].spread_text
    return list(rows), {name: figures.rounds for name, figures in measured.items()}


def _row(name: str, scores: dict[str, float], best: dict[str, float]) -> dict[str, Value]:
    return {
        "gallery": name,
        "mAP %": 100 * scores["map"],
        "CMC-1 %": 100 * scores["cmc1"],
        "kept": retention(scores["map"], best["map"]),
        "MACs an item": None,
        "items/s": None,
        "spread": None,
    }


def _export(upgrade: UpgradeNetwork, inputs: dict[str, Vectors], path: Path) -> None:
    example = {name: torch.from_numpy(values[:2]) for name, values in inputs.items()}
    export_onnx(EmbeddingOnly(upgrade), example, ("upgraded",), path)
    quantise(path, int8_path(path))


def _work(bench: Bench, session: Any, inputs: dict[str, Vectors]) -> Any:
    some = {name: np.resize(values, (1024, values.shape[1])) for name, values in inputs.items()}
    least = 0.01 if bench.tiny else 0.3
    return lambda: measure_rate(lambda: session.run(None, some), 1024, at_least=least)
