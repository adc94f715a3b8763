"""onnxruntime, that tells nobody: who runs a model imports it from here.

From 1.31 on it writes a number of the device and a database into the user's cache folder, and sends
what is loaded and run to its makers, unless the environment says no before it is loaded. The
processes that are started from here, a Triton among them, inherit that.
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

# glibc's and musl's fenv_t: the 32-bit word that holds the modes of vector arithmetic, and the bits
# that flush denormals to zero (FTZ and DAZ; FZ).
_MODES = {"x86_64": (7, 0x8040), "aarch64": (0, 1 << 24)}
_LIBRARY = ctypes.CDLL(None)
_HAS_MODES = platform.system() == "Linux" and hasattr(_LIBRARY, "fesetenv")
_PLACE = _MODES.get(platform.machine()) if _HAS_MODES else None
_Environment = ctypes.c_uint32 * 16


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Let the calling thread compute with denormal numbers as zero, to the end of the block.

    Arithmetic on them takes up to 300 times longer, so that a model could stall whatever runs it.
    ONNX Runtime's session option covers the session's own threads only. On other systems than Linux
    on x86-64 and ARM nothing changes.
    """
    if _PLACE is None:
        yield
        return
    word, bits = _PLACE
    before, during = _Environment(), _Environment()
    _LIBRARY.fegetenv(before)
    _LIBRARY.fegetenv(during)
    during[word] |= bits
    _LIBRARY.fesetenv(during)
    try:
        yield
    finally:
        _LIBRARY.fesetenv(before)
