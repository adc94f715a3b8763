"""What the commands of training load before they work."""

import subprocess
import sys


def test_commands_of_training_load_no_more_than_torch_before_they_work() -> None:
    """Each of these takes a second or more: a typing error is told sooner."""
    slow = ["lightning_fabric", "pytorch_metric_learning", "scipy", "sklearn", "torch._dynamo"]
    script = (
        "import sys\n"
        "from nobackfill.training.cli import compare, evaluate, export, train\n"
        f"print(sorted(set({slow}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
