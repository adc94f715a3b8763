"""Manifests: strict, round-tripping, and refused by the name of what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from release import paths
from release.errors import VerificationError
from release.manifest import parse_manifest
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
        paths.embedder_path(2), paths.side_encoder_path(2), paths.upgrade_path(1, 2),
        paths.probes_path(2),
    }  # fmt: skip
    assert manifest.upgrade_from(1) == manifest.upgrades[0]
    assert manifest.upgrade_from(3) is None


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
    with pytest.raises(VerificationError, match="distinct"):
        parse_manifest(json.dumps(fields))
    fields["upgrades"] = fields["upgrades"][:1]
    fields["upgrades"][0]["from_release"] = 2
    with pytest.raises(VerificationError, match="older"):
        parse_manifest(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", b"\xff\xfe", "[" * 5000])
def test_what_is_no_manifest_is_refused(text: str | bytes) -> None:
    with pytest.raises(VerificationError, match="manifest"):
        parse_manifest(text)


def test_names_of_manifests_give_their_release() -> None:
    for number in (1, 7, 1_000_000):
        assert paths.release_of_manifest(paths.manifest_path(number)) == number
    for name in ("release-.json", "release-01.json", "release-x.json", "release-1.jso",
                 "xrelease-1.json", "release-1.json/", "release--1.json", "release-²·json",
                 "release-².json", "1"):  # fmt: skip
        assert paths.release_of_manifest(name) is None
