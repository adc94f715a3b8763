"""Filters, pages, changes by filter and what answers bring, over gRPC: old forms and new."""

from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from nobackfill.errors import InvalidInputError
from nobackfill.release.manifest import Manifest
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1 import search_pb2
from nobackfill.v1.types_pb2 import Condition, Expression, Fields, Filter, Value
from tests.server.support import (
    TIMEOUT_S,
    Client,
    embedding,
    ids,
    images,
    metadata,
    refused,
    vector,
)
from tests.support.blocks import png

COUNT = 40
BIG = 2**53


@pytest.fixture(scope="module")
def filled(shared: Client, one: Manifest) -> str:
    """Items `i0` …: a number, an exact integer, tags, and every second one a day of June."""
    shared.create_gallery("filters")
    items = []
    for i, image in enumerate(images(COUNT)):
        item = pb.PutItem(id=f"i{i}", metadata=metadata(n=i))
        item.vectors.embedding.CopyFrom(embedding(one, image))
        item.metadata["exact"].integer = BIG + i
        item.metadata["tags"].texts.texts.extend(["all", f"mod{i % 4}"])
        if i % 2:
            item.metadata["day"].text = f"2026-06-{i % 28 + 1:02}T12:00:00Z"
        items.append(item)
    assert not shared.put_items("filters", items)
    return "filters"


def has(key: str, text: str) -> Expression:
    return Expression(condition=Condition(key=key, equals=Value(text=text)))


def asks(key: str, **kind: object) -> Expression:
    return Expression(condition=Condition(key=key, **kind))  # type: ignore[arg-type]


def negated(expression: Expression) -> Expression:
    return Expression(**{"not": expression})  # type: ignore[arg-type]


def where(expression: Expression) -> Filter:
    return Filter(expression=expression)


def every(*of: Expression) -> Expression:
    return Expression(all=Expression.Expressions(of=of))


def some(*of: Expression) -> Expression:
    return Expression(any=Expression.Expressions(of=of))


def range_(**bounds: float) -> Condition.Range:
    return Condition.Range(**bounds)


def june(day: int) -> Timestamp:
    moment = Timestamp()
    moment.FromJsonString(f"2026-06-{day:02}T12:00:00Z")
    return moment


FORMS: list[tuple[Filter, Callable[[int], bool]]] = [
    # As clients knew it before expressions.
    (Filter(conditions=[has("tags", "mod1").condition]), lambda i: i % 4 == 1),
    (
        Filter(
            conditions=[
                Condition(key="n", range=range_(at_least=5, less_than=20)),
                has("tags", "mod1").condition,
            ]
        ),
        lambda i: 5 <= i < 20 and i % 4 == 1,
    ),
    # Both hold.
    (
        Filter(
            conditions=[has("tags", "mod1").condition],
            expression=negated(asks("n", exists=False)),
        ),
        lambda i: i % 4 == 1,
    ),
    (where(some(has("tags", "mod0"), has("tags", "mod3"))), lambda i: i % 4 in (0, 3)),
    (where(negated(asks("day", exists=True))), lambda i: i % 2 == 0),
    (where(asks("day", exists=False)), lambda i: i % 2 == 0),
    (
        where(asks("n", range=range_(greater_than=5, at_most=7))),
        lambda i: i in (6, 7),
    ),
    (where(asks("n", equals=Value(integer=3))), lambda i: i == 3),
    (
        where(asks("exact", integer_range=Condition.IntegerRange(greater_than=BIG + 37))),
        lambda i: i > 37,
    ),
    (where(asks("exact", equals=Value(integer=BIG + 1))), lambda i: i == 1),
    (
        where(asks("day", time_range=Condition.TimeRange(at_least=june(10), less_than=june(14)))),
        lambda i: i % 2 == 1 and 10 <= i % 28 + 1 < 14,
    ),
    (where(every()), lambda _: True),
    (where(some()), lambda _: False),
    (
        where(every(has("tags", "all"), negated(some(has("tags", "mod0"))))),
        lambda i: i % 4 != 0,
    ),
]


@pytest.mark.parametrize(("filtered", "passes"), FORMS)
def test_searches_lists_and_counts_agree(
    shared: Client, filled: str, one: Manifest, filtered: Filter, passes: Callable[[int], bool]
) -> None:
    expected = [i for i in range(COUNT) if passes(i)]
    vectors = np.stack([vector(one, image) for image in images(COUNT)])
    distances = ((vectors - vectors[5]) ** 2).sum(axis=1)
    nearest = [f"i{i}" for i in np.argsort(distances, kind="stable") if i in expected]
    query = search_pb2.Query(image=png(images(COUNT)[5]))
    request = search_pb2.SearchRequest(gallery=filled, query=query, k=COUNT, filter=filtered)
    assert ids(shared.raw.searches.Search(request, timeout=TIMEOUT_S)) == nearest
    batch = search_pb2.SearchBatchRequest(
        gallery=filled, queries=[query] * 2, k=COUNT, filter=filtered
    )
    answers = shared.raw.searches.SearchBatch(batch, timeout=TIMEOUT_S).responses
    assert [ids(answer) for answer in answers] == [nearest] * 2
    count = pb.CountItemsRequest(gallery=filled, filter=filtered)
    assert shared.raw.galleries.CountItems(count, timeout=TIMEOUT_S).items == len(expected)
    assert listed(shared, filled, filter=filtered, page_size=7) == [f"i{i}" for i in expected]


