"""A flip that waits for a graph, on a real PostgreSQL: what is bad on purpose is seen, told and
waited for, whatever happens meanwhile. How recall is measured: test_recall.py."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nobackfill.errors import BusyError, CancelledError
from nobackfill.server.galleries import hosted_database
from nobackfill.server.galleries.hosted import NOTE
from nobackfill.server.galleries.hosted_database import HostedInDatabase
from nobackfill.server.stores.postgresql import graphs, schema
from nobackfill.server.stores.postgresql.database import EF, Connection, execute
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from tests.stores.thin_graphs import SPACE, filled, islands, thin
from tests.support.waiting import wait_until


@pytest.fixture
def hosted(
    empty: PostgresqlGallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HostedInDatabase]:
    """A gallery with a second space that is full, without a graph."""
    monkeypatch.setattr(graphs, "_LOOK_S", 0.02)
    monkeypatch.setattr(graphs, "_REST", 0.0)
    monkeypatch.setattr(graphs, "_TELL_S", 0.0)
    filled(empty, islands(900))
    made = HostedInDatabase("g", tmp_path, empty)
    yield made
    made.close()


def only_thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on graphs that a gateway builds lead hardly anywhere."""
    monkeypatch.setattr(schema, "M", 2)
    monkeypatch.setattr(schema, "EF_CONSTRUCTION", 4)


def is_good(store: PostgresqlGallery) -> bool:
    info = store.space(SPACE)
    measured = graphs.measure_recall(store.database, store.schema, info, lambda: None)
    return graphs.has_graph(store.database, store.schema, info) and measured[1] >= graphs.RECALL


