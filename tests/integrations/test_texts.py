"""Texts of a gallery, as every framework reads and writes them; filters of frameworks."""

import math
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from nobackfill.adopt.sources.opening import open_searchable
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.gallery.filters import Filter, OneOf
from nobackfill.gallery.spec import Metadata
from nobackfill.plugins.integrations.texts import DualTexts, GalleryTexts, StoredText, compare
from nobackfill.v1 import gallery_pb2
from nobackfill.wire import Gateway
from tests.integrations.conftest import empty_gallery
from tests.serve.shop import MADE, dual, files
from tests.support.graphs import DIM

ROWS: Mapping[str, Mapping[str, object]] = {
    "a": {"year": 2020, "tag": "sea", "day": "2020-05-01"},
    "b": {"year": 2021.5, "tags": ["sea", "sun"], "day": "2021-01-01T12:00:00Z"},
    "c": {"flag": True, "tag": "sun"},
    "d": {},
}


@pytest.fixture
def texts(reader: Gateway) -> GalleryTexts:
    return GalleryTexts(reader, empty_gallery(reader))


def ids(found: list[StoredText]) -> list[str]:
    return [one.id for one in found]


def test_texts_are_kept_and_found_and_replaced(texts: GalleryTexts) -> None:
    texts.put([StoredText(f"n{n}", f"w{n}", {"n": n}) for n in range(5)])
    (hit,) = texts.search("w3", 1)
    assert (hit.id, hit.text, hit.metadata) == ("n3", "w3", {"n": 3})
    assert hit.distance < 1e-4 and 0.999 < hit.score <= 1
    scores = [one.score for one in texts.search("w3", 5)]
    assert scores == sorted(scores, reverse=True) and all(0 <= one <= 1 for one in scores)
    texts.put([StoredText("n3", "w9"), StoredText("n3", "w8", {"new": ["x"]})])
    assert texts.get(["n3"]) == [StoredText("n3", "w8", {"new": ["x"]})]
    assert ids(texts.search("w8", 1)) == ["n3"]
    assert ids(texts.search("w3", 9, where=OneOf("n", (1, 2)))) in (["n1", "n2"], ["n2", "n1"])


def test_ids_are_read_in_their_order_and_deleted_in_any_number(texts: GalleryTexts) -> None:
    texts.put([StoredText(f"n{n}", f"w{n % 40}") for n in range(120)])
    assert ids(texts.get(["n7", "none", "n2", "n7"])) == ["n7", "n2"]
    assert ids(list(texts.items()))[:3] == ["n0", "n1", "n2"]
    assert texts.delete([]) == texts.delete(["none"]) == 0
    assert texts.delete([f"n{n}" for n in range(20_000)] + ["none"]) == 120
    texts.put([])
    assert texts.get(["n1"]) == list(texts.items()) == texts.search("w1", 1) == []
    texts.put([StoredText("a", "w1"), StoredText("b", "w2")])
    texts.gateway.put_items(texts.gallery, [gallery_pb2.PutItem(id="c", text="w3")])
    assert texts.delete() == 2
    assert texts.search("w1", 9)[0].text == ""


def test_a_missing_gallery_is_no_missing_item(texts: GalleryTexts) -> None:
    texts.gateway.delete_gallery(texts.gallery)
    with pytest.raises(NotFoundError, match=texts.gallery):
        texts.get(["a"])
    with pytest.raises(NotFoundError, match="nowhere"):
        GalleryTexts(texts.gateway, "nowhere")


@pytest.mark.parametrize(
    "value",
    [None, math.nan, math.inf, 2**63, {"a": 1}, ["a", 1], ("a",), b"x", {"a"}, np.int64(3)],
)
def test_a_value_that_a_gateway_does_not_keep_is_refused_by_name(
    texts: GalleryTexts, value: object
) -> None:
    row = StoredText("item", "w1", {"good": 1, "odd": value})  # type: ignore[dict-item]
    with pytest.raises(InvalidInputError, match="metadata 'odd' of 'item'"):
        texts.put([StoredText("first", "w1"), row])
    assert texts.get(["first", "item"]) == []


def test_values_come_back_as_they_are(texts: GalleryTexts) -> None:
    metadata: Metadata = {"text2": "", "n": 2**63 - 1, "x": 0.1, "flag": False, "tags": ["b", "a"]}
    texts.put([StoredText("item", "w1 \U0001f642", metadata)])
    (found,) = texts.get(["item"])
    assert found == StoredText("item", "w1 \U0001f642", metadata)
    assert type(found.metadata["flag"]) is bool and type(found.metadata["n"]) is int


def test_the_key_of_the_text_is_not_the_callers(reader: Gateway) -> None:
    gallery = empty_gallery(reader)
    with pytest.raises(InvalidInputError, match="other than 'text'"):
        GalleryTexts(reader, gallery).put([StoredText("a", "w1", {"text": "x"})])
    other = GalleryTexts(reader, gallery, text_key="body")
    other.put([StoredText("a", "w1", {"text": "x"})])
    assert other.get(["a"]) == [StoredText("a", "w1", {"text": "x"})]
    assert reader.get(gallery, "a").metadata == {"text": "x", "body": "w1"}


