"""Pixels in memory that a Triton on this machine reads: no message carries them.

A region has a name in /dev/shm only until Triton has mapped it, so that nothing is left there when
somebody is killed. Where Triton does not see this machine's memory, messages carry pixels as ever.
"""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import numpy as np
import structlog
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

log = structlog.get_logger("server.triton")

_SHM = Path("/dev/shm")  # noqa: S108 - where shm_open looks
# As of process.py: whoever starts removes what a killed gateway left.
_PREFIX = "nobackfill-"
# Less goes as quickly in a message; of more, and beyond so many at once, there is none to spare.
_LEAST, _LARGEST, _MOST = 32 * 2**10, 16 * 2**20, 2
# A container's /dev/shm has 64 MB, and Triton needs some for itself.
_SPARE = 2
_TIMEOUT_S = 0.6
# Then it is tried again.
_PAUSE_S = 60.0


class Region:
    """Memory that Triton has mapped under `name`."""

    def __init__(self, name: str, size: int) -> None:
        """Raises OSError, also where there is no room."""
        self.name = name
        self.size = size
        self.path = _SHM / name
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Else whoever writes where there is no room is killed.
            os.posix_fallocate(file, 0, size)
            self._memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        except BaseException:
            self.path.unlink()
            raise
        finally:
            os.close(file)

    def hold(
        self, values: NDArray[np.uint8], tensor: pb.ModelInferRequest.InferInputTensor
    ) -> None:
        """Bring `values` there, and `tensor` to say so."""
        self._memory[: values.nbytes] = values.reshape(-1)
        tensor.parameters["shared_memory_region"].string_param = self.name
        tensor.parameters["shared_memory_byte_size"].int64_param = values.nbytes


class SharedMemory:
    """What one client shares with its Triton. Threads may use it at the same time."""

    def __init__(
        self,
        stub: Callable[[], GRPCInferenceServiceStub],
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        """`stub`: of the channel that there is now."""
        self._stub = stub
        self._metadata = metadata
        self._lock = threading.Lock()
        own = f"{_PREFIX}{os.getpid()}-{os.urandom(8).hex()}-pixels"
        self._names = [f"{own}-{number}" for number in range(_MOST)]
        self._free: list[Region] = []
        self._lent: set[Region] = set()
        # Triton is known not to see them.
        self._off_until = 0.0
        self._swept = False

    def lend(self, size: int) -> Region | None:
        """A region for so many bytes, the caller's alone until it is given back; None: there is
        none."""
        if not _LEAST <= size <= _LARGEST or time.monotonic() < self._off_until:
            return None
        with self._lock:
            fitting = next((region for region in self._free if region.size >= size), None)
            if fitting is not None:
                self._free.remove(fitting)
                self._lent.add(fitting)
                return fitting
            # One that is too small makes room for a larger one.
            names = self._names or [self._free.pop().name for _ in self._free[:1]]
            if not names:
                return None
            name = names.pop()
        region = None
        try:
            region = self._made(name, size)
        finally:
            with self._lock:
                if region is None:
                    self._names.append(name)
                else:
                    self._lent.add(region)
        return region

    def give_back(self, region: Region) -> None:
        with self._lock:
            known = region in self._lent
            self._lent.discard(region)
            if known:
                self._free.append(region)
            else:
                self._names.append(region.name)

    def forget(self) -> None:
        """Triton knows of none any more, or it is another."""
        with self._lock:
            self._names += [region.name for region in self._free]
            self._free.clear()
            self._lent.clear()
            self._off_until, self._swept = 0.0, False

    def end(self) -> None:
        """Have Triton forget them. Nobody uses them any more."""
        with contextlib.suppress(grpc.RpcError):
            for region in self._free:
                self._unregister(region.name)

    def _made(self, name: str, size: int) -> Region | None:
        # Sizes grow in few steps.
        size = 1 << (size - 1).bit_length()
        try:
            if not self._swept:
                self._sweep()
            # Triton may hold the one before it.
            self._unregister(name)
            room = os.statvfs(_SHM)
            if room.f_bavail * room.f_frsize < _SPARE * size:
                raise OSError("too little room in /dev/shm")
            region = Region(name, size)
            try:
                request = pb.SystemSharedMemoryRegisterRequest(
                    name=name, key=f"/{name}", byte_size=size
                )
                self._stub().SystemSharedMemoryRegister(
                    request, timeout=_TIMEOUT_S, metadata=self._metadata
                )
            finally:
                region.path.unlink(missing_ok=True)
        except grpc.RpcError as error:
            # Another machine's, another container's, another user's; or it is away, as the call
            # that this is for will find, too.
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                self._pause(str(error.details()))
            return None
        except ValueError:
            # Its channel was closed meanwhile for another.
            return None
        except (OSError, AttributeError) as error:
            # There is no room, or no such memory on this system.
            self._pause(str(error))
            return None
        return region

    def _pause(self, why: str) -> None:
        self._off_until = time.monotonic() + _PAUSE_S
        log.info("pixels go to Triton in messages for now", because=why)

    def _sweep(self) -> None:
        """What gateways that were killed had it map."""
        request = pb.SystemSharedMemoryStatusRequest()
        known = self._stub().SystemSharedMemoryStatus(
            request, timeout=_TIMEOUT_S, metadata=self._metadata
        )
        for name in known.regions:
            pid = name.removeprefix(_PREFIX).partition("-")[0]
            if name.startswith(_PREFIX) and pid.isdecimal() and not Path("/proc", pid).exists():
                self._unregister(name)
        self._swept = True

    def _unregister(self, name: str) -> None:
        """Nothing, for a name that Triton does not know. Raises grpc.RpcError."""
        request = pb.SystemSharedMemoryUnregisterRequest(name=name)
        self._stub().SystemSharedMemoryUnregister(
            request, timeout=_TIMEOUT_S, metadata=self._metadata
        )
