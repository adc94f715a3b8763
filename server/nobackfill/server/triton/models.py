"""Load models in Triton by name, watch them, and bring them back when Triton dies or hangs."""

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
    join_few,
)
from nobackfill.release.manifest import (
    TEXT_ROLES,
    Manifest,
    TextRole,
    config_path,
    embedder_model_name,
    query_encoder_model_name,
    side_encoder_model_name,
    text_encoder_model_name,
)
from nobackfill.release.models import Images
from nobackfill.release.text_models import TextReader
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.triton.client import LIVE_TIMEOUT_S, Inputs, TritonClient
from nobackfill.server.triton.process import MissedProbes, TritonProcess
from nobackfill.vectors import Vectors, check_vectors

# Triton gets a model's signed configuration only if that can run nothing but ONNX. Triton runs any
# code that a configuration names: another backend, an environment to unpack, a runtime. A signature
# makes a release authentic, but its files must not become code.

_BACKEND = "onnxruntime"
# The fields that release/tensors.py writes.
_FIELDS = {
    "name", "backend", "max_batch_size", "input", "output", "dynamic_batching", "instance_group",
}  # fmt: skip


def model_config(repo: Path, name: str) -> str:
    """Read and check the configuration of a published model; Triton prefers it to the file.

    Args:
        repo: the publication folder.
        name: Triton's name of the model.

    Returns:
        The configuration as JSON, on one line.

    Raises:
        VerificationError: it is missing or cannot be read, is of another model, or needs more than
            ONNX.
    """
    path = config_path(name)
    config = ModelConfig()
    try:
        text_format.Parse((repo / path).read_text("utf-8"), config)
    except (OSError, ValueError, text_format.ParseError) as error:
        raise VerificationError(
            f"{path}: cannot read the model's configuration for Triton ({error}); publish the "
            "release again"
        ) from error
    unknown = sorted({field.name for field, _ in config.ListFields()} - _FIELDS)
    if config.name != name or config.backend != _BACKEND or unknown:
        raise VerificationError(
            f"{path}: expected a configuration of the model {name!r} for the backend {_BACKEND!r} "
            f"and no other settings, got model {config.name!r}, backend {config.backend!r} and "
            f"settings {join_few(unknown) or 'none'}; publish the release again"
        )
    return json_format.MessageToJson(config, preserving_proto_field_name=True, indent=None)


_LOAD_SECONDS = 120.0
_CONCURRENT_LOADS = 4


def model_names(manifest: Manifest) -> list[str]:
    """Return Triton's names of a release's models: images, texts and side-information, in this
    order; empty if it has none.

    A side-information encoder of an older release has the older release's name.
    """
    names = [embedder_model_name(manifest.release)] if manifest.embedder.file else []
    if manifest.text_encoder is not None:
        names += text_models(manifest)
    if manifest.side_encoder is not None:
        # A release may use the side-information encoder of an older one.
        names.append(side_encoder_model_name(manifest.side_encoder.origin_release))
    return names


def text_models(manifest: Manifest) -> list[str]:
    """Return Triton's names of the models that read texts: one or two, sorted.

    Raises:
        NoEncoderError: the release embeds no texts.
    """
    return sorted({text_model(manifest, role) for role in TEXT_ROLES})


def text_model(manifest: Manifest, role: TextRole) -> str:
    """Return Triton's name of the model that reads texts of a role: the query encoder if the
    release has one and the role is `query`, else the text encoder.

    Raises:
        NoEncoderError: the release embeds no texts.
    """
    has_query_model = role == "query" and manifest.reads_text.query_file is not None
    return (query_encoder_model_name if has_query_model else text_encoder_model_name)(
        manifest.release
    )


def smallest_inputs(manifest: Manifest, reader: TextReader | None) -> dict[str, Inputs]:
    """Return the smallest input of each model that embeds, by its name: one black image, and the
    reader's token inputs for texts.

    Side-information encoders are left out.

    Args:
        manifest: the release.
        reader: the release's text reader; None leaves its text models out.

    Raises:
        NoEncoderError: there is a reader, but the release embeds no texts.
    """
    inputs: dict[str, Inputs] = {}
    if manifest.embedder.file is not None:
        shape = (1, manifest.frame.height, manifest.frame.width, 3)
        inputs[embedder_model_name(manifest.release)] = {"image": np.zeros(shape, np.uint8)}
    if reader is not None:
        inputs |= dict.fromkeys(text_models(manifest), reader.largest_token_inputs)
    return inputs


