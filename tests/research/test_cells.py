"""The cells of a row against loops: which vectors meet which, and whose likeness is told."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nobackfill.class_folders import decode_listing, list_images
from nobackfill.research.cells import Evaluation, row_cells
from nobackfill.research.rows import MethodRow, TrainingRun
from nobackfill.training.loop.upgrade import read_upgrade
from nobackfill.training.networks.frozen import load_encoder
from tests.metrics import slow


def gram_cka(x: np.ndarray, y: np.ndarray) -> float:
    """Linear CKA by centred Gram matrices of n x n."""
    a, b = ((v - v.mean(0)) @ (v - v.mean(0)).T for v in (x, y))
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def test_every_cell_is_made_of_the_vectors_that_its_name_says(
    digits: Path, runs: Path, tmp_path: Path
) -> None:
    def run(kind: str, name: str) -> TrainingRun:
        return TrainingRun({"kind": kind, "run_dir": runs / name})

    first, second = run("embedder", "embedder-1"), run("embedder", "embedder-2")
    route = (run("upgrade", "upgrade-1-2"),)
    row = MethodRow("r", first, second, route, run("side_encoder", "side-1"))
    listing = list_images(digits / "queries")
    test = Evaluation(listing, "cosine", tmp_path)
    cells = row_cells(row, test)
    images = torch.from_numpy(decode_listing(listing, 8))
    old, new, side = (
        load_encoder(runs / name)[0](images) for name in ("embedder-1", "embedder-2", "side-1")
    )
    served = read_upgrade(runs / "upgrade-1-2")[0](old, side).embedding
    pairs = {
        "old/old": (old, old),
        "new/new": (new, new),
        "new/old": (new, old),
        "new/served": (new, served),
        "served/served": (served, served),
    }
    for cell, (queries, gallery) in pairs.items():
        ranked = slow.all_ranked(queries.numpy(), gallery.numpy(), test.relevance, "cosine")
        expected = {
            "cmc1": [slow.cmc(r, 1) for r in ranked],
            "cmc5": [slow.cmc(r, 5) for r in ranked],
            "map": [slow.average_precision(r) for r in ranked],
        }
        assert set(cells.figures_by_query[cell]) == set(expected)
        for figure, values in expected.items():
            # Rounding may change the order of two items at nearly the same distance.
            assert np.isclose(cells.figures_by_query[cell][figure], values).mean() > 0.95, (
                cell,
                figure,
            )
    assert cells.query_classes.tolist() == [path.split("/")[0] for path in listing.paths]
    told = [tuple(cells.figures_by_query[cell]["map"]) for cell in pairs]
    assert len(set(told)) == len(pairs)
    alike = {a: gram_cka(x.numpy(), side.numpy()) for a, x in (("old", old), ("new", new))}
    assert cells.row_figures["cka"] == pytest.approx(alike["old"], rel=1e-4)
    assert alike["old"] != pytest.approx(alike["new"], rel=0.01)
