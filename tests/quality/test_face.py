"""What the room offers is there, and is loaded when it is asked for."""

import subprocess
import sys

import nobackfill.quality


def test_every_name_is_offered() -> None:
    for name in nobackfill.quality.__all__:
        assert getattr(nobackfill.quality, name).__module__.startswith("nobackfill.quality.")


def test_neither_torch_nor_scikit_learn_nor_matplotlib_is_loaded() -> None:
    script = (
        "import sys, nobackfill.quality as q\nassert 'hnswlib' not in sys.modules\n"
        "[getattr(q, name) for name in q.__all__]\n"
        "print(sorted({'torch', 'sklearn', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
