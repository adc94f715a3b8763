"""Models in Triton: loaded by name, watched, brought back when Triton dies or hangs."""

import importlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import structlog
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from nobackfill.errors import (
    CannotWriteError,
    InvalidInputError,
    NobackfillError,
    UnavailableError,
    UnusableOutputError,
    UnusableRowsError,
    VerificationError,
    few,
)
from nobackfill.release.manifest import (
    TEXT_ROLES,
    Manifest,
    TextRole,
    config_path,
    embedder_model,
    query_encoder_model,
    side_encoder_model,
    text_encoder_model,
)
from nobackfill.release.models import Images
from nobackfill.release.text_models import TextReader
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.triton.client import LIVE_TIMEOUT_S, Inputs, TritonClient
from nobackfill.server.triton.process import Misses, TritonProcess
from nobackfill.vectors import Vectors, check_vectors

# What Triton gets of a model: its signed configuration, if that can run nothing but ONNX.
#
# Triton runs any code that a configuration names: another backend, an environment to unpack, a
# runtime. A publisher's signature makes a release believable, not its files code.

_BACKEND = "onnxruntime"
# What release/tensors.py writes.
_FIELDS = {
    "name", "backend", "max_batch_size", "input", "output", "dynamic_batching", "instance_group",
}  # fmt: skip


def model_config(repo: Path, name: str) -> str:
    """The configuration of a published model, checked, as JSON: Triton takes it before its file.

    Raises VerificationError for one that cannot be read or asks for more than running ONNX.
    """
    path = config_path(name)
    config = ModelConfig()
    try:
        text_format.Parse((repo / path).read_text("utf-8"), config)
    except (OSError, ValueError, text_format.ParseError) as error:
        raise VerificationError(f"{path}: expected a model's configuration ({error})") from error
    unknown = sorted({field.name for field, _ in config.ListFields()} - _FIELDS)
    if config.name != name or config.backend != _BACKEND or unknown:
        raise VerificationError(
            f"{path}: expected {name!r} for the backend {_BACKEND!r} and nothing else, got "
            f"{config.name!r} for {config.backend!r}, with {few(unknown) or 'no more'}; "
            "publish the release anew"
        )
    return json_format.MessageToJson(config, preserving_proto_field_name=True, indent=None)


# Loading of a release's models into Triton.

_LOAD_S = 120.0
_LOADS_AT_ONCE = 4


def model_names(manifest: Manifest) -> list[str]:
    """What Triton calls the models of a release."""
    names = [embedder_model(manifest.release)] if manifest.embedder.file else []
    if manifest.text_encoder is not None:
        names += text_models(manifest)
    if manifest.side_encoder is not None:
        # A release may keep the encoder of an older one.
        names.append(side_encoder_model(manifest.side_encoder.origin_release))
    return names


def text_models(manifest: Manifest) -> list[str]:
    """Of those that read texts."""
    return sorted({text_model(manifest, role) for role in TEXT_ROLES})


def text_model(manifest: Manifest, role: TextRole) -> str:
    """What reads texts of a role. Raises NoEncoderError."""
    own = role == "query" and manifest.reads_text.query_file is not None
    return (query_encoder_model if own else text_encoder_model)(manifest.release)


def probes(manifest: Manifest, reader: TextReader | None) -> dict[str, Inputs]:
    """By the name of each model that embeds, the least that can be asked of it."""
    asked: dict[str, Inputs] = {}
    if manifest.embedder.file is not None:
        shape = (1, manifest.frame.height, manifest.frame.width, 3)
        asked[embedder_model(manifest.release)] = {"image": np.zeros(shape, np.uint8)}
    if reader is not None:
        asked |= dict.fromkeys(text_models(manifest), reader.outermost)
    return asked


def load_models(
    client: TritonClient, model_repo: Path, names: Sequence[str]
) -> dict[str, NobackfillError]:
    """Load models side by side, as each starts an interpreter; those that fail, and why."""

    def load(name: str) -> NobackfillError | None:
        try:
            if not client.model_ready(name, LIVE_TIMEOUT_S):
                client.load(name, model_config(model_repo, name), _LOAD_S)
        except (UnavailableError, VerificationError) as error:
            return error
        return None

    with ThreadPoolExecutor(_LOADS_AT_ONCE) as pool:
        errors = zip(names, pool.map(load, names), strict=True)
        return {name: error for name, error in errors if error is not None}


# Starts of the child that is Triton: how long to wait before another.

_LONGEST_PAUSE_S = 5.0


class Starts:
    """When the child was started, and whether it answered since."""

    def __init__(self) -> None:
        self.began = 0.0
        self.answered = False
        self._failures = 0

    def pause(self) -> float:
        """Seconds to wait: none after a child that worked, then growing, with jitter."""
        self._failures = 0 if self.answered else self._failures + 1
        self.answered = False
        if not self._failures:
            return 0.0
        longest: float = min(_LONGEST_PAUSE_S, 0.1 * 2**self._failures)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads restarts, hides nothing


