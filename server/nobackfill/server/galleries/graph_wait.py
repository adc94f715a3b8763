"""The wait of a flip for a database's graph: until it finds what is there, and how wide it is to be
searched for that."""

from collections.abc import Callable, Mapping

import structlog

from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.galleries.hosted import NOTE, Hosted
from nobackfill.server.stores.postgresql.database import EF
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.graphs import graph_name, has_graph, make_graph, measured
from nobackfill.server.stores.postgresql.recall import RECALL, K, wait_for_recall

log = structlog.get_logger("server.indexing")

# Key of `Hosted.state`: by space, how many candidates of its graph searches look at where EF find
# too few.
WIDTHS = "widths"


class GraphWait:
    """Of one space. A graph is built where there is none, beside puts and searches, and anew where
    it finds too little as wide as it can be searched; if the new one does, too, somebody has to
    make it denser, is told so, and waited for.

    Before and after, it is looked which items the space has, so that searches meanwhile, and the
    flip, look at later ones alone; a look that the database refuses is tried again, too."""

    def __init__(
        self, hosted: Hosted, gallery: PostgresqlGallery, info: SpaceInfo,
        between: Callable[[], None],
    ) -> None:  # fmt: skip
        """`between` is called again and again, and may raise to give up."""
        self._hosted, self._gallery, self._info = hosted, gallery, info
        self._between = between
        self._log = log.bind(gallery=hosted.name, release=info.spec.release)
        self._built, self._width, self._recall = False, EF, 1.0

    def wait(self) -> None:
        """Returns once it finds RECALL, and searches are as wide. Raises what `between` does, and
        CannotWriteError."""
        wait_for_recall(self._ready, self._measure, self._between, self._tell)
        if self._hosted.state(NOTE):
            self._hosted.remember({NOTE: None})

    def _ready(self) -> bool:
        self._gallery.look_ahead(self._info.spec.space)
        there = has_graph(self._gallery.database, self._gallery.schema, self._info)
        if not there or (self._recall < RECALL and not self._built):
            self._log.info("building a graph", there_is_one=there, recall=self._recall)
            make_graph(self._gallery.database, self._gallery.schema, self._info)
            self._built = True
        return True

    def _measure(self) -> float:
        database, schema = self._gallery.database, self._gallery.schema
        width, recall = measured(database, schema, self._info, self._between)
        if not has_graph(database, schema, self._info):
            # It went meanwhile, and every row was read.
            return 0.0
        self._log.info("measured a graph", ef=width, recall=recall)
        self._width, self._recall = width, recall
        if recall >= RECALL:
            self._remember_width()
            self._gallery.look_ahead(self._info.spec.space)
        return recall

    def _remember_width(self) -> None:
        """From the next plan on; a space that is gone is forgotten."""
        space = self._info.spec.space
        before: Mapping[str, int] = self._hosted.state(WIDTHS) or {}
        others = {one.spec.space for one in self._gallery.spaces()} - {space}
        widths = {one: ef for one, ef in before.items() if one in others}
        if self._width != EF:
            widths[space] = self._width
        if widths != before:
            self._hosted.remember({WIDTHS: widths or None})

    def _tell(self, recall: float) -> None:
        index = f"{self._gallery.schema}.{graph_name(self._info)}"
        note = (
            f"the graph of release {self._info.spec.release} finds {recall:.2f} of the {K} nearest "
            f"among {self._width} candidates, expected {RECALL}; it is waited for: make it denser ("
            f"ALTER INDEX {index} SET (m = 32, ef_construction = 256); REINDEX INDEX CONCURRENTLY "
            f"{index}), or cancel the activation"
        )
        self._log.warning("waiting for a graph", why=note)
        if self._hosted.state(NOTE) != note:
            self._hosted.remember({NOTE: note})