def load_models(
    client: TritonClient, model_repo: Path, names: Sequence[str]
) -> dict[str, NobackfillError]:
    """Load models concurrently, four at a time, because each starts an interpreter; a model that is
    ready is not loaded again.

    Blocks for at most about 120 s for each model. Models that did load stay loaded if others fail.

    Args:
        client: calls Triton.
        model_repo: the publication folder.
        names: Triton's names of the models; empty loads none. A repeated name may be loaded twice.

    Returns:
        The error of each model that failed, by its name: UnavailableError if Triton does not answer
        in time, VerificationError if it refuses the model or the configuration is not valid.

    Raises:
        ValueError: the client's channel was closed, or replaced at this moment.
    """

    def load(name: str) -> NobackfillError | None:
        try:
            if not client.model_ready(name, LIVE_TIMEOUT_S):
                client.load(name, model_config(model_repo, name), _LOAD_SECONDS)
        except (UnavailableError, VerificationError) as error:
            return error
        return None

    with ThreadPoolExecutor(_CONCURRENT_LOADS) as pool:
        errors = zip(names, pool.map(load, names), strict=True)
        return {name: error for name, error in errors if error is not None}


_MAX_PAUSE_SECONDS = 5.0


class RestartBackoff:
    """Remember when Triton was started, and whether it has answered since."""

    def __init__(self) -> None:
        self.started_at = 0.0
        self.has_answered = False
        self._failures = 0

    def restart_delay(self) -> float:
        """Return the seconds to wait before another start: 0 after a child that worked, else
        growing to at most 5, with jitter.

        Each call counts a start: it forgets that the child has answered. Call it before restarts
        only; before the first start it gives 0.1 to 0.2 s.
        """
        self._failures = 0 if self.has_answered else self._failures + 1
        self.has_answered = False
        if not self._failures:
            return 0.0
        longest: float = min(_MAX_PAUSE_SECONDS, 0.1 * 2**self._failures)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads restarts, hides nothing


log = structlog.get_logger("server.triton")

_PROBE_EVERY_S = 0.2
# A probe that ends so much later than its timeout waited for a processor in this process.
_LATE_S = 0.2
# A model may be busy with large batches; one that answered lately needs no probe.
_INFER_TIMEOUT_S = 1.5
_FRESH_S = 1.0
_START_S = 60.0
# Seconds between tries to unload models that Triton did not unload.
_UNLOAD_EVERY_S = 5.0
# Longest wait (seconds) of the gateway's start, for a child of its own and for an external Triton.
_FIRST_S = 30.0
_FOUND_S = 5.0


