"""Putting a Core together from settings and a data folder."""

import threading

import structlog

from nobackfill.errors import ConfigurationError, NotFoundError, VerificationError
from nobackfill.gallery.residents import Residents
from nobackfill.server.catalog import Catalog
from nobackfill.server.core import Core
from nobackfill.server.descriptors import open_galleries
from nobackfill.server.embedding.embedding import Embedding
from nobackfill.server.embedding.models import Models
from nobackfill.server.galleries.galleries import Galleries
from nobackfill.server.galleries.searching import Searching
from nobackfill.server.galleries.sizes import IndexSizes
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.rollout.recovery import return_galleries
from nobackfill.server.settings import Settings
from nobackfill.server.state import StateFile
from nobackfill.server.upgrades.jobs import Upgrading

log = structlog.get_logger("server.assembly")


def assemble(settings: Settings, models: Models, metrics: Metrics) -> Core:
    """The parts, with nothing opened yet but the publication and the state.

    Raises VerificationError for a damaged state or publication, ConfigurationError for a root that
    cannot be read, CannotWriteError.
    """
    root = _root(settings)
    catalog = Catalog(settings.model_repo, settings.data / "trust", root, metrics)
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
    core = Core(
        data=settings.data,
        catalog=catalog,
        state=state,
        galleries=Galleries(settings.data / "galleries", Residents(open_galleries())),
        models=models,
        embedding=embedding,
        searching=Searching(embedding, catalog, state, metrics),
        upgrading=Upgrading(settings.model_repo, catalog, state, metrics),
        metrics=metrics,
        stopping=threading.Event(),
    )
    metrics.gallery_items = core.gallery_items
    metrics.registry.register(IndexSizes(core.galleries.all))
    return core


def load(core: Core) -> None:
    """Open the galleries, with their indexes, and load the models that are needed.

    Raises VerificationError, ConfigurationError for a gallery of an unknown release,
    UnavailableError, CannotWriteError.
    """
    now = core.state.now
    core.galleries.open_all(now, core.catalog.manifests)
    core.forget_missing()
    for name, error in return_galleries(core).items():
        core.galleries.set_aside(name, error)
    core.replan()
    for release in sorted(core.needed()):
        core.catalog.verified(release)
        core.models.want(core.catalog.manifest(release))
    core.drop_unused(now.retired)


def _root(settings: Settings) -> bytes | None:
    try:
        return settings.root.read_bytes() if settings.root is not None else None
    except OSError as error:
        raise ConfigurationError(f"{settings.root}: cannot be read ({error.strerror})") from error
