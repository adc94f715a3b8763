"""Call Triton over gRPC: load and run models, and turn its statuses into our errors."""

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
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from nobackfill.errors import ConfigurationError, DeadlineError, UnavailableError, VerificationError
from nobackfill.loopback import is_loopback
from nobackfill.server.settings import TLS, split_address

# A Triton on this machine reads pixels from shared memory, so that no message carries them. A
# region has a name in /dev/shm only until Triton has mapped it, so that a killed process leaves no
# file. If Triton does not see this machine's memory, messages carry the pixels.

log = structlog.get_logger("server.triton")

_SHM = Path("/dev/shm")  # noqa: S108 - where shm_open looks
# The prefix of process.py: the next gateway that starts removes the files of a killed one.
_PREFIX = "nobackfill-"
# Fewer bytes take as long in a message. More bytes, or more regions, would fill /dev/shm.
_MIN_BYTES, _MAX_BYTES, _MAX_REGIONS = 32 * 2**10, 16 * 2**20, 2
# So many times a region's size must be free: a container's /dev/shm has 64 MB, and Triton needs
# some of it.
_FREE_FACTOR = 2
_TIMEOUT_S = 0.6
# After a failure, shared memory is tried again after so many seconds.
_PAUSE_S = 60.0


class SharedRegion:
    """Hold memory that Triton has mapped under `name`."""

    def __init__(self, name: str, byte_count: int) -> None:
        """Create the memory as a file in /dev/shm that only this user can open; the caller unlinks
        its `path`.

        Args:
            name: its name.
            byte_count: its size in bytes, at least 1.

        Raises:
            OSError: it cannot be created, the name is in use, or there is no room; no file is left.
        """
        self.name = name
        self.size = byte_count
        self.path = _SHM / name
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Without this, a write without room would kill the process.
            os.posix_fallocate(file, 0, byte_count)
            self._memory = np.frombuffer(mmap.mmap(file, byte_count), np.uint8)
        except BaseException:
            self.path.unlink()
            raise
        finally:
            os.close(file)

    def hold(
        self, values: NDArray[np.uint8], tensor: pb.ModelInferRequest.InferInputTensor
    ) -> None:
        """Copy values into the memory, and make a request's tensor refer to it.

        Args:
            values: at most `size` bytes (ValueError otherwise).
            tensor: the tensor, which is changed.
        """
        self._memory[: values.nbytes] = values.reshape(-1)
        tensor.parameters["shared_memory_region"].string_param = self.name
        tensor.parameters["shared_memory_byte_size"].int64_param = values.nbytes


