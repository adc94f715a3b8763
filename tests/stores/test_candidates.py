"""Which candidates of a Milvus are enough. It is stood for by one that ranks exactly what it was
told, and knows nothing of what the database says since."""

from typing import Any

import numpy as np
import pytest

from nobackfill.errors import UnavailableError
from nobackfill.gallery.search.index import EXACT_EF
from nobackfill.gallery.store import NewVectors
from nobackfill.plugins.milvus import journal
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from tests.gallery.making import ids, spec, vectors
from tests.support.postgresql_searcher import PostgresqlSearcher

pytest.importorskip("pymilvus", reason="the store is imported with it")

from nobackfill.plugins.milvus import candidates
from nobackfill.plugins.milvus.candidates import Candidates
from nobackfill.plugins.milvus.feeder import Feeder

pytestmark = pytest.mark.scale

ONE = spec(1).space


class Exact:
    """What Candidates and a feeder ask of Collections."""

    def __init__(self, store: PostgresqlGallery) -> None:
        self.labels, self.vectors = store.load_vectors(ONE)
        self.refusals = 0
        self.told: list[str] = []

    def search(self, name: str, spec: Any, query: Any, limit: int, *rest: Any, **more: Any) -> Any:
        apart = ((self.vectors - query) ** 2).sum(axis=1)
        return self.labels[np.argsort(apart)[:limit]].tolist()

    def seal(self, name: str) -> None:
        self.told.append(name)
        if self.refusals:
            self.refusals -= 1
            raise UnavailableError("it is restarted")

    def has_graph(self, name: str) -> bool:
        return True


@pytest.fixture
def store(empty: PostgresqlGallery, monkeypatch: pytest.MonkeyPatch) -> PostgresqlGallery:
    """All of it was told."""
    monkeypatch.setattr(candidates, "SMALL", 40)
    empty.put(ids(400), [NewVectors(ONE, vectors(400, 1))])
    empty.database.write(lambda connection: journal.begin_journal(connection, empty.schema))
    empty.database.write(lambda connection: journal.take_pending(connection, empty.schema, 1000))
    return empty


def test_what_is_pending_does_not_stand_for_what_milvus_has_to_look_at(
    store: PostgresqlGallery,
) -> None:
    known: Any = Exact(store)
    query = vectors(400, 1)[0]
    nearest = known.search("", None, query, 19)
    names = [f"item-{label - 1}" for label in nearest]
    store.delete(names)
    far = NewVectors(ONE, query + 100 + vectors(20, 3))
    store.put(ids(20, 1000), [far])
    near = PostgresqlSearcher(
        store.database, store.schema, store.space(ONE), Candidates(known, "d")
    )
    found = near.search(query[None], 10).labels.tolist()
    assert found == near.search(query[None], 10, None, EXACT_EF).labels.tolist()


def test_a_switch_waits_for_a_milvus_that_is_restarted_and_not_for_steady_puts(
    store: PostgresqlGallery,
) -> None:
    known: Any = Exact(store)
    known.refusals = 1
    store.put(["late"], [NewVectors(ONE, vectors(1, 9))])
    Feeder(store.database, known, "d").wait_until_fed(store.schema, store.space(ONE), lambda: None)
    assert len(known.told) == 2
