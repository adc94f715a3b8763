"""What the room offers loads no more than it needs."""

import subprocess
import sys

# One of each module that the face offers names of.
NAMES = (
    "backfill_curves", "list_cells", "PublishedListing", "measure_release", "evaluate_cells",
    "search_and_measure",
)  # fmt: skip


def loaded(script: str) -> str:
    """Those heavy packages that a script has loaded."""
    end = "\nprint(sorted({'torch', 'sklearn', 'matplotlib'} & set(sys.modules)))"
    command = [sys.executable, "-c", "import sys" + script + end]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_neither_torch_nor_scikit_learn_nor_matplotlib_is_loaded() -> None:
    graphs = "nobackfill.gallery.search.hnsw"
    script = f", nobackfill.quality as q\nassert {graphs!r} not in sys.modules\n"
    assert loaded(script + f"[getattr(q, name) for name in {NAMES}]") == "[]"


def test_releases_are_evaluated_without_torch() -> None:
    assert loaded(", nobackfill.training.cli.evaluate") == "[]"
