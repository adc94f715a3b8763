"""`make demo-adopt`, of texts and of pictures, and `make demo-texts`: small, with real weights.

`make test-scale` installs their weights; where it cannot, these tests say so.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support.documents import ROOT

PACKAGES = ROOT / "build" / "adoption"
WAYS = ["old model", "naive: new queries, old vectors", "mapped", "both", "lazily", "re-embedded"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that the database's user reaches, where root runs this."""
    with tempfile.TemporaryDirectory(prefix="adoption-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def ran(module: str, out: Path, *options: str, ready: str = ".ready") -> str:
    if not (PACKAGES / ready).exists():
        pytest.skip("the packages of pretrained weights are not installed: make test-scale")
    words = ["-m", module, "--packages", str(PACKAGES), "--out", str(out), *options]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def by_hand(out: Path, queries: str, items: str) -> float:
    """R@1 by a slow loop over what `nobackfill embed` wrote."""
    asked, stored = (pq.read_table(out / name).to_pydict() for name in (queries, items))
    vectors = np.array(stored["vector"])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = [stored["id"][int(np.argmax(vectors @ np.array(one)))] for one in asked["vector"]]
    return float(np.mean([a == b for a, b in zip(found, asked["id"], strict=True)]))


@pytest.mark.parametrize("kind", ["texts", "pictures"])
def test_a_table_moves_to_another_pretrained_model(folder: Path, kind: str) -> None:
    small = ("--items", "240", "--sampled", "120", "--queries", "80")
    pictures = {"options": ("--images", "packages"), "ready": ".ready-images"}
    given: dict[str, Any] = pictures if kind == "pictures" else {"options": (), "ready": ".ready"}
    said = ran("demo.adoption", folder, *small, *given["options"], ready=given["ready"])
    figures = json.loads((folder / "figures.json").read_text())
    assert list(figures) == WAYS
    for way, queries in (("old model", "queries-old"), (WAYS[1], "queries-new")):
        # Of two items as near as one another either may be first.
        wanted = by_hand(folder, queries, "old-vectors")
        assert figures[way]["first"] == pytest.approx(wanted, abs=0.02)
    assert figures["re-embedded"]["agreement"] == 1
    assert figures[WAYS[1]]["agreement"] < 0.5 < figures["lazily"]["agreement"]
    assert figures["lazily"]["first"] >= 0.9 * figures["re-embedded"]["first"]
    assert "240 of 240 embedded again" in said and "240 in the store and checked" in said
    assert "verdict: " in said


def test_two_pretrained_models_live_as_releases(folder: Path) -> None:
    small = ("--pairs", "200", "--measured", "80", "--items", "60", "--queries", "30")
    said = ran("demo.texts", folder, *small)
    figures = json.loads((folder / "releases.json").read_text())
    assert figures["all healed"]["agreement"] == 1
    assert figures["lazily"]["first"] >= figures["mapped"]["first"]
    for step in ("old model", "mapped"):
        on_device = figures[f"{step}, device"]["first"]
        assert on_device == pytest.approx(figures[step]["first"], abs=0.04)
    assert "$ gateway rollback --yes" in said and said.rstrip().endswith("done")