log = structlog.get_logger("server.triton")

_PROBE_EVERY_S = 0.2
# A model may be busy with large batches; one that answered lately needs no probe.
_INFER_TIMEOUT_S = 1.5
_FRESH_S = 1.0
_START_S = 60.0
# Seconds between tries to unload models that Triton kept.
_UNLOAD_EVERY_S = 5.0
# The gateway's start waits so long for a child that neither answers nor ends, or for somebody
# else's Triton.
_FIRST_S = 30.0
_FOUND_S = 5.0


class TritonModels:
    """See Models. With `process`, starts and restarts that Triton; else uses the one at `address`.

    A thread of its own starts and watches Triton for as long as the gateway lives.
    """

    def __init__(
        self,
        model_repo: Path,
        client: TritonClient,
        process: TritonProcess | None,
        metrics: Metrics,
        on_change: Callable[[bool], None] = lambda _up: None,
    ) -> None:
        self._model_repo = model_repo
        self._metrics = metrics
        self._client = client
        self._process = process
        self._on_change = on_change
        self._lock = threading.Lock()
        self._wanted: dict[int, Manifest] = {}
        # Of the wanted releases that embed texts.
        self._readers: dict[int, TextReader] = {}
        # Models that nobody wants, and that may be loaded still.
        self._leftover: set[str] = set()
        self._unloaded = 0.0
        # When each model last gave an answer.
        self._answered: dict[str, float] = {}
        self._misses = Misses(None if process is None else process.processor_s)
        self._starts = Starts()
        self._up = threading.Event()
        # Set once it was up, or a child of ours has ended without.
        self._tried = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="triton", daemon=True)

    def start(self) -> None:
        """Start Triton, or look for it. Where it does not answer at first, it is tried again and
        again beside what serves without it."""
        self._thread.start()
        # Meanwhile: upgrades run models here. The first would keep the interpreter from all calls
        # for 50 ms to load what runs them.
        importlib.import_module("nobackfill.onnx_runtime")
        self._tried.wait(_FIRST_S if self._process is not None else _FOUND_S)
        if not self._up.is_set():
            tail = "" if self._process is None else self._process.log_tail()
            log.error(
                "no model server yet; searches by embedding are answered without it",
                address=self._client.address, log=tail,
            )  # fmt: skip

    def load(self, manifest: Manifest) -> None:
        if not self._up.wait(min(_START_S, context.current().remaining())):
            raise UnavailableError("the model server is away; load the release when it is back")
        with self._lock:
            self._leftover -= set(model_names(manifest))
        for error in load_models(self._client, self._model_repo, model_names(manifest)).values():
            raise error
        self._keep(manifest)
        log.info("loaded in Triton", release=manifest.release)

    def want(self, manifest: Manifest) -> None:
        if self._up.is_set():
            try:
                self.load(manifest)
            except UnavailableError as error:
                log.error("not loaded yet", release=manifest.release, error=str(error))
        # Whatever is wanted is loaded before Triton counts as up.
        self._keep(manifest)

    def _keep(self, manifest: Manifest) -> None:
        with self._lock:
            known = manifest.text_encoder is None or manifest.release in self._readers
        reader = None if known else TextReader(self._model_repo, manifest)
        with self._lock:
            self._wanted[manifest.release] = manifest
            if reader is not None:
                self._readers[manifest.release] = reader

    def unload(self, release: int) -> None:
        with self._lock:
            manifest = self._wanted.pop(release, None)
            self._readers.pop(release, None)
            self._leftover |= set(model_names(manifest)) if manifest else set()
        self._unload_leftover()

    def _unload_leftover(self) -> None:
        """Unload models; those that Triton keeps are tried again at a later look."""
        with self._lock:
            kept = {name for other in self._wanted.values() for name in model_names(other)}
            self._leftover -= kept
            left = sorted(self._leftover)
        self._unloaded = time.monotonic()
        for name in left:
            if name not in self._leftover:
                # Somebody loads it.
                continue
            try:
                self._client.unload(name, LIVE_TIMEOUT_S)
            except UnavailableError as error:
                log.warning("not unloaded yet", model=name, error=str(error))
                continue
            with self._lock:
                self._leftover.discard(name)

    def embed(self, manifest: Manifest, images: Images) -> Vectors:
        spec = manifest.embedder
        if manifest.embedder.file is None:
            raise manifest.no_images()
        vectors = self._run(embedder_model(manifest.release), {"image": images}, "embedding")
        return _checked(vectors, spec.dim, unit=spec.unit)

    def texts(self, manifest: Manifest, texts: Sequence[str], role: TextRole) -> Vectors:
        if manifest.text_encoder is None:
            raise manifest.no_texts()
        with self._lock:
            reader = self._readers.get(manifest.release)
        if reader is None:
            raise UnavailableError(f"the models of release {manifest.release} are not loaded")
        spec = manifest.embedder
        name = text_model(manifest, role)
        vectors = self._run(name, reader.feed(texts, role), "embedding")
        return _checked(vectors, spec.dim, unit=spec.unit)

    def side(self, manifest: Manifest, images: Images) -> Vectors | None:
        if manifest.side_encoder is None:
            return None
        name = side_encoder_model(manifest.side_encoder.origin_release)
        vectors = self._run(name, {"image": images}, "side")
        return _checked(vectors, manifest.side_encoder.dim, unit=False)

    def ready(self) -> bool:
        return self._up.is_set()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        elif self._process is not None and self._thread.ident is None:
            # Never started, but it holds its folder.
            self._process.stop()
        self._client.close()

    def _run(self, name: str, inputs: Inputs, output: str) -> Vectors:
        if not self._up.is_set():
            raise UnavailableError(
                "the model server is away, it is being brought back; searching by embedding works"
            )
        vectors = self._client.infer(name, inputs, output, context.current().remaining())
        self._answered[name] = time.monotonic()
        return vectors

    def _watch(self) -> None:
        try:
            while not self._stopping.is_set():
                with error_boundary(self._metrics, "triton"):
                    self._look()
                self._stopping.wait(_PROBE_EVERY_S if self._up.is_set() else _PROBE_EVERY_S / 5)
        finally:
            self._set_up(False)
            if self._process is not None:
                self._process.stop()

    def _look(self) -> None:
        if self._process is not None and not self._process.alive():
            self._start_process(self._process)
        elif not (self._client.live(LIVE_TIMEOUT_S) and self._embeds()):
            self._miss()
        else:
            self._misses.clear()
            self._starts.answered = True
            self._set_up(True)
            if self._leftover and time.monotonic() - self._unloaded > _UNLOAD_EVERY_S:
                self._unload_leftover()

    def _start_process(self, process: TritonProcess) -> None:
        self._set_up(False)
        if self._starts.began:
            log.error("Triton is gone", log=process.log_tail())
            self._tried.set()
            self._stopping.wait(self._starts.pause())
            self._metrics.triton_restarts.inc()
        try:
            process.start()
        except (UnavailableError, CannotWriteError, OSError) as error:
            log.error("Triton cannot be started", error=str(error))
            self._tried.set()
        with self._lock:
            # A new one loads what is wanted alone.
            self._leftover.clear()
        self._misses.clear()
        self._starts.began = time.monotonic()

    def _embeds(self) -> bool:
        """Bring back the wanted models if need be; whether the one asked longest ago embeds."""
        with self._lock:
            wanted = list(self._wanted.values())
        if not self._up.is_set():
            names = sorted({name for manifest in wanted for name in model_names(manifest)})
            for name, error in load_models(self._client, self._model_repo, names).items():
                log.error("not loaded again", model=name, error=str(error))
        asked = {
            name: inputs
            for manifest in wanted
            for name, inputs in probes(manifest, self._readers.get(manifest.release)).items()
        }
        oldest = min(asked, key=lambda name: self._answered.get(name, 0.0), default=None)
        if oldest is None or time.monotonic() - self._answered.get(oldest, 0.0) < _FRESH_S:
            return True
        try:
            self._client.infer(oldest, asked[oldest], "embedding", _INFER_TIMEOUT_S)
        except (UnavailableError, VerificationError):
            return False
        self._answered[oldest] = time.monotonic()
        return True

    def _miss(self) -> None:
        self._misses.add()
        was_up = self._up.is_set()
        if self._misses.unready and was_up:
            self._set_up(False)
            self._client.reconnect()
        if self._process is None:
            return
        if self._starts.answered:
            late = self._misses.hangs
        else:
            late = time.monotonic() - self._starts.began > _START_S
        if late:
            log.error("Triton hangs, ending it", missed=self._misses.count, was_up=was_up)
            self._process.kill()

    def _set_up(self, up: bool) -> None:
        if up != self._up.is_set():
            log.info("model server", up=up)
            (self._up.set if up else self._up.clear)()
            self._on_change(up)
            if up:
                self._tried.set()


def _checked(vectors: Vectors, dim: int, *, unit: bool) -> Vectors:
    try:
        return check_vectors(vectors, dim, what="Triton's output", unit=unit)
    except UnusableRowsError as error:
        raise UnusableOutputError(str(error), error.rows) from error
    except InvalidInputError as error:
        raise VerificationError(str(error)) from error
