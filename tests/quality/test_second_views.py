"""What needs no labels, told beside classes: against figures by hand."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from nobackfill.class_folders import decode_listing, list_images
from nobackfill.quality.embedded import PublishedListing
from nobackfill.quality.gate import write_second_views
from nobackfill.quality.listing import list_texts, split_halves
from nobackfill.release.models import open_embedder
from nobackfill.release.trust.trust import read_publication
from tests.training.life import Life


def nearest(asking: np.ndarray, held: np.ndarray) -> np.ndarray:
    apart = ((asking[:, None] - held[None]) ** 2).sum(2)
    return np.argsort(apart, axis=1, kind="stable")


def test_second_views_ask_for_their_pictures(life: Life, tmp_path: Path) -> None:
    """By numpy, from the same views: what a release says of itself, and which search it is for."""
    manifests = read_publication(life.repo).manifests
    (told,) = manifests[2].unlabelled
    listing = list_images(life.data / "eval")
    listing = listing.select(split_halves(listing, 0)[1])
    assert (told.name, told.items, told.queries) == ("2/1>2", len(listing), len(listing))
    views = write_second_views(listing, tmp_path)
    asked, held = {}, {}
    for number, manifest in manifests.items():
        embed = open_embedder(life.repo, manifest).run
        asked[number], held[number] = (
            embed(decode_listing(of, *manifest.frame)) for of in (views, listing)
        )
    files = {file.path: life.repo / file.path for m in manifests.values() for file in m.files()}
    carried = PublishedListing(listing, files, manifests).vectors_along((1, 2), int8=True).embedding
    by = {
        "old": nearest(asked[1], held[1]), "served": nearest(asked[2], carried),
        "new": nearest(asked[2], held[2]),
    }  # fmt: skip
    recall = {name: (near[:, 0] == np.arange(len(near))).mean() for name, near in by.items()}
    ranks = {
        name: (near == np.arange(len(near))[:, None]).argmax(1) + 1 for name, near in by.items()
    }
    shared = {
        name: np.mean(
            [len(set(a[:10]) & set(b[:10])) / 10 for a, b in zip(near, by["new"], strict=True)]
        )
        for name, near in by.items()
    }
    # Equal pictures lie in either order.
    for said, wanted in (
        (told.recall1, recall["served"]), (told.stayed_recall1, recall["old"]),
        (told.mrr, (1 / ranks["served"]).mean()), (told.stayed_mrr, (1 / ranks["old"]).mean()),
        (told.agreement, shared["served"]), (told.stayed_agreement, shared["old"]),
    ):  # fmt: skip
        assert abs(said - wanted) < 0.01
    assert told.similar == (told.agreement > told.stayed_agreement)
    detail = manifests[2].gate.detail
    assert detail.startswith("holds for things of a class")
    for kind, holds in (("similar things", told.similar), ("the very item", told.very_item)):
        assert (kind in detail.partition("; not for")[0]) == holds
        assert kind in detail
    # One that nothing was measured on says nothing of it, and is read.
    assert "unlabelled" not in json.loads((life.repo / "release-1.json").read_text())


def test_a_picture_has_one_second_view(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for number in range(4):
        place = tmp_path / "images" / "a" / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (40, 30 + number, 3), np.uint8)).save(place)
    listing = list_images(tmp_path / "images")
    write_second_views(listing, tmp_path / "all")
    write_second_views(listing.select(np.array([2])), tmp_path / "one")
    one = (tmp_path / "one" / "a" / "2.png.png").read_bytes()
    assert one == (tmp_path / "all" / "a" / "2.png.png").read_bytes()
    with Image.open(tmp_path / "one" / "a" / "2.png.png") as view:
        assert 0.74 * 40 <= view.height <= 0.88 * 40 and view.width < 32


def test_labelled_texts_are_asked_for_by_their_first_sentence(tmp_path: Path) -> None:
    lines = [
        {"id": 1, "text": "One thing. Another thing.", "label": "x"},
        {"id": 2, "text": "!", "label": "x"},
        {"id": 3, "text": "several words without a stop", "label": "y"},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    known = list_texts(tmp_path / "t.jsonl").split_first_sentences()
    assert (known.paths, known.texts) == (("1", "3"), ("Another thing.", "words without a stop"))
    assert known.as_queries().texts == ("One thing.", "several")
