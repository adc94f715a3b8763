"""What the room offers is there, and is loaded when it is asked for."""

import subprocess
import sys

import nobackfill.quality


def test_every_name_is_offered() -> None:
    for name in nobackfill.quality.__all__:
        assert getattr(nobackfill.quality, name).__module__.startswith("nobackfill.quality.")


def loaded(script: str) -> str:
    """Those heavy packages that a script has loaded."""
    end = "\nprint(sorted({'torch', 'sklearn', 'matplotlib'} & set(sys.modules)))"
    command = [sys.executable, "-c", "import sys" + script + end]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_neither_torch_nor_scikit_learn_nor_matplotlib_is_loaded() -> None:
    script = ", nobackfill.quality as q\nassert 'hnswlib' not in sys.modules\n"
    assert loaded(script + "[getattr(q, name) for name in q.__all__]") == "[]"


def test_releases_are_evaluated_without_torch() -> None:
    assert loaded(", nobackfill.training.cli.evaluate") == "[]"
