"""The cost of a filter in PostgreSQL, which ends when its caller leaves."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nobackfill.errors import CancelledError, DeadlineError
from nobackfill.gallery.filters import All, AnyOf, Filter, Not, OneOf, Range, TimeRange
from nobackfill.gallery.spec import Metadata
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import Call, Principal, Role
from nobackfill.server.stores.postgresql import conditions, schema
from nobackfill.server.stores.postgresql.conditions import sql_condition
from nobackfill.server.stores.postgresql.database import Database
from tests.gallery.test_filters import FILTERS, METADATA
from tests.stores.conftest import PostgresqlEngine
from tests.stores.test_search import compare_with_predicate
from tests.support.postgres import Server
from tests.support.waiting import wait_until

MANY = range(500)
SLEEP = b"SELECT pg_sleep(60)"
COSTLY: dict[str, Filter] = {
    "texts": OneOf("key", tuple(f"absent{i}" for i in MANY)),
    "numbers": OneOf("key", tuple(MANY)),
    "mixed": OneOf("key", (*MANY, True, False, "text", float("inf"))),
    "texts one by one": AnyOf(tuple(OneOf("key", (f"absent{i}",)) for i in MANY)),
    "denied one by one": All(tuple(Not(OneOf("key", (f"absent{i}",))) for i in MANY)),
    "ranges": All(tuple(Range("key", at_least=-i, less_than=1000 + i) for i in MANY)),
    "ranges, one of": AnyOf(tuple(Range("key", greater_than=i, at_most=i + 1) for i in MANY)),
    "denied ranges": All(tuple(Not(Range("key", at_least=i)) for i in MANY)),
    "times, one of": AnyOf(tuple(TimeRange("key", at_least=i, at_most=i) for i in MANY)),
}


@pytest.mark.parametrize("kind", COSTLY)
def test_a_row_is_looked_at_a_few_times(kind: str) -> None:
    """However many values and bounds there are: 500 of them took seconds over 20,000 items."""
    assert sql_condition(COSTLY[kind]).sql.count("i.facets") <= 6


def test_many_times_are_looked_for_in_lists_alone() -> None:
    ranges = tuple(TimeRange("key", at_least=-i, at_most=i) for i in MANY)
    first, _, of_list = sql_condition(All(ranges)).sql.partition("-> 1) IS NOT NULL AND")
    assert first.count("i.facets") == 3 and of_list


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    items=st.lists(METADATA, min_size=1, max_size=12),
    asked=st.lists(FILTERS, min_size=1, max_size=4),
)
def test_many_values_let_through_what_few_do(
    postgresql: PostgresqlEngine, items: list[Metadata], asked: list[Filter]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conditions, "FEW_VALUES", 0)
        compare_with_predicate(postgresql, items, [], asked)


@pytest.fixture
def postgresql(postgres: Server) -> Iterator[PostgresqlEngine]:
    engine = PostgresqlEngine(postgres)
    with engine.closing:
        yield engine


@pytest.fixture
def url(postgres: Server) -> Iterator[str]:
    with postgres.database() as url:
        yield url


@contextmanager
def opened(url: str, most: int = 4) -> Iterator[Database]:
    with closing(Database(url, most, reader=context.reading_call)) as database:
        database.open(schema.prepare)
        yield database


def sleeping(postgres: Server) -> int:
    (count,) = postgres.sql(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND"
        " state = 'active'"
    )[0]
    assert isinstance(count, int)
    return count


def call(name: str, seconds: float = 60.0, left: threading.Event | None = None) -> Call:
    left = left or threading.Event()
    return Call(Principal(name, Role.READER), time.monotonic() + seconds, lambda: not left.is_set())


def read_for(database: Database, caller: Call, query: bytes = SLEEP) -> object:
    """In a thread that works for a call."""
    context.set_current_call(caller)
    return database.read(lambda connection: connection.execute(query).fetchone())


def test_a_statement_ends_when_nobody_waits_for_it(postgres: Server, url: str) -> None:
    left = threading.Event()
    with opened(url) as database, ThreadPoolExecutor(2) as pool:
        given_up = pool.submit(read_for, database, call("a", left=left))
        wait_until(lambda: sleeping(postgres) == 1, seconds=20, what="the statement runs")
        left.set()
        with pytest.raises(CancelledError):
            given_up.result(20)
        with pytest.raises(DeadlineError):
            pool.submit(read_for, database, call("a", 0.5)).result(20)
        wait_until(lambda: sleeping(postgres) == 0, seconds=20, what="no statement is left")
        # The connections that others get are as good as new.
        for _ in range(5):
            assert pool.submit(read_for, database, call("a"), b"SELECT 1").result(20) == (1,)


@pytest.mark.parametrize("name", ["a", ""])
def test_one_reader_has_half_of_the_connections(postgres: Server, url: str, name: str) -> None:
    """So have all callers of a gateway without tokens, who have no name."""
    left = threading.Event()
    with opened(url, most=4) as database, ThreadPoolExecutor(4) as pool:
        greedy = [pool.submit(read_for, database, call(name, left=left)) for _ in range(3)]
        wait_until(lambda: sleeping(postgres) == 2, seconds=20, what="two statements run")
        assert pool.submit(read_for, database, call("b"), b"SELECT 1").result(20) == (1,)
        assert sleeping(postgres) == 2
        left.set()
        for one in greedy:
            with pytest.raises(CancelledError):
                one.result(20)
