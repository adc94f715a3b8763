"""Triton over gRPC: models by name and version, tensors in and out, statuses as our errors."""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import structlog
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from nobackfill.errors import ConfigurationError, DeadlineError, UnavailableError, VerificationError
from nobackfill.loopback import is_loopback
from nobackfill.server.settings import TLS, split_address

# Pixels in memory that a Triton on this machine reads: no message carries them.
#
# A region has a name in /dev/shm only until Triton has mapped it, so that nothing is left there
# when somebody is killed. Where Triton does not see this machine's memory, messages carry pixels as
# ever.

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


# Releases are immutable, so a model has one version.
VERSION = "1"

# Names to uint8 or int64 arrays.
Inputs = Mapping[str, NDArray[Any]]

# Answers that take no model take no longer.
LIVE_TIMEOUT_S = 0.6
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


# What Triton says of a region that it does not know.
_SHARED = "shared memory region"

# The header that tritonserver asks for when it is started with
# --grpc-restricted-protocol=...:nobackfill-token=TOKEN; a proxy before it reads the other.
_HEADER = "triton-grpc-protocol-nobackfill-token"


class TritonClient:
    """One channel to one tritonserver. Times out as asked, never retries.

    `credentials` None: in the clear, for sockets of our own and loopback. `token` goes with every
    call.
    """

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._metadata = (
            ((_HEADER, token), ("authorization", f"Bearer {token}")) if token is not None else ()
        )
        self._connect()
        near = credentials is None and (
            address.startswith("unix:") or is_loopback(split_address(address, "triton")[0])
        )
        self._shared = SharedMemory(lambda: self._stub, self._metadata) if near else None

    def live(self, timeout_s: float) -> bool:
        """Whether the server answers within `timeout_s` seconds."""
        try:
            return bool(
                self._stub.ServerLive(
                    service_pb2.ServerLiveRequest(), timeout=timeout_s, metadata=self._metadata
                ).live
            )
        except grpc.RpcError:
            return False

    def model_ready(self, name: str, timeout_s: float) -> bool:
        """Whether version 1 of a model answers."""
        request = service_pb2.ModelReadyRequest(name=name, version=VERSION)
        try:
            answer = self._stub.ModelReady(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError:
            return False
        return bool(answer.ready)

    def load(self, name: str, config: str, timeout_s: float) -> None:
        """Load a model with a configuration (JSON) in place of its file's.

        Raises VerificationError when Triton refuses it, UnavailableError.
        """
        request = service_pb2.RepositoryModelLoadRequest(model_name=name)
        request.parameters["config"].string_param = config
        try:
            self._stub.RepositoryModelLoad(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            if _code(error) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise UnavailableError(f"Triton did not load {name}: {_details(error)}") from error
            raise VerificationError(f"Triton refuses {name}: {_details(error)}") from error

    def unload(self, name: str, timeout_s: float) -> None:
        """Unload a model; one that is gone already is no error. Raises UnavailableError, whatever
        Triton says: it may be there still."""
        request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
        try:
            self._stub.RepositoryModelUnload(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise UnavailableError(
                f"Triton did not unload {name} ({_code(error).name}: {_details(error)})"
            ) from error

    def infer(
        self, name: str, inputs: Inputs, output: str, timeout_s: float
    ) -> NDArray[np.float32]:
        """Run one model on its inputs, each of n rows; its float32 output [n,dim].

        Raises UnavailableError, DeadlineError, VerificationError for an answer of another shape.
        """
        count = len(next(iter(inputs.values())))
        answer = self._answer(name, inputs, output, timeout_s)
        shape = list(answer.outputs[0].shape) if answer.outputs else []
        data = answer.raw_output_contents[0] if answer.raw_output_contents else b""
        if len(shape) != 2 or shape[0] != count or len(data) != 4 * shape[0] * shape[1]:
            raise VerificationError(f"{name}: expected {count} vectors, got shape {shape}")
        return np.frombuffer(data, "<f4").reshape(shape)

    def _answer(
        self, name: str, inputs: Inputs, output: str, timeout_s: float
    ) -> service_pb2.ModelInferResponse:
        region = None
        # Of a call that is given up Triton may read what the next one writes there: any bytes are
        # pixels, but only few are tokens, and those that are none end what they are batched with.
        if self._shared is not None and inputs.keys() == {"image"}:
            region = self._shared.lend(inputs["image"].nbytes)
        if region is None or self._shared is None:
            return self._infer(_request(name, inputs, output, None), timeout_s)
        try:
            return self._infer(_request(name, inputs, output, region), timeout_s)
        except UnavailableError as error:
            why = error.__cause__
            if not isinstance(why, grpc.RpcError):
                raise
            unknown = _SHARED in _details(why)
            if unknown or _code(why) is grpc.StatusCode.UNAVAILABLE:
                self._shared.forget()
            if not unknown:
                raise
            # It was started anew.
            return self._infer(_request(name, inputs, output, None), timeout_s)
        finally:
            self._shared.give_back(region)

    def _infer(
        self, request: service_pb2.ModelInferRequest, timeout_s: float
    ) -> service_pb2.ModelInferResponse:
        try:
            return self._stub.ModelInfer(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            if _code(error) is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineError("Triton did not answer within the call's time") from error
            raise UnavailableError(
                f"the model server does not answer for {request.model_name} "
                f"({_code(error).name}); try again soon"
            ) from error
        except ValueError as error:
            # What gRPC says of a channel that was closed, for another or at the end.
            raise UnavailableError(
                f"the model server is being asked anew for {request.model_name}; try again soon"
            ) from error

    def reconnect(self) -> None:
        """End every call under way with UnavailableError, and begin a new channel."""
        old = self._channel
        self._connect()
        if self._shared is not None:
            self._shared.forget()
        old.close()

    def _connect(self) -> None:
        if self._credentials is None:
            self._channel = grpc.insecure_channel(self.address, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(self.address, self._credentials, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.end()
        self._channel.close()


def remote_client(address: str, ca: Path | None, token_file: Path | None) -> TritonClient:
    """A client of somebody else's Triton at HOST:PORT or grpcs://HOST:PORT.

    `ca` holds its authority's certificate (PEM; else the system's), `token_file` a token. Raises
    ConfigurationError for a file that cannot be read.
    """
    credentials = grpc.ssl_channel_credentials(_read(ca)) if address.startswith(TLS) else None
    token = _read(token_file)
    return TritonClient(
        address.removeprefix(TLS), credentials, token.decode().strip() if token else None
    )


def _request(
    name: str, inputs: Inputs, output: str, region: Region | None
) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=name, model_version=VERSION)
    for tensor, values in inputs.items():
        kind = values.dtype.name.upper()
        asked = request.inputs.add(name=tensor, datatype=kind, shape=values.shape)
        if region is not None:
            region.hold(values, asked)
        else:
            request.raw_input_contents.append(values.tobytes())
    request.outputs.add(name=output)
    return request


def _read(path: Path | None) -> bytes | None:
    try:
        data = path.read_bytes() if path is not None else None
        if data is not None and not data.isascii():
            raise ConfigurationError(f"{path}: expected ASCII text, found other bytes")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from error
    return data


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    code: Any = error.code()
    return grpc.StatusCode(code)


def _details(error: grpc.RpcError) -> str:
    return str(error.details())
