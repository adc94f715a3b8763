"""A running gateway: everything started in order, stopped in reverse."""

import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import structlog

from release import durable
from release.errors import (
    ConfigurationError,
    NobackfillError,
    NotFoundError,
    VerificationError,
)
from server.activation import Activations
from server.auth import Tokens
from server.border import Border
from server.catalog import Catalog
from server.core import Core, models_of
from server.embedding import Embedding
from server.galleries import Galleries
from server.indexing import Indexing, load_index
from server.listener import Listener
from server.metrics import Metrics
from server.models import InProcessModels, Models
from server.puts import Putting
from server.rollback import drop_unused
from server.searching import Searching
from server.settings import IN_PROCESS, Settings
from server.state import StateFile
from server.triton_client import TritonClient
from server.triton_models import TritonModels
from server.triton_process import TritonProcess, has_triton
from server.upgrading import Upgrading
from server.vault import Vault

log = structlog.get_logger("server.gateway")


class Gateway:
    """`start` it, then `stop` it. A data folder serves one gateway at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._closing = ExitStack()
        self._listener: Listener | None = None
        # What it works on; set by `start`.
        self.core: Core
        self.address = ""
        self.metrics_address = ""

    def start(self) -> None:
        """Return once calls are answered.

        Raises BusyError (data folder or address in use), ConfigurationError, VerificationError
        (damaged data or publication), UnavailableError (Triton), CannotWriteError; then everything
        that was started is stopped again.
        """
        try:
            self._start()
        except BaseException:
            self._closing.close()
            raise

    def stop(self) -> None:
        """Drain, then end everything."""
        log.info("draining")
        self._closing.close()
        log.info("stopped")

    def _start(self) -> None:
        settings, closing = self._settings, self._closing
        if not settings.model_repo.is_dir():
            raise ConfigurationError(
                f"expected the publication folder at {settings.model_repo}, found none; publish a "
                "release with training/export.py, or give --model-repo"
            )
        durable.make_dir(settings.data, 0o700)
        closing.enter_context(durable.lock(settings.data / "lock"))
        metrics = Metrics()
        self.metrics_address = metrics.serve(settings.metrics_address)
        closing.callback(metrics.close)
        tokens = Tokens(settings.tokens_file) if settings.tokens_file else None
        models = self._models(metrics)
        closing.callback(models.close)
        core = self.core = self._make_core(models, metrics)
        closing.callback(core.galleries.close)
        closing.callback(core.catalog.close)
        self._load(core)
        indexing = Indexing(core.galleries.all)
        closing.callback(indexing.close)
        indexing.start()
        activations = Activations(core)
        closing.callback(activations.interrupt)
        putting = Putting(core.embedding, core.upgrading.runner)
        vault = Vault(settings.data / "vault")
        border = Border(metrics, tokens, settings.max_call_seconds)
        self._listener = Listener(core, putting, activations, vault, border, settings)
        self._begin(core, activations)
        self.address = self._listener.start()
        closing.callback(self._listener.stop, settings.drain_seconds)
        self._set_health(models.ready())
        core.catalog.watch()
        log.info("serving", address=self.address, metrics=self.metrics_address)

    def _models(self, metrics: Metrics) -> Models:
        settings = self._settings
        venv = settings.triton_venv or Path(sys.prefix).parent / ".venv-triton"

        def on_change(up: bool) -> None:
            metrics.model_server_up.set(up)
            self._set_health(up)

        if settings.triton is not None and settings.triton != IN_PROCESS:
            models = TritonModels(TritonClient(settings.triton), None, on_change)
        elif settings.triton is None and (settings.triton_venv is not None or has_triton(venv)):
            process = TritonProcess(venv, settings.model_repo, settings.data / "triton")
            models = TritonModels(TritonClient(process.address), process, on_change)
        else:
            log.warning("no Triton: images are embedded in this process, with onnxruntime")
            metrics.model_server_up.set(1)
            return InProcessModels(settings.model_repo)
        models.start()
        return models

    def _make_core(self, models: Models, metrics: Metrics) -> Core:
        settings = self._settings
        root = settings.root.read_bytes() if settings.root is not None else None
        catalog = Catalog(settings.model_repo, settings.data / "trust", root)
        try:
            catalog.refresh()
        except NotFoundError:
            log.warning("nothing is published yet; waiting for the first release")
        except VerificationError as error:
            # What was verified before an expiry or an attack goes on serving.
            if not catalog.manifests:
                raise
            log.error("publication folder refused, serving what was verified", error=str(error))
        state = StateFile(settings.data / "state.json")
        embedding = Embedding(models, metrics)
        return Core(
            data=settings.data,
            catalog=catalog,
            state=state,
            galleries=Galleries(settings.data / "galleries"),
            models=models,
            embedding=embedding,
            searching=Searching(embedding, catalog, state, metrics),
            upgrading=Upgrading(settings.model_repo, catalog, state),
            metrics=metrics,
            stopping=threading.Event(),
        )

    def _load(self, core: Core) -> None:
        """Open the galleries and load what they and the active release need."""
        now = core.state.now
        core.galleries.open_all(now, core.catalog.manifests)
        core.replan()
        needed = {m.release: m for h in core.galleries.all() for m in models_of(h.plan)}
        if now.active is not None:
            needed[now.active] = core.active()
        for manifest in needed.values():
            core.catalog.verified(manifest.release)
            core.models.load(manifest)
        drop_unused(core, now.retired)
        for hosted in core.galleries.all():
            for space, view in hosted.views().items():
                load_index(hosted, space, view)

    def _begin(self, core: Core, activations: Activations) -> None:
        """Resume an activation, or begin the first: now, or when something is published."""
        if activations.resume() is not None or core.state.now.active is not None:
            return
        if core.catalog.newest() is not None:
            self._activate_first(core, activations)
            return
        thread = threading.Thread(
            target=self._wait_for_first, args=(core, activations), name="first", daemon=True
        )
        thread.start()

    def _wait_for_first(self, core: Core, activations: Activations) -> None:
        seen = -1
        while not core.stopping.is_set() and core.catalog.newest() is None:
            seen = core.catalog.changed.wait(seen, 0.5)
        if not core.stopping.is_set():
            self._activate_first(core, activations)

    def _activate_first(self, core: Core, activations: Activations) -> None:
        newest = core.catalog.newest()
        assert newest is not None, "asked once something is published"
        try:
            for event in activations.start(newest).events():
                log.info("first activation", phase=event.phase, message=event.message)
        except NobackfillError as error:
            log.error("first activation refused", release=newest, error=str(error))

    def _set_health(self, embedding: bool) -> None:
        if self._listener is not None:
            self._listener.set_health(serving=True, embedding=embedding)