def test_a_graph_is_built_measured_and_not_built_again(
    hosted: HostedInDatabase, empty: PostgresqlGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted.build_first_index(SPACE, lambda: None)
    assert is_good(empty)
    # Another gateway takes over.
    monkeypatch.setattr(hosted_database, "build_graph", None)
    hosted.build_first_index(SPACE, lambda: None)
    assert hosted.state_value(NOTE) is None


def test_a_bad_graph_that_is_there_is_built_anew(
    hosted: HostedInDatabase, empty: PostgresqlGallery
) -> None:
    thin(empty, empty.space(SPACE))
    assert not is_good(empty)
    hosted.build_first_index(SPACE, lambda: None)
    assert is_good(empty)


def test_a_bad_graph_is_waited_for_and_its_words_mend_it(
    hosted: HostedInDatabase, empty: PostgresqlGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_thin(monkeypatch)
    ready = threading.Thread(target=hosted.build_first_index, args=(SPACE, lambda: None))
    ready.start()
    wait_until(lambda: hosted.state_value(NOTE), seconds=60, what="it is told")
    note = hosted.state_value(NOTE)
    assert ready.is_alive()
    found = re.search(r"finds (0\.\d\d) of the 10 nearest among 1000 candidates", note)
    assert found is not None
    assert float(found[1]) < graphs.RECALL
    commands = re.search(r"\((ALTER INDEX .*); (REINDEX .*)\)", note)
    assert commands is not None
    with empty.database.connect() as connection:
        for command in commands.groups():
            execute(connection, command)
    ready.join(60)
    assert not ready.is_alive()
    assert is_good(empty)
    assert hosted.state_value(NOTE) is None, "nothing is left to be said"


def test_what_waits_can_be_called_off(
    hosted: HostedInDatabase, empty: PostgresqlGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_thin(monkeypatch)

    def between() -> None:
        if hosted.state_value(NOTE):
            raise CancelledError("called off")

    with pytest.raises(CancelledError):
        hosted.build_first_index(SPACE, between)
    assert [info.state for info in empty.spaces()] == ["active", "staging"]


def dropped(connection: Connection, index: str) -> None:
    """Which waits until the measurement is over."""
    execute(connection, f"DROP INDEX {index}")


def ended(connection: Connection, _index: str) -> None:
    """Every other connection, as where the server goes."""
    execute(
        connection,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )


def cancelled(connection: Connection, _index: str) -> None:
    """Every statement for a while, as its timeout does."""
    for _ in range(30):
        time.sleep(0.005)
        execute(
            connection,
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE state = 'active'"
            " AND datname = current_database() AND pid <> pg_backend_pid()",
        )


@pytest.mark.parametrize(("attack", "at"), [(dropped, 3), (ended, 3), (ended, 20), (cancelled, 3)])
def test_what_happens_meanwhile_is_outlived(
    hosted: HostedInDatabase, empty: PostgresqlGallery, attack: Callable[..., None], at: int
) -> None:
    """Before the first pass, and while the graph is asked."""
    info = empty.space(SPACE)
    graphs.build_graph(empty.database, empty.schema, info)
    asked = 0

    def attacking() -> None:
        with empty.database.connect() as connection:
            attack(connection, f"{empty.schema}.{graphs.graph_name(info)}")

    thread = threading.Thread(target=attacking)

    def between() -> None:
        nonlocal asked
        asked += 1
        if asked == at:
            thread.start()
            thread.join(0.1)

    hosted.build_first_index(SPACE, between)
    assert asked > at
    thread.join(60)
    assert not thread.is_alive()
    # Where it went after it had been measured.
    hosted.build_first_index(SPACE, lambda: None)
    assert is_good(empty)


@pytest.mark.parametrize("refused", [1, 2])
def test_a_look_that_is_refused_is_tried_again(
    hosted: HostedInDatabase, empty: PostgresqlGallery, monkeypatch: pytest.MonkeyPatch,
    refused: int,
) -> None:  # fmt: skip
    """The first, and the one after the graph was found good."""
    looks = 0
    look_ahead = empty.advance_frontier

    def refusing(space: str) -> None:
        nonlocal looks
        looks += 1
        if looks == refused:
            raise BusyError("a timeout")
        look_ahead(space)

    monkeypatch.setattr(empty, "advance_frontier", refusing)
    hosted.build_first_index(SPACE, lambda: None)
    assert looks > 2
    assert is_good(empty)


def test_two_gateways_measure_at_once(
    hosted: HostedInDatabase, empty: PostgresqlGallery, tmp_path: Path
) -> None:
    """One that is late with the lead, and one that has taken it."""
    other = HostedInDatabase("g", tmp_path, PostgresqlGallery(empty.database, empty.number))
    failed: list[BaseException] = []

    def make_ready(one: HostedInDatabase) -> None:
        try:
            one.build_first_index(SPACE, lambda: None)
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=make_ready, args=(one,)) for one in (hosted, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    assert is_good(empty)


def test_a_wider_search_is_every_gateways(
    hosted: HostedInDatabase, empty: PostgresqlGallery, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Found by one, and asked by another that starts later, until the graph needs it no more."""

    def widths() -> tuple[int, int]:
        """Of this gateway's next plan, and of another that starts now."""
        hosted._read()
        other = HostedInDatabase("g", tmp_path, PostgresqlGallery(empty.database, empty.number))
        return hosted._table(SPACE).ef, other._table(SPACE).ef

    hosted.store_state({hosted_database.SEARCH_WIDTHS_KEY: {"gone": 200}})
    monkeypatch.setattr(graphs, "_WIDTHS", (400,))
    hosted.build_first_index(SPACE, lambda: None)
    assert hosted.state_value(hosted_database.SEARCH_WIDTHS_KEY) == {SPACE: 400}
    assert widths() == (400, 400)
    monkeypatch.setattr(graphs, "_WIDTHS", (EF, 400))
    assert (
        graphs.measure_recall(empty.database, empty.schema, empty.space(SPACE), lambda: None)[0]
        == EF
    )
    hosted.build_first_index(SPACE, lambda: None)
    assert hosted.state_value(hosted_database.SEARCH_WIDTHS_KEY) is None
    assert widths() == (EF, EF)
