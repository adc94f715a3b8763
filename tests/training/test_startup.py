"""What the commands of training load before they work."""

import subprocess
import sys


def loaded(*commands: str) -> set[str]:
    """Of what takes a second or more, what importing these commands loads."""
    slow = ["lightning_fabric", "pytorch_metric_learning", "scipy", "sklearn", "torch._dynamo"]
    script = (
        "import sys\n"
        f"from nobackfill.training.cli import {', '.join(commands)}\n"
        f"print(*set({[*slow, 'torch']}) & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_a_typing_error_is_told_before_torch_is_loaded() -> None:
    assert loaded("train", "evaluate") == set()


def test_commands_of_training_load_no_more_than_torch_before_they_work() -> None:
    assert loaded("compare", "export") == {"torch"}
