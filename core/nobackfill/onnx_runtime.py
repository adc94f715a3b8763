"""Import onnxruntime with its telemetry off; every module that runs a model imports it from here.

From version 1.31 on, onnxruntime writes a device number and a database into the user's cache folder
and sends usage data to its vendor. An environment variable turns this off if it is set before the
import. Child processes, such as Triton, inherit the variable.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

__all__ = ["denormals_as_zero", "onnxruntime", "state"]

# For each processor: the index of the 32-bit word of fenv_t (glibc and musl) that controls vector
# arithmetic, and the bits that flush denormals to zero (FTZ and DAZ; FZ).
_MODES = {"x86_64": (7, 0x8040), "aarch64": (0, 1 << 24)}
_LIBRARY = ctypes.CDLL(None)
_HAS_MODES = platform.system() == "Linux" and hasattr(_LIBRARY, "fesetenv")
_PLACE = _MODES.get(platform.machine()) if _HAS_MODES else None
_Environment = ctypes.c_uint32 * 16


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Let the calling thread treat denormal numbers as zero until the block ends.

    Arithmetic on denormals takes up to 300 times longer, so that a model could stall its host. The
    session option of ONNX Runtime covers only the session's own threads. The former mode returns at
    the end of the block, also after an error. Does nothing except on Linux on x86-64 and ARM. Run
    the block in one thread: a generator that moves to another would change that thread's mode.
    """
    if _PLACE is None:
        yield
        return
    word, bits = _PLACE
    outside, inside = _Environment(), _Environment()
    _LIBRARY.fegetenv(outside)
    _LIBRARY.fegetenv(inside)
    inside[word] |= bits
    _LIBRARY.fesetenv(inside)
    try:
        yield
    finally:
        _LIBRARY.fesetenv(outside)
