"""onnxruntime, that tells nobody: who runs a model imports it from here.

From 1.31 on it writes a number of the device and a database into the user's cache folder, and sends
what is loaded and run to its makers, unless the environment says no before it is loaded. The
processes that are started from here, a Triton among them, inherit that.
"""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

__all__ = ["onnxruntime", "state"]
