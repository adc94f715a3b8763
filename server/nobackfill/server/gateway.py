"""A running gateway: everything started in order, stopped in reverse."""

import shutil
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import structlog

from nobackfill import durable
from nobackfill.errors import ConfigurationError, NobackfillError
from nobackfill.server.assembly import assemble, load
from nobackfill.server.core import Core
from nobackfill.server.descriptors import raise_limit
from nobackfill.server.embedding.models import InProcessModels, Models
from nobackfill.server.galleries.indexing import Indexing
from nobackfill.server.galleries.puts import Putting
from nobackfill.server.grpc.auth import Tokens
from nobackfill.server.grpc.interceptor import Border
from nobackfill.server.grpc.listener import Listener
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.survival import surviving
from nobackfill.server.grpc.tls import certificates
from nobackfill.server.rollout.activation import Activations
from nobackfill.server.settings import IN_PROCESS, Settings
from nobackfill.server.triton.client import TritonClient, remote_client
from nobackfill.server.triton.models import TritonModels
from nobackfill.server.triton.process import TritonProcess, has_triton
from nobackfill.server.vault import Vault

log = structlog.get_logger("server.gateway")


class Gateway:
    """`start` it, then `stop` it. A data folder serves one gateway at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._closing = ExitStack()
        self._listener: Listener | None = None
        # Held to look at the model server and to tell it: what is told last was seen last.
        self._health = threading.Lock()
        # What it works on; set by `start`.
        self.core: Core
        self.address = ""
        self.metrics_address = ""

    def start(self) -> None:
        """Return once calls are answered.

        Raises BusyError (data folder or address in use), ConfigurationError, VerificationError
        (damaged data or publication), UnavailableError (no Triton in the venv that was given),
        CannotWriteError; then everything that was started is stopped again. A Triton that does not
        start is waited for beside what serves without it.
        """
        with ExitStack() as closing:
            self._start(closing)
            self._closing = closing.pop_all()

    def stop(self) -> None:
        """Drain, then end everything."""
        log.info("draining")
        self._closing.close()
        log.info("stopped")

    def _start(self, closing: ExitStack) -> None:
        settings = self._settings
        if not settings.model_repo.is_dir():
            raise ConfigurationError(
                f"expected the publication folder at {settings.model_repo}, found none; publish a "
                "release with training/export.py, or give --model-repo"
            )
        raise_limit()
        durable.make_dir(settings.data, 0o700)
        closing.enter_context(durable.lock(settings.data / "lock"))
        metrics = Metrics()
        metrics.disk_free.set_function(lambda: shutil.disk_usage(settings.data).free)
        self.metrics_address = metrics.serve(settings.metrics_address)
        closing.callback(metrics.close)
        tokens = Tokens(settings.tokens_file) if settings.tokens_file else None
        chain = certificates(settings)
        models = self._models(metrics)
        closing.callback(models.close)
        core = self.core = assemble(settings, models, metrics)
        closing.callback(core.galleries.close)
        closing.callback(core.catalog.close)
        load(core)
        indexing = Indexing(core.galleries.all, metrics, settings.index_threads)
        closing.callback(indexing.close)
        indexing.start()
        activations = Activations(core)
        closing.callback(activations.interrupt)
        putting = Putting(core.embedding, core.upgrading.runner)
        vault = Vault(settings.data / "vault", settings.vault_quota)
        border = Border(
            metrics, tokens, settings.max_calls, settings.max_call_seconds,
            slow=core.galleries.slow,
        )  # fmt: skip
        metrics.expiries.metadata = core.catalog.expiries
        if tokens is not None:
            metrics.expiries.tokens = tokens.first_expiry
        if chain is not None:
            metrics.expiries.certificates = chain.expiries
        self._listener = Listener(core, putting, activations, vault, border, settings, chain)
        self._begin(core, activations)
        self.address = self._listener.start()
        closing.callback(self._listener.stop, settings.drain_seconds)
        self._set_health()
        core.catalog.watch()
        log.info("serving", address=self.address, metrics=self.metrics_address)

    def _models(self, metrics: Metrics) -> Models:
        settings = self._settings
        venv = settings.triton_venv or Path(sys.prefix).parent / ".venv-triton"

        def on_change(up: bool) -> None:
            metrics.model_server_up.set(up)
            self._set_health()

        if settings.triton is not None and settings.triton != IN_PROCESS:
            client = remote_client(settings.triton, settings.triton_ca, settings.triton_token_file)
            models = TritonModels(settings.model_repo, client, None, metrics, on_change)
        elif settings.triton is None and (settings.triton_venv is not None or has_triton(venv)):
            process = TritonProcess(venv, settings.model_repo, settings.data / "triton")
            client = TritonClient(process.address)
            models = TritonModels(settings.model_repo, client, process, metrics, on_change)
        else:
            log.warning("no Triton: images are embedded in this process, with onnxruntime")
            metrics.model_server_up.set(1)
            return InProcessModels(settings.model_repo)
        models.start()
        return models

    def _begin(self, core: Core, activations: Activations) -> None:
        """Resume an activation, or begin the first: now, or when something is published and the
        model server is there."""
        if activations.resume() is not None or core.state.now.active is not None:
            return
        newest, ready = core.catalog.newest(), core.models.ready()
        if newest is not None and newest not in core.state.now.failed and ready:
            self._activate_first(core, activations)
            return
        thread = threading.Thread(
            target=self._wait_for_first, args=(core, activations), name="first", daemon=True
        )
        thread.start()

    def _wait_for_first(self, core: Core, activations: Activations) -> None:
        seen, tried = -1, None
        while not core.stopping.is_set() and core.state.now.active is None:
            newest = core.catalog.newest()
            if newest != tried:
                # One that fails is not tried over and over; the next one published is.
                tried = newest
                with surviving(core.metrics, "first"):
                    self._activate_first(core, activations)
            seen = core.catalog.changed.wait(seen, 0.5)

    def _activate_first(self, core: Core, activations: Activations) -> None:
        newest = core.catalog.newest()
        assert newest is not None, "asked once something is published"
        try:
            for event in activations.start(newest).events():
                log.info("first activation", phase=event.phase, message=event.message)
        except NobackfillError as error:
            log.error("first activation refused", release=newest, error=str(error))

    def _set_health(self) -> None:
        with self._health:
            if self._listener is not None:
                self._listener.set_health(serving=True, embedding=self.core.models.ready())