class SharedMemory:
    """Share memory between one client and its Triton; threads may use it at the same time."""

    def __init__(
        self, stub: Callable[[], GRPCInferenceServiceStub], metadata: Sequence[tuple[str, str]]
    ) -> None:
        """Start without regions; does not call Triton.

        Args:
            stub: returns the stub of the present channel.
            metadata: metadata of each call; empty means none.
        """
        self._stub = stub
        self._metadata = metadata
        self._lock = threading.Lock()
        own = f"{_PREFIX}{os.getpid()}-{os.urandom(8).hex()}-pixels"
        self._names = [f"{own}-{number}" for number in range(_MAX_REGIONS)]
        self._free: list[SharedRegion] = []
        self._lent: set[SharedRegion] = set()
        # Until then (monotonic clock), messages carry the pixels.
        self._off_until = 0.0
        self._swept = False

    def acquire_region(self, byte_count: int) -> SharedRegion | None:
        """Return a region for so many bytes, which the caller alone uses until `release_region`.

        If no free one is large enough, a region is created and mapped by Triton: some calls, each
        of at most 0.6 s. A failure is logged and turns shared memory off for a minute, except while
        Triton is away.

        Args:
            byte_count: number of bytes.

        Returns:
            The region, which may be larger. None below 32 KiB or above 16 MiB, if both regions are
            in use, or if one cannot be created now or in the last minute. A message then carries
            the pixels.
        """
        if not _MIN_BYTES <= byte_count <= _MAX_BYTES or time.monotonic() < self._off_until:
            return None
        with self._lock:
            fitting = next((region for region in self._free if region.size >= byte_count), None)
            if fitting is not None:
                self._free.remove(fitting)
                self._lent.add(fitting)
                return fitting
            # A region that is too small makes room for a larger one.
            names = self._names or [self._free.pop().name for _ in self._free[:1]]
            if not names:
                return None
            name = names.pop()
        region = None
        try:
            region = self._create(name, byte_count)
        finally:
            with self._lock:
                if region is None:
                    self._names.append(name)
                else:
                    self._lent.add(region)
        return region

    def release_region(self, region: SharedRegion) -> None:
        """Let other calls use a region again; one that `forget` has forgotten only gives its name
        back.

        Call it once for each `acquire_region`: after a second call, two calls may share the region.
        """
        with self._lock:
            is_mapped = region in self._lent
            self._lent.discard(region)
            if is_mapped:
                self._free.append(region)
            else:
                self._names.append(region.name)

    def forget(self) -> None:
        """Forget all regions, because Triton has restarted or is another one; does not call Triton.

        Shared memory that was turned off after a failure is tried again at once.
        """
        with self._lock:
            self._names += [region.name for region in self._free]
            self._free.clear()
            self._lent.clear()
            self._off_until, self._swept = 0.0, False

    def end(self) -> None:
        """Ask Triton to unmap the regions.

        Call it when no call uses them. At Triton's first error it stops, and raises nothing. Each
        region takes at most 0.6 s. Do not call `acquire_region` afterwards.

        Raises:
            ValueError: the channel was closed before, and there are regions.
        """
        with contextlib.suppress(grpc.RpcError):
            for region in self._free:
                self._unregister(region.name)

    def _create(self, name: str, size: int) -> SharedRegion | None:
        # Sizes grow in few steps.
        size = 1 << (size - 1).bit_length()
        try:
            if not self._swept:
                self._unmap_leftovers()
            # Triton may still map the earlier region of this name.
            self._unregister(name)
            room = os.statvfs(_SHM)
            if room.f_bavail * room.f_frsize < _FREE_FACTOR * size:
                raise OSError("too little room in /dev/shm")
            region = SharedRegion(name, size)
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
            # Triton runs on another machine, in another container or as another user. If it is
            # away, the caller's own call fails, too.
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                self._pause_sharing(str(error.details()))
            return None
        except ValueError:
            # The channel was closed meanwhile, and replaced.
            return None
        except (OSError, AttributeError) as error:
            # There is no room, or the system has no such memory.
            self._pause_sharing(str(error))
            return None
        return region

    def _pause_sharing(self, why: str) -> None:
        self._off_until = time.monotonic() + _PAUSE_S
        log.info("pixels go to Triton in messages for now", because=why)

    def _unmap_leftovers(self) -> None:
        """Unmap the regions that killed gateways have left in Triton."""
        request = pb.SystemSharedMemoryStatusRequest()
        status = self._stub().SystemSharedMemoryStatus(
            request, timeout=_TIMEOUT_S, metadata=self._metadata
        )
        for name in status.regions:
            pid = name.removeprefix(_PREFIX).partition("-")[0]
            if name.startswith(_PREFIX) and pid.isdecimal() and not Path("/proc", pid).exists():
                self._unregister(name)
        self._swept = True

    def _unregister(self, name: str) -> None:
        """Ask Triton to unmap a region; an unknown name does nothing.

        Raises:
            grpc.RpcError: Triton does not answer.
        """
        request = pb.SystemSharedMemoryUnregisterRequest(name=name)
        self._stub().SystemSharedMemoryUnregister(
            request, timeout=_TIMEOUT_S, metadata=self._metadata
        )


# Releases are immutable, so a model has one version.
VERSION = "1"

# uint8 or int64 arrays by the input's name.
Inputs = Mapping[str, NDArray[Any]]

# Longest time (seconds) for answers that need no model.
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

# Part of Triton's error for a region that it does not know.
_UNKNOWN_REGION = "shared memory region"

# The header that tritonserver expects if it was started with
# --grpc-restricted-protocol=...:nobackfill-token=TOKEN. A proxy in front of it reads
# `authorization`.
_HEADER = "triton-grpc-protocol-nobackfill-token"