def test_texts_that_the_gateway_refuses_are_counted_and_the_others_stored(
    texts: GalleryTexts,
) -> None:
    with pytest.raises(
        InvalidInputError, match=r"refused 1 of 2 texts .* 'b': .*at least one visible character"
    ):
        texts.put([StoredText("a", "w1"), StoredText("b", " ")])
    assert ids(list(texts.items())) == ["a"]


def test_vectors_of_the_callers_embedder(vectors_only: Gateway) -> None:
    gallery = empty_gallery(vectors_only)
    rows = np.eye(3, DIM, dtype=np.float32).tolist()
    texts = GalleryTexts(vectors_only, gallery, release=1, embed=lambda text: rows[int(text)])
    texts.put([StoredText(str(n), f"text {n}") for n in range(3)], rows)
    assert ids(texts.search("2", 1)) == ids(texts.search(None, 1, vector=rows[2])) == ["2"]
    with pytest.raises(InvalidInputError, match="one for each text, got 2 vectors for 1 texts"):
        texts.put([StoredText("x", "y")], rows[:2])
    with pytest.raises(InvalidInputError, match="one for each text, got 0"):
        texts.put([StoredText("x", "y")])
    with pytest.raises(InvalidInputError, match="expected a vector"):
        GalleryTexts(vectors_only, gallery, release=1).search("2", 1)
    with pytest.raises(
        NotFoundError,
        match="no vectors of release 2; pass one of the releases that the gallery has: 1",
    ):
        GalleryTexts(vectors_only, gallery, release=2)
    with pytest.raises(InvalidInputError, match="number of the release"):
        GalleryTexts(vectors_only, gallery, embed=lambda text: rows[0])


def test_a_gateway_that_embeds_takes_no_vectors(texts: GalleryTexts) -> None:
    with pytest.raises(InvalidInputError, match="the gateway embeds the texts, got 1 vectors"):
        texts.put([StoredText("x", "w1")], [[1.0]])
    with pytest.raises(InvalidInputError, match="open the store with release="):
        texts.search(None, 1, vector=[1.0])


@pytest.mark.parametrize(
    ("where", "passing"),
    [
        (compare("year", "==", 2020), "a"),
        (compare("year", "!=", 2020), "bcd"),
        (compare("year", ">", 2020), "b"),
        (compare("year", ">=", 2020), "ab"),
        (compare("year", "<", 2021.5), "a"),
        (compare("year", "<=", 2021.5), "ab"),
        (compare("year", ">", None), ""),
        (compare("year", "==", None), "cd"),
        (compare("year", "!=", None), "ab"),
        (compare("tag", "in", ["sea", "sun"]), "ac"),
        (compare("tag", "in", []), ""),
        (compare("tag", "not in", ["sea"]), "bcd"),
        (compare("tag", "in", ["sea", None]), "abd"),
        (compare("tags", "==", "sun"), "b"),
        (compare("flag", "==", True), "c"),
        (compare("flag", "==", 1), ""),
        (compare("day", ">", "2020-12-31"), "b"),
        (compare("day", "<=", "2020-05-01T00:00:00Z"), "a"),
    ],
)
def test_comparisons(texts: GalleryTexts, where: Filter, passing: str) -> None:
    texts.put([StoredText(name, "w1", row) for name, row in ROWS.items()])  # type: ignore[arg-type]
    assert "".join(ids(list(texts.items(where)))) == passing


@pytest.mark.parametrize(
    ("comparison", "value", "message"),
    [
        ("like", "x", "got 'like'"),
        (">", "x", "> cannot compare with str 'x'"),
        (">", True, "cannot compare with bool"),
        ("<", [1], "cannot compare with list"),
        ("==", ["a"], "cannot compare with list"),
        ("in", (1, 2), "cannot compare with tuple"),
        ("not in", "x", "in cannot compare with str"),
    ],
)
def test_comparisons_that_a_gateway_does_not_have(
    comparison: str, value: object, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        compare("key", comparison, value)


def test_dual_finds_texts_by_both_models(tmp_path: Path) -> None:
    bodies = [f"text of item-{row}" for row in range(len(MADE.old))]
    np.save(files(tmp_path) / "store" / "body.npy", np.array(bodies))
    source = open_searchable(str(tmp_path / "store"))
    with closing(dual(tmp_path, source, None)) as search:
        texts = DualTexts(
            search, source, "body",
            lambda query: MADE.queries_old[int(query)].tolist(),
            lambda query: MADE.queries_new[int(query)].tolist(),
        )  # fmt: skip
        answer = search.search(MADE.queries_old[3], MADE.queries_new[3], 5)
        found = texts.search("3", 5)
        assert ids(found) == [hit.id for hit in answer.hits]
        assert [one.text for one in found] == [f"text of {hit.id}" for hit in answer.hits]
        assert [one.score for one in found] == [hit.probability for hit in answer.hits]
        with pytest.raises(InvalidInputError, match="array 'title'"):
            DualTexts(search, source, "title", texts._old, texts._new).search("3", 5)
