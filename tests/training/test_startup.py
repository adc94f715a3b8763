"""What the commands of training load before they work."""

import subprocess
import sys

import pytest


def loaded(*commands: str) -> set[str]:
    """Of what takes a second or more, what importing these modules loads."""
    slow = ["lightning_fabric", "pytorch_metric_learning", "scipy", "sklearn", "torch._dynamo"]
    script = (
        "import sys\n"
        f"import {', '.join(f'nobackfill.{command}' for command in commands)}\n"
        f"print(*set({[*slow, 'torch']}) & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_a_typing_error_is_told_before_torch_is_loaded() -> None:
    assert loaded("training.cli.train", "training.cli.evaluate") == set()


@pytest.mark.long
def test_commands_of_training_load_no_more_than_torch_before_they_work() -> None:
    assert loaded("training.cli.export", "research.compare") == {"torch"}


def test_an_install_says_why_it_cannot_compare() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nobackfill.training.cli.compare", "--data", "digits"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 78
    assert done.stderr.startswith("compare.py: nobackfill.research is not installed: ")
    assert "python training/compare.py" in done.stderr
