"""Run a gateway: put its parts together, start them in order, stop them in reverse."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import grpc
import structlog

from nobackfill import durable
from nobackfill.errors import BusyError, ConfigurationError
from nobackfill.extras import load_plugin
from nobackfill.server.canary.canaries import Canaries, CanaryAnswerer, CanaryMetrics
from nobackfill.server.catalog import open_catalog
from nobackfill.server.embedding.embedding import (
    EmbeddingService,
    InProcessModels,
    Models,
    QueryAdapters,
)
from nobackfill.server.following import GatewayFollower
from nobackfill.server.galleries.answering import (
    AnswererFactory,
    DeferredImageSearch,
    GallerySearcher,
    ReceiverSearch,
)
from nobackfill.server.galleries.hosted import GalleryRegistry
from nobackfill.server.galleries.indexing import IndexMaintenance, IndexMetrics, count_vectors
from nobackfill.server.galleries.item_writer import ItemWriter, TokenQuotas
from nobackfill.server.grpc.context import Tokens
from nobackfill.server.grpc.listener import (
    GrpcListener,
    check_port_free,
    needs_plain_server,
    read_certificates,
    socket_address_in,
)
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Interceptor
from nobackfill.server.grpc.services.gallery import GalleryService
from nobackfill.server.grpc.services.release import ReleaseService
from nobackfill.server.grpc.services.search import SEARCH, SearchService
from nobackfill.server.grpc.services.upgrade import UpgradeService
from nobackfill.server.grpc.services.vault import VaultService
from nobackfill.server.grpc.traces import read_tracing
from nobackfill.server.healing.healing import Healing, HealingAnswerer
from nobackfill.server.process_limits import raise_open_file_limit
from nobackfill.server.rollout.activation import (
    Activations,
    FirstActivation,
    roll_back_galleries,
)
from nobackfill.server.rollout.lifecycle import GalleryOperations
from nobackfill.server.rollout.rollback import Rollbacks
from nobackfill.server.rollout.rollout import RolloutParts
from nobackfill.server.serving import PlanManager
from nobackfill.server.settings import IN_PROCESS, Settings
from nobackfill.server.storage import Storage, open_storage
from nobackfill.server.triton.client import TritonClient, remote_client
from nobackfill.server.triton.models import TritonModels
from nobackfill.server.triton.process import TritonProcess, default_folder, has_triton
from nobackfill.server.upgrades.upgrading import GalleryUpgrades
from nobackfill.server.vault import VaultBlobs
from nobackfill.v1 import (
    gallery_pb2_grpc,
    release_pb2_grpc,
    search_pb2_grpc,
    upgrade_pb2_grpc,
    vault_pb2_grpc,
)  # fmt: skip
from nobackfill.vectors import Vectors

if TYPE_CHECKING:
    # This import needs the extra `postgres`.
    from nobackfill.server.upgrades.workers.workers import WorkerUpgrades

log = structlog.get_logger("server.gateway")


class GatewayServer:
    """Run a gateway from `start` to `stop`. A data folder serves one gateway at a time.

    The parts are attributes, each made from those before it. They know each other only through
    their constructors; only this file knows all of them.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._closing = ExitStack()
        self._listener: GrpcListener | None = None
        # Held while the model server is checked and reported, so that reports come in the order of
        # the checks.
        self._health = threading.Lock()
        # Set when the gateway drains; it ends streams that only watch.
        self._stopping = threading.Event()
        self.address = ""
        self.metrics_address = ""
        # Has the secret, if there is one; empty without a console.
        self.console_address = ""

    def start(self) -> None:
        """Start all parts; returns once calls are answered. Call it once.

        On an error everything is stopped again. A Triton that does not start is waited for in the
        background; calls that do not need it are answered. An unfinished activation is resumed, and
        without an active release the first one is activated later by itself. Raises the process's
        limit of open files.

        Raises:
            BusyError: the data folder, the database or an address is in use.
            ConfigurationError: a setting does not work here, an extra or a file is missing, a
                plug-in cannot be imported, or the publication folder does not exist.
            PreconditionError: the galleries of the data folder were moved to another store.
            NotFoundError: a release that the state needs is not published.
            VerificationError: the data or the publication is damaged, or a newer version wrote it.
            UnavailableError: the database does not answer, the publication folder cannot be read,
                or the venv has no Triton.
            CannotWriteError: the data folder cannot be written.
            OSError: the folder of the galleries or of the verified metadata, or the mark of a move,
                cannot be read.
            ImportError, AttributeError: the exporter of traces cannot be imported, or lacks its
                object.
        """
        with ExitStack() as closing:
            self._start(closing)
            self._closing = closing.pop_all()

    def stop(self) -> None:
        """Let calls end, then stop all parts; a second call, or one before `start`, does nothing
        but log.

        Blocks for `drain_seconds` at most until calls end or are cancelled, and then until the
        threads have ended. An activation is interrupted, and resumed at the next start.

        Raises:
            CannotWriteError: the state of an interrupted activation cannot be written; all parts
                are stopped.
        """
        log.info("draining")
        self._closing.close()
        log.info("stopped")

    def assemble(
        self, models: Models, metrics: Metrics, storage: Storage,
        workers: "WorkerUpgrades | None" = None,
    ) -> None:  # fmt: skip
        """Make the parts; only the publication and the state are opened. Call it once, before
        `load`. A publication that is no longer valid is logged, if an earlier one was verified.

        Args:
            models: runs models.
            metrics: the gateway's metrics; galleries and canaries are added to them.
            storage: the open store; the caller closes it.
            workers: computes upgrades in other processes; None means in a thread.

        Raises:
            VerificationError: the publication is damaged.
            ConfigurationError: the root metadata cannot be read.
            UnavailableError: the publication folder cannot be read.
            BusyError: another process reads the publication into the same data folder.
            CannotWriteError: the data folder cannot be written.
            OSError: the folder of the verified metadata cannot be read.
        """
        repo, data = self._settings.model_repo, self._settings.data
        self.models, self.metrics = models, metrics
        catalog = self.catalog = open_catalog(repo, data / "trust", self._settings.root, metrics)
        state = self.state = storage.state
        embedding = self.embedding = EmbeddingService(models, metrics)
        canaries = self.canaries = Canaries(state, metrics)
        healing = self.healing = Healing(embedding, self._settings, metrics)
        make_canary = partial(CanaryAnswerer, canaries)
        make_healing = partial(HealingAnswerer, healing)
        answerers = AnswererFactory(
            embedding, QueryAdapters(repo), catalog, state, metrics, make_canary, make_healing
        )
        galleries = self.galleries = GalleryRegistry(
            storage.galleries, catalog, state, answerers.make_answerer
        )
        self.searching = GallerySearcher(state)
        upgrading = self.upgrading = GalleryUpgrades(repo, catalog, state, metrics, workers)
        self.item_writer = ItemWriter(embedding, upgrading.open_runner, state.catch_up)
        serving = self.serving = PlanManager(catalog, state, galleries, models, metrics)
        parts = RolloutParts(
            models, catalog, state, galleries, upgrading, serving, canaries, metrics
        )
        activations = self.activations = Activations(parts)
        self.rollbacks = Rollbacks(state, galleries, serving, activations)
        self.lifecycle = GalleryOperations(
            catalog, state, galleries, embedding, upgrading, activations, serving, healing
        )
        self.following = GatewayFollower(state, galleries, serving, catalog, activations, metrics)
        self.vault = VaultBlobs(data / "vault", self._settings.vault_quota)
        metrics.count_gallery_items = lambda: count_vectors(galleries.all())
        metrics.registry.register(IndexMetrics(galleries.all))
        metrics.registry.register(CanaryMetrics(canaries))

    def load(self) -> None:
        """Open the galleries with their indexes, and load the models; the model server starts
        meanwhile. Call it once, after `assemble`.

        Without a shared database, a gallery that an aborted activation left with another release is
        returned to the active one. A gallery that cannot be opened is set aside.

        Raises:
            NotFoundError: a release that the state needs is not published.
            VerificationError: no gallery can be served, or a model's file does not match its
                digest.
            UnavailableError: the database does not answer, or the publication folder cannot be
                read.
            CannotWriteError: the data folder cannot be written.
            BusyError: the database is busy while it lists the galleries.
            ConfigurationError: a release embeds texts, and the extra `text` is not installed.
            OSError: the folder of the galleries, or of the verified metadata, cannot be read.
        """
        with ThreadPoolExecutor(1, "models") as pool:
            models = pool.submit(self.serving.start_models)
            self.galleries.open_all()
            models.result()
        state = self.state.current
        if not self.state.shared:
            # A deletion may have been interrupted before it ended the pause.
            self.upgrading.forget(set(state.paused) - self.galleries.names())
            # A recorded activation is resumed with the galleries as they are.
            if state.activation is None and state.active is not None:
                for name, error in roll_back_galleries(self.galleries, state.active).items():
                    self.galleries.quarantine(name, error)
        self.serving.plan_at_start()

    def _start(self, closing: ExitStack) -> None:
        settings = self._settings
        if not settings.model_repo.is_dir():
            raise ConfigurationError(
                f"no publication folder at {settings.model_repo}; publish a release with "
                "training/export.py, make a sample with `gateway sample`, or set --model-repo"
            )
        raise_open_file_limit()
        durable.make_dir(settings.data, 0o700)
        try:
            closing.enter_context(durable.lock_file(settings.data / "lock"))
        except BusyError as error:
            raise BusyError(
                f"{settings.data}: another gateway uses this data folder; stop it, or name another "
                "folder with --data"
            ) from error
        # Checked first, because loading models may take minutes.
        plain = needs_plain_server(settings)
        check_port_free(settings.address, "--address")
        if settings.console:
            check_port_free(settings.console_address, "--console-address")
        metrics = Metrics()
        metrics.free_disk_bytes.set_function(lambda: shutil.disk_usage(settings.data).free)
        self.metrics_address = metrics.serve(settings.metrics_address)
        closing.callback(metrics.close)
        tracing = read_tracing(os.environ)
        if tracing is not None:
            closing.callback(tracing.close)
        tokens = Tokens(settings.tokens_file) if settings.tokens_file else None
        chain = read_certificates(settings)
        models = self._models(metrics)
        closing.callback(models.close)
        storage = open_storage(settings)
        closing.callback(storage.close)
        workers = _make_workers(settings)
        if workers is not None:
            closing.callback(workers.close)
        self.assemble(models, metrics, storage, workers)
        closing.callback(self.galleries.close)
        closing.callback(self.catalog.close)
        closing.callback(self.canaries.close)
        self.load()
        indexing = IndexMaintenance(self.galleries.all, metrics, settings.index_threads)
        closing.callback(indexing.close)
        indexing.start()
        closing.enter_context(self.healing.reembed_in_background(self.galleries.all))
        closing.callback(self.activations.interrupt)
        if storage.commits is not None:
            self.following.start(storage.commits)
            closing.callback(self.following.close)
        self.search = self._search_service(closing)
        interceptor = Interceptor(
            metrics, tokens, settings.max_calls, settings.max_call_seconds,
            is_slow=self.galleries.is_slow,
            immediate_answers={SEARCH: self.search.answer_immediately},
            tracing=tracing, is_plain_server=plain,
        )  # fmt: skip
        metrics.expiries.metadata_expiries = self.catalog.metadata_expiries
        if tokens is not None:
            metrics.expiries.first_token_expiry = tokens.first_expiry
        if chain is not None:
            metrics.expiries.certificate_expiries = chain.expiries
        self._listener = GrpcListener(self._add_services, interceptor, settings, chain, metrics)
        if self.activations.resume() is None and self.state.current.active is None:
            FirstActivation(
                self.catalog, self.state, models, self.activations, self._stopping, metrics
            ).activate_newest()
        self._listen(closing, self._listener)
        self.galleries.on_quarantine = self._set_health
        self._set_health()
        self.catalog.watch()
        log.info("serving", address=self.address, metrics=self.metrics_address)

    def _search_service(self, closing: ExitStack) -> SearchService:
        galleries, metrics = self.galleries, self.metrics
        immediate = ReceiverSearch(galleries, self.state, metrics)
        images = DeferredImageSearch(galleries, immediate, self.embedding, metrics)
        closing.callback(images.close)
        return SearchService(
            galleries, self.searching, immediate, images, self.state, self.canaries
        )

    def _add_services(self, server: grpc.Server) -> None:
        quotas = TokenQuotas(self.galleries)
        gallery = GalleryService(
            self.galleries, quotas, self.item_writer, self.lifecycle, self.state
        )
        release = ReleaseService(
            self.catalog, self.state, self.activations, self.rollbacks,
            self.canaries, self.metrics, self._stopping,
        )  # fmt: skip
        upgrade = UpgradeService(self.lifecycle, self.galleries, self.searching)
        search_pb2_grpc.add_SearchServiceServicer_to_server(self.search, server)
        gallery_pb2_grpc.add_GalleryServiceServicer_to_server(gallery, server)
        release_pb2_grpc.add_ReleaseServiceServicer_to_server(release, server)
        upgrade_pb2_grpc.add_UpgradeServiceServicer_to_server(upgrade, server)
        vault_pb2_grpc.add_VaultServiceServicer_to_server(VaultService(self.vault), server)

    def _listen(self, closing: ExitStack, listener: GrpcListener) -> None:
        settings = self._settings
        socket = socket_address_in(settings.data, closing) if settings.console else None
        self.address = listener.start(socket)
        self.metrics.is_ready = lambda: not self._stopping.is_set()
        closing.callback(self._drain, listener)
        if socket is None:
            return
        open_console = load_plugin("pages", "console")

        def embed(release: int, query: bytes | str) -> Vectors:
            return self.embedding.embed_query(self.catalog.manifest(release), query)

        console = closing.enter_context(open_console(settings, socket, self.metrics, embed))
        self.console_address = console.address

    def _drain(self, listener: GrpcListener) -> None:
        self._stopping.set()
        self.catalog.change_counter.notify()
        listener.stop(self._settings.drain_seconds)

    def _models(self, metrics: Metrics) -> Models:
        settings = self._settings
        venv = settings.triton_venv or default_folder()

        def on_change(up: bool) -> None:
            metrics.model_server_up.set(up)
            self._set_health()

        if settings.triton is not None and settings.triton != IN_PROCESS:
            client = remote_client(settings.triton, settings.triton_ca, settings.triton_token_file)
            return TritonModels(settings.model_repo, client, None, metrics, on_change)
        if settings.triton is None and (settings.triton_venv is not None or has_triton(venv)):
            process = TritonProcess(venv, settings.model_repo, settings.data / "triton")
            client = TritonClient(process.address)
            return TritonModels(settings.model_repo, client, process, metrics, on_change)
        log.warning(
            "no Triton: onnxruntime embeds images in this process; run `gateway "
            "install-triton` to install it"
        )
        metrics.model_server_up.set(1)
        return InProcessModels(settings.model_repo)

    def _set_health(self) -> None:
        with self._health:
            if self._listener is not None:
                self._listener.set_health(
                    can_embed=self.models.is_ready(), set_aside=self.galleries.quarantine_reasons()
                )


def _make_workers(settings: Settings) -> "WorkerUpgrades | None":
    """Return the workers that compute upgrades; None for a thread of the gateway."""
    if settings.ray is not None:
        from nobackfill.server.upgrades.workers.workers import WorkerUpgrades

        return WorkerUpgrades(load_plugin("workers", "ray")(settings.ray), settings.model_repo)
    if settings.workers:
        from nobackfill.server.upgrades.workers.processes import WorkerProcesses
        from nobackfill.server.upgrades.workers.workers import WorkerUpgrades

        return WorkerUpgrades(WorkerProcesses(settings.workers), settings.model_repo)
    return None
