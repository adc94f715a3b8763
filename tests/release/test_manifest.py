"""Manifests: strict, round-tripping, and refused by the name of what is wrong."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from nobackfill.errors import UnfitError, VerificationError
from nobackfill.release.image_model import EMBEDDER_KEYS, ImageModel
from nobackfill.release.manifest import (
    Format,
    PublishedEmbedder,
    embedder_path,
    parse_manifest,
    probes_path,
    side_encoder_path,
    upgrade_path,
)
from nobackfill.release.paths import NEWEST_FORMAT, manifest_path, release_of_manifest
from tests.support.releases import draft


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    first = draft(tmp_path, 1).manifest
    loaded: dict[str, Any] = json.loads(draft(tmp_path, 2, [first]).manifest.model_dump_json())
    return loaded


def test_a_manifest_survives_json(fields: dict[str, Any]) -> None:
    manifest = parse_manifest(json.dumps(fields))
    assert parse_manifest(manifest.model_dump_json()) == manifest
    named = {file.path for file in manifest.files()}
    assert named == {
        embedder_path(2), side_encoder_path(2), upgrade_path(1, 2),
        probes_path(2),
    }  # fmt: skip
    assert manifest.upgrade_from(1) == manifest.upgrades[0]
    assert manifest.upgrade_from(3) is None


def test_what_embeds_an_image_is_read_without_pydantic_as_with_it(fields: dict[str, Any]) -> None:
    manifest = parse_manifest(json.dumps(fields))
    for changed in (
        {}, {"height": 7, "width": 300, "unit": not manifest.embedder.unit},
        {"fit": "crop", "shortest": 400}, {"fit": "pad"},
        {"interpolation": "bicubic"},
    ):  # fmt: skip
        embedder = manifest.embedder.model_copy(update=changed)
        one = manifest.model_copy(update={"embedder": embedder})
        assert ImageModel.read(one.model_dump_json().encode()) == ImageModel.of(one)
    # A device that went back to an older program has some that this one cannot know.
    assert (
        set(PublishedEmbedder.model_fields) == EMBEDDER_KEYS
        and get_args(Format)[-1] == NEWEST_FORMAT
    )
    for newer in (
        fields | {"format": NEWEST_FORMAT + 1},
        fields | {"embedder": fields["embedder"] | {"mean": [1, 2, 3]}},
    ):
        with pytest.raises(UnfitError, match="newer nobackfill"):
            ImageModel.read(json.dumps(newer).encode())
    # As pydantic reads it, too, and no writer of ours writes it.
    fields["embedder"]["height"] = str(manifest.embedder.height)
    assert ImageModel.read(json.dumps(fields).encode()) == ImageModel.of(manifest)
    fields["embedder"] |= {"file": None, "height": None, "width": None, "vectors_of": "gone"}
    with pytest.raises(VerificationError):
        ImageModel.read(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "at", [(), ("embedder",), ("embedder", "file"), ("upgrades", 0), ("gate",), ("probes",)],
    ids=str,
)  # fmt: skip
def test_unknown_keys_are_refused_at_every_level(
    at: tuple[str | int, ...], fields: dict[str, Any]
) -> None:
    node: Any = fields
    for key in at:
        node = node[key]
    node["surprise"] = 1
    with pytest.raises(VerificationError, match="surprise"):
        parse_manifest(json.dumps(fields))


@pytest.mark.parametrize(
    "path", ["../x", "/x", "a//b", "a/../b", "A", "a b", "a\\b", "", ".hidden", "a/", "a..b"]
)
def test_paths_that_are_not_plain_are_refused(path: str, fields: dict[str, Any]) -> None:
    fields["embedder"]["file"]["path"] = path
    with pytest.raises(VerificationError, match="path"):
        parse_manifest(json.dumps(fields))


@pytest.mark.parametrize(
    ("key", "value"),
    [("format", 2), ("release", 0), ("release", 1.5), ("space", "sp-x"), ("side_space", None),
     ("method", 3)],
)  # fmt: skip
def test_wrong_values_are_named(key: str, value: object, fields: dict[str, Any]) -> None:
    fields[key] = value
    with pytest.raises(VerificationError, match=key):
        parse_manifest(json.dumps(fields))


def test_upgrades_come_from_distinct_older_releases(fields: dict[str, Any]) -> None:
    fields["upgrades"] *= 2
    with pytest.raises(VerificationError, match="another older release"):
        parse_manifest(json.dumps(fields))
    fields["upgrades"] = fields["upgrades"][:1]
    fields["upgrades"][0]["from_release"] = 2
    with pytest.raises(VerificationError, match="older"):
        parse_manifest(json.dumps(fields))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": 6, "release": "three", "all": "new"}, "its manifest has format 6, and this "
         "version reads formats up to 5"),
        ({"surprise": 1, "gate": {"verdict": "passed", "by": "a person"}},
         "its manifest has keys that this version does not know, gate.by, surprise"),
        ({f"key{n}": n for n in range(9)},
         "its manifest has keys that this version does not know, key0, key1, key2 and 6 more"),
    ],
)  # fmt: skip
def test_what_is_newer_is_told_in_one_line(
    change: dict[str, Any], sentence: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(UnfitError) as refusal:
        parse_manifest(json.dumps(fields | change), 2)
    assert str(refusal.value) == f"release 2 needs a newer nobackfill: {sentence}"


@pytest.mark.parametrize(
    ("at", "value", "sentence"),
    [
        (("space",), "sp-" + "0" * 64, "expected sp-"),
        (("space",), "sp-x", "space: String should match"),
        (("side_space",), "ss-" + "0" * 64, "side_space: expected ss-.*, the digest"),
        (("space",), "sp-" + "0" * 64 + "\n", "space: String should match"),
        (("embedder", "file", "path"), "trusted.json", "expected the file embedder_2/1/model.onnx"),
        (("probes", "file", "path"), "sync.lock", "expected the file probes-2.npz, got sync.lock"),
        (("side_encoder", "file", "path"), "release-1.json", "got release-1.json"),
        (("upgrades", 0, "file", "path"), "1.root.json", "expected the file upgrade_1_to_2/"),
        (("embedder", "file", "path"), "embedder_2/1/model.onnx\n", "plain relative path"),
    ],
)  # fmt: skip
def test_what_is_signed_but_wrong_is_refused_by_rules(
    at: tuple[str | int, ...], value: str, sentence: str, fields: dict[str, Any]
) -> None:
    node: Any = fields
    for key in at[:-1]:
        node = node[key]
    node[at[-1]] = value
    with pytest.raises(UnfitError, match=sentence) as refusal:
        parse_manifest(json.dumps(fields), 2)
    assert str(refusal.value).startswith("release 2: its manifest cannot be used")
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize("text", ["", "{", "[]", "null", b"\xff\xfe", "[" * 5000])
def test_what_is_no_manifest_is_refused(text: str | bytes) -> None:
    with pytest.raises(VerificationError, match="manifest"):
        parse_manifest(text)


def test_names_of_manifests_give_their_release() -> None:
    for number in (1, 7, 1_000_000):
        assert release_of_manifest(manifest_path(number)) == number
    for name in ("release-.json", "release-01.json", "release-x.json", "release-1.jso",
                 "xrelease-1.json", "release-1.json/", "release--1.json", "release-²·json",
                 "release-².json", "1"):  # fmt: skip
        assert release_of_manifest(name) is None
