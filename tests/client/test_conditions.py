"""Filters as people type them, and as apps send them, against the language itself."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings

from nobackfill.client.cli.galleries import parse_key_value
from nobackfill.client.conditions import parse_conditions
from nobackfill.client.device import Device
from nobackfill.client.search import Search
from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import (
    All,
    Exists,
    Filter,
    Not,
    OneOf,
    Range,
    Scalar,
    TimeRange,
    date_to_microseconds,
)
from nobackfill.gallery.spec import MetadataValue
from nobackfill.gallery.store import NewVectors
from nobackfill.server.grpc.services.convert import parse_filter
from nobackfill.v1 import types_pb2 as types
from nobackfill.wire.values import expression_message, metadata_value_message
from tests.gallery.test_filters import FILTERS, METADATA, holds
from tests.support import graphs
from tests.support.edge import Setting

TYPED: list[tuple[str, Filter]] = [
    ("trip=alps", OneOf("trip", ("alps",))),
    ("trip=", OneOf("trip", ("",))),
    ("a note=it exists", OneOf("a note", ("it exists",))),
    ("formula=a<b", OneOf("formula", ("a<b",))),
    ("blue=true", OneOf("blue", (True,))),
    ("trip!=alps", Not(OneOf("trip", ("alps",)))),
    ("n=9007199254740993", OneOf("n", (2**53 + 1,))),
    ("n=5.0", OneOf("n", (5.0,))),
    ("n>5", Range("n", greater_than=5)),
    ("n>=-1.5", Range("n", at_least=-1.5)),
    ("n<5", Range("n", less_than=5)),
    ("n<=99999999999999999999", Range("n", at_most=1e20)),
    ("day>=2026-06-01", TimeRange("day", at_least=date_to_microseconds("2026-06-01"))),
    (
        "day<2026-06-01T12:00:00Z",
        TimeRange("day", less_than=date_to_microseconds("2026-06-01T12:00:00Z")),
    ),
    ("trip exists", Exists("trip")),
    # No numbers of JSON's: a postcode, a telephone number, a name, another script's digits.
    ("zip=01234", OneOf("zip", ("01234",))),
    ("phone=+4912", OneOf("phone", ("+4912",))),
    ("batch=2024_01", OneOf("batch", ("2024_01",))),
    ("n=\u0661\u0662", OneOf("n", ("\u0661\u0662",))),
    ("serial=12345678901234567890", OneOf("serial", ("12345678901234567890",))),
    ("n=1e3", OneOf("n", (1000.0,))),
]


@pytest.mark.parametrize(("text", "expected"), TYPED)
def test_conditions_mean_what_they_say(text: str, expected: Filter) -> None:
    # By text, for to Python True equals 1.
    assert repr(parse_conditions([text])) == repr(All((expected,)))


@pytest.mark.parametrize(
    "text",
    ["", "trip", "=alps", "exists", " exists", ">5", "n>alps", "n>true", "n>nan", "n>"],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="expected"):
        parse_conditions([text])


def test_values_are_told_from_text() -> None:
    pairs = ["a=5", "b=5.5", "c=nan", "d=1e999", "e=true", "f=True", "g=1" + "0" * 5000, "h=x=y"]
    found = dict(map(parse_key_value, pairs))
    whole = found["a"], found["b"], found["e"]
    assert [type(value) for value in whole] == [int, float, bool]
    expected = {"a": 5, "b": 5.5, "c": "nan", "d": "1e999", "e": True, "f": "True"}
    assert found == expected | {"g": pairs[6][2:], "h": "x=y"}


@settings(max_examples=200, deadline=None)
@given(FILTERS, METADATA)
def test_a_gateway_reads_what_an_app_wrote(
    filtered: Filter, metadata: Mapping[str, MetadataValue]
) -> None:
    message = types.Filter(expression=expression_message(filtered)).SerializeToString()
    told = parse_filter(types.Filter.FromString(message))
    assert told is not None
    assert holds(told, metadata) == holds(filtered, metadata)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(True, "flag"), (2**63 - 1, "integer"), (2**63, "number"), (5.0, "number"), ("5", "text")],
)
def test_integers_stay_integers(value: Scalar, kind: str) -> None:
    made = metadata_value_message(value)
    assert made.WhichOneof("kind") == kind
    assert getattr(made, kind) == value


def test_a_device_is_searched_by_any_filter(setting: Setting) -> None:
    rows = np.random.default_rng(1).standard_normal((40, graphs.DIM)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    with Device(setting.gallery) as device:
        device.store.delete([item.id for item in device.store.list_items()])
        device.store.put(
            [f"item-{row}" for row in range(40)],
            [NewVectors(device.store.active().spec.space, rows)],
            metadata=[{"row": row} if row else {} for row in range(40)],
        )
        for conditions, expected in {
            ("row>=5", "row<8", "row!=6"): {5, 7},
            ("row!=6",): {*range(40)} - {6},
            ("row exists",): {*range(1, 40)},
        }.items():
            hits = Search(device, parse_conditions(conditions)).by_id("item-39", 100).hits
            assert {hit.id for hit in hits} == {f"item-{row}" for row in expected - {39}}


@pytest.mark.parametrize("value", [None, {"a": "b"}, [1], ["a", None], b"a"])
def test_metadata_of_another_kind_is_refused(value: object) -> None:
    with pytest.raises(InvalidInputError, match=f"got {type(value).__name__}"):
        metadata_value_message(value)  # type: ignore[arg-type]
