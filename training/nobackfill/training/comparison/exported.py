"""An upgrade as the file that is published, run by onnxruntime as on a device."""

import tempfile
from pathlib import Path

import torch

from nobackfill.onnx_runtime import onnxruntime
from nobackfill.training.export.drafting import UpgradeGraph
from nobackfill.training.export.onnx_export import export_onnx, quantise
from nobackfill.training.networks.transform import UpgradeNetwork

_EXAMPLES = 8


def exported(
    step: UpgradeNetwork, old_dim: int, side_dim: int, *, int8: bool
) -> onnxruntime.InferenceSession:
    """A session on one thread; inputs `embedding` [n,old_dim] and, where it is read, `side`
    [n,side_dim].
    """
    graph = UpgradeGraph(step)
    inputs = {"embedding": torch.randn(_EXAMPLES, old_dim)}
    if step.reads_side:
        inputs["side"] = torch.randn(_EXAMPLES, side_dim)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        file, small = Path(folder) / "model.onnx", Path(folder) / "model.int8.onnx"
        export_onnx(graph, inputs, graph.outputs, file)
        if int8:
            quantise(file, small)
        return onnxruntime.InferenceSession(
            (small if int8 else file).read_bytes(), options, providers=["CPUExecutionProvider"]
        )
