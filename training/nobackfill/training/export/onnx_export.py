"""Export torch modules to ONNX: one graph with a dynamic batch, without metadata.

Outputs of the written file are compared with torch's by onnxruntime.
"""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nobackfill.errors import VerificationError

OPSET = 20
# |torch - ONNX| <= PARITY * max(1, |torch|): allows only another order of float32 sums.
PARITY = 1e-4


def export_onnx(
    module: nn.Module, inputs: Mapping[str, Tensor], outputs: tuple[str, ...], path: Path
) -> None:
    """Write `module` as ONNX with a free batch size, and compare its outputs.

    Weights stay inside the file. The logger `torch.onnx` shows only errors from then on.

    Args:
        module: the module; it is moved to the CPU and to eval mode, and stays there.
        inputs: example inputs by name, batch first, at least one row each, in the order of the
            module's arguments.
        outputs: names of the outputs, in the module's order.
        path: the file to write; an existing one is replaced. It stays if the comparison fails. It
            is not written atomically.

    Raises:
        VerificationError: onnxruntime cannot run the file, or its outputs differ from torch's by
            more than PARITY.
        RuntimeError: torch cannot export the module; nothing is written.
        OSError: the file cannot be written.
    """
    module = module.eval().cpu()
    examples = tuple(tensor.cpu() for tensor in inputs.values())
    batch = torch.export.Dim("n", min=1)
    with warnings.catch_warnings(), torch.no_grad():
        # torch.onnx prints deprecation warnings about itself.
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            module,
            examples,
            dynamo=True,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=tuple({0: batch} for _ in examples),
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    strip_model(model)
    onnx.save(model, path)
    check_parity(module, inputs, outputs, path)


def strip_model(model: onnx.ModelProto) -> None:
    """Remove everything from a model, in place, that does not change the computation.

    These are traces with paths of this machine, metadata, comments and inferred shapes. Weights,
    names of inputs and outputs, and the operator sets stay. The producer becomes "nobackfill".
    Subgraphs and local functions stay as they are.
    """
    model.doc_string = ""
    model.producer_name, model.producer_version = "nobackfill", ""
    del model.metadata_props[:]
    graph = model.graph
    graph.doc_string = ""
    del graph.metadata_props[:]
    del graph.value_info[:]
    for parts in (graph.node, graph.initializer, graph.input, graph.output):
        for part in parts:
            part.doc_string = ""
            del part.metadata_props[:]
    graph.name = "graph"


def check_parity(
    module: nn.Module, inputs: Mapping[str, Tensor], outputs: tuple[str, ...], path: Path
) -> None:
    """Compare the file's outputs with the module's, on the whole batch and on its first row.

    A difference is relative to max(1, |torch's value|). NaN in either counts as a difference.

    Args:
        module: the module, on the CPU and in eval mode.
        inputs: inputs by name, batch first, at least one row. They are in the order of the module's
            arguments.
        outputs: names of the outputs; the module's outputs of None are skipped.
        path: the ONNX file.

    Raises:
        VerificationError: onnxruntime cannot run the file, or an output has another shape or
            differs by more than PARITY; the message names it.
        ValueError: an input of the graph is missing in `inputs`, or the module has another number
            of outputs.
    """
    for rows in {len(next(iter(inputs.values()))), 1}:
        examples = {name: tensor[:rows].cpu() for name, tensor in inputs.items()}
        with torch.no_grad():
            result = module(*examples.values())
        expected = [result] if isinstance(result, Tensor) else [r for r in result if r is not None]
        got = run_onnx(path, {name: t.numpy() for name, t in examples.items()}, outputs)
        for name, tensor, array in zip(outputs, expected, got, strict=True):
            _compare(name, tensor.numpy(), array, path)


def _compare(name: str, torch_output: NDArray[Any], onnx_output: NDArray[Any], path: Path) -> None:
    if torch_output.shape != onnx_output.shape:
        raise VerificationError(
            f"{path.name}: output {name} of the exported file has shape "
            f"{list(onnx_output.shape)}, but torch's has {list(torch_output.shape)}; the model "
            "was not published. Train with another backbone, or export your own ONNX file and "
            "publish it with --onnx"
        )
    difference = np.abs(torch_output - onnx_output) / np.maximum(1, np.abs(torch_output))
    if not (difference <= PARITY).all():
        raise VerificationError(
            f"{path.name}: output {name} of the exported file differs from torch's by "
            f"{np.nanmax(difference):.2g} (relative), more than the allowed {PARITY:g}; the model "
            "was not published. Train with another backbone, or export your own ONNX file and "
            "publish it with --onnx"
        )


def run_onnx(
    path: Path, inputs: Mapping[str, NDArray[Any]], outputs: tuple[str, ...]
) -> list[NDArray[Any]]:
    """Run an ONNX file once on the CPU.

    The file is loaded at each call.

    Args:
        path: the file, which exists.
        inputs: arrays by the names of the graph's inputs.
        outputs: names of the outputs to return.

    Returns:
        The outputs, in this order.

    Raises:
        VerificationError: onnxruntime cannot load the file, or cannot run it on these inputs; or it
            has no input or output of a name.
        ValueError: an input of the graph is missing.
    """
    from nobackfill.onnx_runtime import onnxruntime, state

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    refusals = (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NotImplemented,
        state.RuntimeException,
    )
    try:
        session = onnxruntime.InferenceSession(
            path, sess_options=options, providers=["CPUExecutionProvider"]
        )
        return list(session.run(list(outputs), dict(inputs)))
    except refusals as error:
        raise VerificationError(
            f"the exported file {path.name} was not published, because onnxruntime cannot run it "
            f"({error}); export the model again, with operators that onnxruntime has"
        ) from error


def quantise(source: Path, target: Path) -> None:
    """Write the int8 file of an ONNX model: int8 weights with a scale per channel, dynamic inputs.

    `source` is read and stays; `target` is replaced if it exists.

    Weights use 7 of 8 bits. Processors with AVX2 but without VNNI add two products in 16 bits; with
    8 bits they would overflow, and a device would compute other values than the gate (ADR 0006).
    Metadata and traces of this machine are removed, as by `strip_model`. During the call the root
    logger shows only errors.

    After an error an unfinished `target` may exist.

    Raises:
        OSError: `source` cannot be read or `target` cannot be written.
        DecodeError: `source` is no ONNX; it is protobuf's.
    """
    import nobackfill.onnx_runtime  # noqa: F401  # Before anything of onnxruntime's.

    # isort: split
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    # Its shape inference fails on shapes that the exporter recorded.
    del model.graph.value_info[:]
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        quantize_dynamic(
            model, target, per_channel=True, reduce_range=True, weight_type=QuantType.QInt8
        )
    finally:
        root.setLevel(level)
    quantised = onnx.load(target)
    strip_model(quantised)
    # Its internal operator sets are declared but not used.
    standard = [opset for opset in quantised.opset_import if opset.domain in ("", "ai.onnx")]
    del quantised.opset_import[:]
    quantised.opset_import.extend(standard)
    onnx.save(quantised, target)