class TritonModels:
    """Run models in Triton; see Models.

    It starts and restarts the Triton of `process`, or uses an external one. A thread watches Triton
    as long as the gateway runs.
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
        self._releases: dict[int, Manifest] = {}
        # Text readers of the loaded releases that embed texts.
        self._readers: dict[int, TextReader] = {}
        # Models that are not needed any more, but may still be loaded.
        self._leftover: set[str] = set()
        self._unloaded = 0.0
        # When each model last gave an answer.
        self._last_answers: dict[str, float] = {}
        self._misses = MissedProbes(None if process is None else process.processor_s)
        self._starts = RestartBackoff()
        self._up = threading.Event()
        # Set once Triton has answered, or a child has ended without an answer.
        self._first_result = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="triton", daemon=True)

    def start(self) -> None:
        """Start Triton, or look for it; if it does not answer, tries go on in the background.

        Waits for the first answer, at most 30 s for a child of its own and 5 s for an external
        Triton. A Triton that does not answer is logged as an error, and nothing is raised. Call it
        once.

        Raises:
            RuntimeError: it was called before.
        """
        self._thread.start()
        # Loaded during the wait, because upgrades run models in this process: the first one would
        # block all calls for 50 ms.
        importlib.import_module("nobackfill.onnx_runtime")
        self._first_result.wait(_FIRST_S if self._process is not None else _FOUND_S)
        if not self._up.is_set():
            tail = "" if self._process is None else self._process.log_tail()
            log.error(
                "the model server (Triton) does not answer yet; searches by embedding work without "
                "it",
                address=self._client.address, log=tail,
            )  # fmt: skip

    def load(self, manifest: Manifest) -> None:
        """Load a release, and return once it is ready; models that are ready are not loaded again,
        but Triton must answer.

        Waits at most 60 s, or as long as the call allows, for Triton to answer. Then each model may
        take about 120 s, whatever the call's time is. After an error some of its models may be
        loaded, but the release does not count as loaded. Any thread may call it; calls at the same
        time do not wait for each other.

        Raises:
            UnavailableError: Triton does not answer within 60 s or the call's time, or does not
                load a model in time.
            DeadlineError: the call's time was over before the wait.
            VerificationError: Triton refuses a model, or a configuration or tokenizer is not valid.
            ConfigurationError: the release embeds texts, and the extra `text` is not installed.
            ValueError: the connection was closed, or replaced at this moment.
        """
        if not self._up.wait(min(_START_S, context.current_call().remaining())):
            raise UnavailableError(
                f"release {manifest.release} cannot be loaded: the model server (Triton) does not "
                "answer; read its log, triton.log in the gateway's data folder, and try again when "
                "the gateway logs `model server up`"
            )
        with self._lock:
            self._leftover -= set(model_names(manifest))
        for error in load_models(self._client, self._model_repo, model_names(manifest)).values():
            raise error
        self._record_release(manifest)
        log.info("loaded in Triton", release=manifest.release)

    def load_when_ready(self, manifest: Manifest) -> None:
        """Load a release now, or as soon as the model server is there; never wait for it to answer.

        If Triton answers, this loads the models at once, for at most about 120 s each. A Triton
        that does not answer in time is logged, and the models are loaded when it answers again.
        While Triton does not answer, only the tokenizer is checked. A failure of the later load is
        logged, and the release stays wanted.

        Raises:
            VerificationError: Triton refuses a model, or a configuration or tokenizer is not valid;
                the release is then not wanted.
            ConfigurationError: the release embeds texts, and the extra `text` is not installed.
            ValueError: the connection was closed, or replaced at this moment.
        """
        if self._up.is_set():
            try:
                self.load(manifest)
            except UnavailableError as error:
                log.error(
                    "the models of a release cannot be loaded yet; they are loaded when the model "
                    "server answers",
                    release=manifest.release,
                    error=str(error),
                )
        # All needed models are loaded before Triton counts as ready.
        self._record_release(manifest)

    def _record_release(self, manifest: Manifest) -> None:
        with self._lock:
            known = manifest.text_encoder is None or manifest.release in self._readers
        reader = None if known else TextReader(self._model_repo, manifest)
        with self._lock:
            self._releases[manifest.release] = manifest
            if reader is not None:
                self._readers[manifest.release] = reader

    def unload(self, release: int) -> None:
        """Free a release that no caller uses any more; an unknown release is ignored.

        Models that another loaded release needs stay. A model that Triton does not unload is
        logged, and tried again every 5 s. Each model takes at most 0.6 s.
        Embedding texts by the release fails from then on, even if its models stay loaded.

        Raises:
            ValueError: the connection was closed, or replaced at this moment.
        """
        with self._lock:
            manifest = self._releases.pop(release, None)
            self._readers.pop(release, None)
            self._leftover |= set(model_names(manifest)) if manifest else set()
        self._unload_leftover()

    def _unload_leftover(self) -> None:
        """Unload models that are not needed; those that Triton keeps are tried again later."""
        with self._lock:
            needed = {name for other in self._releases.values() for name in model_names(other)}
            self._leftover -= needed
            names = sorted(self._leftover)
        self._unloaded = time.monotonic()
        for name in names:
            if name not in self._leftover:
                # It is being loaded again.
                continue
            try:
                self._client.unload(name, LIVE_TIMEOUT_S)
            except UnavailableError as error:
                log.warning(
                    "the model server (Triton) has not unloaded a model yet; the gateway tries "
                    "again",
                    model=name,
                    error=str(error),
                )
                continue
            with self._lock:
                self._leftover.discard(name)

    def embed_images(self, manifest: Manifest, images: Images) -> Vectors:
        """Embed images.

        It waits at most until the call's deadline. Any thread may call it, and the release need not
        have been loaded by this object.

        Args:
            manifest: the release.
            images: uint8 [n, H, W, 3], n at least 1.

        Returns:
            float32 [n, dim].

        Raises:
            NoEncoderError: the release embeds no images.
            UnavailableError: Triton does not answer, has no such model, or is being restarted.
            DeadlineError: the call's time is over.
            VerificationError: the output has another shape.
            UnusableOutputError: some outputs are no vectors of the space; it has their rows.
        """
        spec = manifest.embedder
        if manifest.embedder.file is None:
            raise manifest.no_images_error()
        vectors = self._run(embedder_model_name(manifest.release), {"image": images}, "embedding")
        return _check_output(vectors, spec.dim, unit=spec.unit)

    def embed_texts(self, manifest: Manifest, texts: Sequence[str], role: TextRole) -> Vectors:
        """Embed texts.

        Args:
            manifest: the release.
            texts: at least one text. Longer ones than the encoder's length are truncated.
            role: whether they are queries or documents.

        Returns:
            float32 [n, dim].

        Raises:
            NoEncoderError: the release embeds no texts.
            InvalidInputError: the tokenizer refuses a text, or crashes on it
                (DefectiveTokenizerError).
            UnavailableError: the release is not loaded, or Triton does not answer.
            DeadlineError: the call's time is over.
            VerificationError: the output has another shape.
            UnusableOutputError: some outputs are no vectors of the space; it has their rows.
        """
        if manifest.text_encoder is None:
            raise manifest.no_texts_error()
        with self._lock:
            reader = self._readers.get(manifest.release)
        if reader is None:
            raise UnavailableError(
                f"the models of release {manifest.release} are not loaded in this gateway; try "
                "again in a few seconds"
            )
        spec = manifest.embedder
        name = text_model(manifest, role)
        vectors = self._run(name, reader.tokenize(texts, role), "embedding")
        return _check_output(vectors, spec.dim, unit=spec.unit)

    def compute_side(self, manifest: Manifest, images: Images) -> Vectors:
        """Compute the side-information of images.

        It waits at most until the call's deadline.

        Args:
            manifest: the release, which has a side encoder (AssertionError otherwise).
            images: uint8 [n, H, W, 3], n at least 1.

        Returns:
            float32 [n, side_dim].

        Raises:
            UnavailableError: Triton does not answer, or has no such model.
            DeadlineError: the call's time is over.
            VerificationError: the output has another shape.
            UnusableOutputError: some outputs are not finite; it has their rows.
        """
        assert manifest.side_encoder is not None, "the release has a side encoder"
        name = side_encoder_model_name(manifest.side_encoder.origin_release)
        vectors = self._run(name, {"image": images}, "side")
        return _check_output(vectors, manifest.side_encoder.dim, unit=False)

    def is_ready(self) -> bool:
        """Tell whether images can be embedded now, by the last probe of Triton; does not wait."""
        return self._up.is_set()

    def close(self) -> None:
        """Stop what `start` has started, wait for it, and close the connection; call it once.

        A Triton of its own has about 7 s to end, then it is killed. An external one goes on. It
        also waits for a load of models that runs, about 120 s for each model at most. An external
        Triton keeps the loaded models.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        elif self._process is not None and self._thread.ident is None:
            # It was never started, but holds its folder.
            self._process.stop()
        self._client.close()

    def _run(self, name: str, inputs: Inputs, output: str) -> Vectors:
        if not self._up.is_set():
            raise UnavailableError(
                "images and texts cannot be embedded now: the model server (Triton) does not "
                "answer or is being restarted; try again in a few seconds. Searches by embedding "
                "work without it"
            )
        vectors = self._client.infer(name, inputs, output, context.current_call().remaining())
        self._last_answers[name] = time.monotonic()
        return vectors

    def _watch(self) -> None:
        try:
            while not self._stopping.is_set():
                with error_boundary(self._metrics, "triton"):
                    self._probe_server()
                self._stopping.wait(_PROBE_EVERY_S if self._up.is_set() else _PROBE_EVERY_S / 5)
        finally:
            self._set_up(False)
            if self._process is not None:
                self._process.stop()

    def _probe_server(self) -> None:
        if self._process is not None and not self._process.alive():
            self._start_process(self._process)
            return
        time_start = time.monotonic()
        is_live = self._client.is_live(LIVE_TIMEOUT_S)
        is_late = time.monotonic() - time_start > LIVE_TIMEOUT_S + _LATE_S
        if not (is_live and self._check_embedding()):
            self._count_missed_probe(is_late)
        else:
            self._misses.clear()
            self._starts.has_answered = True
            self._set_up(True)
            if self._leftover and time.monotonic() - self._unloaded > _UNLOAD_EVERY_S:
                self._unload_leftover()

    def _start_process(self, process: TritonProcess) -> None:
        self._set_up(False)
        if self._starts.started_at:
            log.error(
                "the model server (Triton) has ended, and is started again", log=process.log_tail()
            )
            self._first_result.set()
            self._stopping.wait(self._starts.restart_delay())
            self._metrics.triton_restarts.inc()
        try:
            process.start()
        except (UnavailableError, CannotWriteError, OSError) as error:
            log.error(
                "cannot start the model server (Triton); the gateway tries again", error=str(error)
            )
            self._first_result.set()
        with self._lock:
            # A new Triton loads only the needed models.
            self._leftover.clear()
        self._misses.clear()
        self._starts.started_at = time.monotonic()

    def _check_embedding(self) -> bool:
        """Load the needed models again if Triton was away; tell whether the model with the oldest
        answer embeds.
        """
        with self._lock:
            manifests = list(self._releases.values())
        if not self._up.is_set():
            names = sorted({name for manifest in manifests for name in model_names(manifest)})
            for name, error in load_models(self._client, self._model_repo, names).items():
                log.error(
                    "the model server (Triton) cannot load a model again; the gateway tries again",
                    model=name,
                    error=str(error),
                )
        inputs_by_name: dict[str, Inputs] = {}
        for manifest in manifests:
            inputs_by_name |= smallest_inputs(manifest, self._readers.get(manifest.release))
        oldest = min(
            inputs_by_name, key=lambda name: self._last_answers.get(name, 0.0), default=None
        )
        if oldest is None or time.monotonic() - self._last_answers.get(oldest, 0.0) < _FRESH_S:
            return True
        try:
            self._client.infer(oldest, inputs_by_name[oldest], "embedding", _INFER_TIMEOUT_S)
        except (UnavailableError, VerificationError):
            return False
        self._last_answers[oldest] = time.monotonic()
        return True

    def _count_missed_probe(self, is_late: bool) -> None:
        self._misses.add(is_late=is_late)
        was_up = self._up.is_set()
        if self._misses.is_unready and was_up:
            self._set_up(False)
            self._client.reconnect()
        if self._process is None:
            return
        if self._starts.has_answered:
            is_hanging = self._misses.is_hung
        else:
            is_hanging = time.monotonic() - self._starts.started_at > _START_S
        if is_hanging:
            log.error(
                "the model server (Triton) does not answer, and is killed and started again",
                missed=self._misses.count,
                was_up=was_up,
            )
            self._process.kill()

    def _set_up(self, up: bool) -> None:
        if up != self._up.is_set():
            log.info("model server", up=up)
            (self._up.set if up else self._up.clear)()
            self._on_change(up)
            if up:
                self._first_result.set()


def _check_output(vectors: Vectors, dim: int, *, unit: bool) -> Vectors:
    try:
        return check_vectors(vectors, dim, error_name="Triton's output", unit_norm=unit)
    except UnusableRowsError as error:
        raise UnusableOutputError(str(error), error.unusable_rows) from error
    except InvalidInputError as error:
        raise VerificationError(str(error)) from error
