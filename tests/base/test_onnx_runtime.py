"""Who runs a model tells nobody."""

import os
import subprocess
import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from nobackfill.release.models import Session
Session("m", open(sys.argv[1], "rb").read(), 1)
"""


def test_a_model_that_is_opened_leaves_nothing_in_the_users_folder(tmp_path: Path) -> None:
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    node = helper.make_node("Identity", ["x"], ["y"])
    graph = helper.make_graph([node], "graph", sides[:1], sides[1:])
    opset = [helper.make_opsetid("", 17)]
    model, home = tmp_path / "model.onnx", tmp_path / "home"
    onnx.save(helper.make_model(graph, ir_version=9, opset_imports=opset), model)
    home.mkdir()
    # As on a user's machine: where it knows of a test it keeps silent by itself.
    kept = {"PATH": os.environ["PATH"], "HOME": str(home)}
    subprocess.run([sys.executable, "-c", RUN, str(model)], env=kept, cwd=tmp_path, check=True)
    assert list(home.rglob("*")) == []


def test_nobody_loads_onnxruntime_by_itself() -> None:
    apart = {
        ROOT / "core/nobackfill/onnx_runtime.py",
        # Runs where nothing of ours is installed, and says so itself.
        ROOT / "server/nobackfill/server/triton/backends/onnxruntime/model.py",
    }
    for room in (
        "core", "serving", "adopt", "server", "client", "plugins", "training", "research", "demo",
        "bench", "manual",
    ):  # fmt: skip
        for path in set((ROOT / room).rglob("*.py")) - apart:
            text = path.read_text()
            if "import onnxruntime\n" in text.replace("nobackfill.onnx_runtime import", ""):
                raise AssertionError(f"{path.relative_to(ROOT)} imports onnxruntime")
            if "from onnxruntime." in text:
                assert "nobackfill.onnx_runtime" in text, path.relative_to(ROOT)
