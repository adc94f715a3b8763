"""Try an installed wheel: the programs start, and the compiled index finds what was put.

`make dist` runs this with the Python of an empty environment that holds the wheel alone.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

from nobackfill.gallery.search import ExactIndex, _native, hnsw
from nobackfill.gallery.spec import SpaceSpec


def main() -> None:
    """Exit with an error where a program or the index fails."""
    folder = Path(sys.executable).parent
    for program in ("nobackfill", "edge-client", "gateway", "publication"):
        done = subprocess.run(
            [folder / program, "--version"], capture_output=True, text=True, check=True
        )
        assert version("nobackfill") in done.stdout, f"{program}: {done.stdout!r}"
    rows = np.random.default_rng(0).standard_normal((2000, 16), np.float32)
    spec = SpaceSpec("trial", 1, 16, "squared_l2", unit_norm=False, side_space=None, side_dim=0)
    labels = np.arange(len(rows))
    graph = hnsw.build_index(spec, labels, rows).search(rows[:100], k=1)
    exact = ExactIndex(spec, labels, rows).search(rows[:100], k=1)
    agreement = float(np.mean(graph.labels == exact.labels))
    assert agreement > 0.95, f"the graph agrees with exact search on {agreement:.0%}"
    print(f"nobackfill {version('nobackfill')} works; compiled index {_native.__name__}")


if __name__ == "__main__":
    main()