def listed(client: Client, gallery: str, **given: object) -> list[str]:
    request = pb.ListItemsRequest(gallery=gallery, **given)  # type: ignore[arg-type]
    found: list[str] = []
    while True:
        page = client.raw.galleries.ListItems(request, timeout=TIMEOUT_S)
        found += [item.id for item in page.items]
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


def test_metadata_comes_back_as_it_was_put(shared: Client, filled: str) -> None:
    item = shared.get(filled, "i3")
    day, tags = "2026-06-04T12:00:00Z", ["all", "mod3"]
    assert item.metadata == {"n": 3, "day": day, "exact": BIG + 3, "tags": tags}
    assert (item.origin, item.uncertainty) == ("native", None)


def test_an_answer_brings_the_fields_that_are_asked_for(shared: Client, filled: str) -> None:
    query = search_pb2.Query(image=png(images(COUNT)[3]))
    request = search_pb2.SearchRequest(gallery=filled, query=query, k=1)
    for keys in ([], ["n", "missing"]):
        request.fields.CopyFrom(Fields(keys=keys))
        (hit,) = shared.raw.searches.Search(request, timeout=TIMEOUT_S).hits
        assert dict(hit.metadata) == (metadata(n=3) if keys else {})
        page = pb.ListItemsRequest(gallery=filled, fields=request.fields, page_size=4)
        item = shared.raw.galleries.ListItems(page, timeout=TIMEOUT_S).items[3]
        assert dict(item.metadata) == dict(hit.metadata)


def test_hits_end_at_the_distance_that_is_drawn(shared: Client, filled: str) -> None:
    query = search_pb2.Query(image=png(images(COUNT)[3]))
    request = search_pb2.SearchRequest(gallery=filled, query=query, k=COUNT)
    hits = shared.raw.searches.Search(request, timeout=TIMEOUT_S).hits
    # A distance as an answer told it lets that very hit in.
    request.max_distance = hits[6].distance
    within = [hit.id for hit in hits if hit.distance <= hits[6].distance]
    assert 7 <= len(within) < COUNT
    assert ids(shared.raw.searches.Search(request, timeout=TIMEOUT_S)) == within
    request.max_distance = float("nan")
    with refused(InvalidInputError, "max_distance"):
        shared.raw.searches.Search(request, timeout=TIMEOUT_S)


def deep(levels: int) -> Expression:
    expression = has("a", "b")
    for _ in range(levels):
        expression = negated(expression)
    return expression


@pytest.mark.parametrize(
    ("filtered", "why"),
    [
        (Filter(conditions=[has("a", "b").condition] * 501), "at most 500 conditions, got 501"),
        (where(some(*[has("a", "b")] * 501)), "at most 500 conditions, got 501"),
        (
            Filter(
                conditions=[Condition(key="a", one_of=Condition.OneOf(values=[Value()] * 300_000))]
            ),
            "expected a text",
        ),
        (
            Filter(
                conditions=[
                    Condition(key="a", one_of=Condition.OneOf(values=[Value(flag=True)] * 300_000))
                ]
            ),
            "at most 10000 values, got 300000",
        ),
        (where(deep(33)), "at most 32 levels"),
        (where(Expression()), "condition, all, any or not"),
        (Filter(conditions=[Condition(key="a")]), "expected equals"),
        (where(asks("a", equals=Value(texts=Value.Texts()))), "expected a text"),
        (where(asks("a", range=range_(at_most=float("nan")))), "NaN"),
        (
            where(asks("a", time_range=Condition.TimeRange(at_most=Timestamp(nanos=-1)))),
            "nanos",
        ),
    ],
)
def test_filters_that_make_no_sense_are_refused(
    shared: Client, filled: str, filtered: Filter, why: str
) -> None:
    query = search_pb2.Query(image=png(images(1)[0]))
    request = search_pb2.SearchRequest(gallery=filled, query=query, filter=filtered)
    with refused(InvalidInputError, why):
        shared.raw.searches.Search(request, timeout=TIMEOUT_S)
    # The most that is answered.
    request.filter.CopyFrom(where(some(*[has("tags", "mod1")] * 500)))
    assert len(shared.raw.searches.Search(request, timeout=TIMEOUT_S).hits) == COUNT // 4


def test_pages_have_bounds(shared: Client, filled: str) -> None:
    for given in ({"page_size": 1001}, {"page_token": "x"}, {"page_token": "1:0.5"}, {"order": 9}):
        request = pb.ListItemsRequest(gallery=filled, **given)
        with refused(InvalidInputError):
            shared.raw.galleries.ListItems(request, timeout=TIMEOUT_S)
