"""Triton's python backend, taught to run ONNX files: the backend named `onnxruntime`.

Copied beside the wheel's `backends/python`. The same model repository runs unchanged on a
tritonserver that has the native backend of that name. Runs in Triton's own environment, where
nothing of ours is installed.
"""

import json
import os
from pathlib import Path

# As nobackfill.onnx_runtime does: nothing of a model is told to its makers.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime
import triton_python_backend_utils as pb
from numpy import concatenate


class TritonPythonModel:
    def initialize(self, args):
        """Open the version's `model.onnx` with one thread on the CPU; Triton calls it once.

        Any error makes Triton refuse the model: a missing or damaged file, or a configuration
        without inputs or outputs.
        """
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            folder / "model.onnx", options, providers=["CPUExecutionProvider"]
        )
        self.inputs = [entry["name"] for entry in config["input"]]
        self.outputs = [entry["name"] for entry in config["output"]]

    def execute(self, requests):
        """Run all requests that Triton's dynamic batcher gathered as one batch, and split the
        outputs.

        Returns:
            A response for each request, in order. An error of onnxruntime fails the whole batch.
        """
        columns = [
            [pb.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            for name in self.inputs
        ]
        feed = {
            name: column[0] if len(column) == 1 else concatenate(column)
            for name, column in zip(self.inputs, columns, strict=True)
        }
        results = self.session.run(self.outputs, feed)
        responses, start = [], 0
        for first in columns[0]:
            end = start + len(first)
            tensors = [
                pb.Tensor(name, result[start:end])
                for name, result in zip(self.outputs, results, strict=True)
            ]
            responses.append(pb.InferenceResponse(output_tensors=tensors))
            start = end
        return responses