class TritonClient:
    """Call one tritonserver over one channel; calls have timeouts, and are never retried."""

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        """Open the channel, without waiting for the server; `close` closes it.

        Pixels go through shared memory if the address is a socket or loopback, without TLS.

        Args:
            address: HOST:PORT, or unix:PATH.
            credentials: credentials for TLS; None means without TLS, for sockets of our own and
                loopback.
            token: sent with every call; None means no token.

        Raises:
            ValueError: without TLS, the address has another form.
        """
        self.address = address
        self._credentials = credentials
        self._metadata = (
            ((_HEADER, token), ("authorization", f"Bearer {token}")) if token is not None else ()
        )
        self._connect()
        is_local = credentials is None and (
            address.startswith("unix:") or is_loopback(split_address(address, "triton")[0])
        )
        self._shared = SharedMemory(lambda: self._stub, self._metadata) if is_local else None

    def is_live(self, timeout_s: float) -> bool:
        """Tell whether the server answers within `timeout_s` seconds that it is live; any gRPC
        error means False.

        Raises:
            ValueError: the channel was closed, by `close` or by `reconnect` at this moment.
        """
        request = pb.ServerLiveRequest()
        try:
            answer = self._stub.ServerLive(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError:
            return False
        return bool(answer.live)

    def model_ready(self, name: str, timeout_s: float) -> bool:
        """Tell whether the server answers within `timeout_s` seconds that version 1 of a model is
        ready; any gRPC error means False.

        Raises:
            ValueError: the channel was closed, by `close` or by `reconnect` at this moment.
        """
        request = pb.ModelReadyRequest(name=name, version=VERSION)
        try:
            answer = self._stub.ModelReady(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError:
            return False
        return bool(answer.ready)

    def load(self, name: str, config: str, timeout_s: float) -> None:
        """Load a model, or load it again; blocks until it is ready.

        Args:
            name: the model.
            config: a configuration (JSON) that replaces that of its file.
            timeout_s: longest time in seconds.

        Raises:
            VerificationError: Triton refuses the model; any error but no answer in time counts as
                a refusal, also a call that `reconnect` ended.
            UnavailableError: Triton does not answer, or not in time; the model may be loaded later.
            ValueError: the channel was closed, by `close` or by `reconnect` at this moment.
        """
        request = pb.RepositoryModelLoadRequest(model_name=name)
        request.parameters["config"].string_param = config
        try:
            self._stub.RepositoryModelLoad(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            no_answer = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
            if _status_code(error) in no_answer:
                raise UnavailableError(
                    f"Triton did not load the model {name}: {_status_details(error)}; try again in "
                    "a few seconds, and read Triton's log"
                ) from error
            raise VerificationError(
                f"Triton refuses the model {name}: {_status_details(error)}; publish the release "
                "again, or read Triton's log"
            ) from error

    def unload(self, name: str, timeout_s: float) -> None:
        """Unload a model; one that is not loaded is no error.

        Raises:
            UnavailableError: Triton did not do it, for any reason; the model may still be loaded.
            ValueError: the channel was closed, by `close` or by `reconnect` at this moment.
        """
        request = pb.RepositoryModelUnloadRequest(model_name=name)
        try:
            self._stub.RepositoryModelUnload(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise UnavailableError(
                f"Triton did not unload the model {name} ({_status_code(error).name}: "
                f"{_status_details(error)}); the gateway tries again later"
            ) from error

    def infer(
        self, name: str, inputs: Inputs, output: str, timeout_s: float
    ) -> NDArray[np.float32]:
        """Run version 1 of a model.

        Large pixels go through shared memory if Triton maps it. If Triton has forgotten the region
        after a restart, the call is made once more with the pixels in the message.

        Args:
            name: the model.
            inputs: its inputs, at least one, n rows each.
            output: name of the output.
            timeout_s: longest time of one call in seconds. Before it, sharing new memory may take
                some calls of 0.6 s each.

        Returns:
            The output, float32 [n, dim], read-only; its values are not checked.

        Raises:
            UnavailableError: Triton does not answer, refuses the call, as for an unknown model, or
                the channel was replaced.
            DeadlineError: Triton does not answer in time.
            VerificationError: the output has another shape.
        """
        count = len(next(iter(inputs.values())))
        answer = self._infer_in_memory(name, inputs, output, timeout_s)
        shape = list(answer.outputs[0].shape) if answer.outputs else []
        data = answer.raw_output_contents[0] if answer.raw_output_contents else b""
        if len(shape) != 2 or shape[0] != count or len(data) != 4 * shape[0] * shape[1]:
            raise VerificationError(
                f"model {name}: expected {count} vectors as its output, got shape {shape}; publish "
                "the release again"
            )
        return np.frombuffer(data, "<f4").reshape(shape)

    def _infer_in_memory(
        self, name: str, inputs: Inputs, output: str, timeout_s: float
    ) -> pb.ModelInferResponse:
        region = None
        # After a call was given up, Triton may still read its region while the next call writes
        # there. Any bytes are valid pixels; invalid tokens would fail their whole batch.
        if self._shared is not None and inputs.keys() == {"image"}:
            region = self._shared.acquire_region(inputs["image"].nbytes)
        if region is None or self._shared is None:
            return self._infer(_infer_request(name, inputs, output, None), timeout_s)
        try:
            return self._infer(_infer_request(name, inputs, output, region), timeout_s)
        except UnavailableError as error:
            cause = error.__cause__
            if not isinstance(cause, grpc.RpcError):
                raise
            is_unknown = _UNKNOWN_REGION in _status_details(cause)
            if is_unknown or _status_code(cause) is grpc.StatusCode.UNAVAILABLE:
                self._shared.forget()
            if not is_unknown:
                raise
            # Triton has restarted.
            return self._infer(_infer_request(name, inputs, output, None), timeout_s)
        finally:
            self._shared.release_region(region)

    def _infer(self, request: pb.ModelInferRequest, timeout_s: float) -> pb.ModelInferResponse:
        try:
            return self._stub.ModelInfer(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            if _status_code(error) is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineError(
                    "the call's deadline passed before Triton had embedded its images or texts; "
                    "allow more time, or send fewer at once"
                ) from error
            raise UnavailableError(
                f"the model server (Triton) does not answer for the model {request.model_name} "
                f"({_status_code(error).name}); try again in a few seconds"
            ) from error
        except ValueError as error:
            # gRPC raises this for a channel that was closed.
            raise UnavailableError(
                f"the connection to the model server (Triton) was replaced during a call of the "
                f"model {request.model_name}; try again in a few seconds"
            ) from error

    def reconnect(self) -> None:
        """End all running calls, and open a new channel; Triton is not called.

        Running `infer` and `unload` raise UnavailableError, `load` raises VerificationError, and
        the others return False. Regions of shared memory are forgotten.
        """
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
        self._stub = GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        """Ask Triton to unmap the shared memory, for at most 0.6 s a region, and close the channel;
        calls that run end with an error.

        Raises:
            ValueError: it was called before, and there are regions.
        """
        if self._shared is not None:
            self._shared.end()
        self._channel.close()


def remote_client(address: str, ca_file: Path | None, token_file: Path | None) -> TritonClient:
    """Make a client of a Triton that the gateway did not start; does not wait for it.

    Args:
        address: HOST:PORT, without TLS, or grpcs://HOST:PORT.
        ca_file: file with the certificate of its authority (PEM); None means those of the system.
            Unused without TLS.
        token_file: file with a token, without the space around it; None or an empty file means no
            token.

    Raises:
        ConfigurationError: a file cannot be read, or is not ASCII.
        ValueError: without TLS, the address has another form.
    """
    credentials = (
        grpc.ssl_channel_credentials(_read_ascii_file(ca_file)) if address.startswith(TLS) else None
    )
    token = _read_ascii_file(token_file)
    return TritonClient(
        address.removeprefix(TLS), credentials, token.decode().strip() if token else None
    )


def _infer_request(
    name: str, inputs: Inputs, output: str, region: SharedRegion | None
) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=name, model_version=VERSION)
    for tensor, values in inputs.items():
        kind = values.dtype.name.upper()
        input_tensor = request.inputs.add(name=tensor, datatype=kind, shape=values.shape)
        if region is not None:
            region.hold(values, input_tensor)
        else:
            request.raw_input_contents.append(values.tobytes())
    request.outputs.add(name=output)
    return request


def _read_ascii_file(path: Path | None) -> bytes | None:
    try:
        data = path.read_bytes() if path is not None else None
        if data is not None and not data.isascii():
            raise ConfigurationError(
                f"{path}: expected ASCII text in this file of triton_ca or triton_token_file, "
                "found other bytes; name the right file"
            )
    except OSError as error:
        raise ConfigurationError(
            f"{path}: this file of triton_ca or triton_token_file cannot be read "
            f"({error.strerror}); check its name and permissions"
        ) from error
    return data


def _status_code(error: grpc.RpcError) -> grpc.StatusCode:
    code: Any = error.code()
    return grpc.StatusCode(code)


def _status_details(error: grpc.RpcError) -> str:
    return str(error.details())
