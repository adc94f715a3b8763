"""The sample: two signed releases and pictures, made by one command, and a life with them."""

import json
from pathlib import Path

import pytest

from nobackfill.errors import AlreadyExistsError, NotFoundError
from nobackfill.release.manifest import Manifest, parse_manifest
from nobackfill.server.sample import KINDS, write_sample
from tests.server.process import serving
from tests.server.support import Client
from tests.server.test_cli import run, run_json


def manifest(folder: Path, release: int) -> Manifest:
    return parse_manifest((folder / "model_repo" / f"release-{release}.json").read_bytes())


@pytest.mark.long
def test_a_newcomer_needs_no_python(tmp_path: Path) -> None:
    """Make, serve, fill, search, change the model, search again, go back: all by commands."""
    folder = tmp_path / "sam ple"
    said = run("sample", str(folder))
    assert "gateway put photos '" in said and "--release 2" in said
    photos = folder / "photos"
    assert len(list(photos.glob("*.png"))) == 5 * len(KINDS)
    picture = str(photos / "red-circle-0.png")
    repo = folder / "model_repo"
    with serving(repo, tmp_path / "data", "--triton=in-process") as gateway:
        at = f"--server={gateway.address}"
        assert run_json("gallery", "list", at)["galleries"] == []
        assert run_json("gallery", "create", "photos", at)["name"] == "photos"
        assert "exists" in run("gallery", "create", "photos", at, code=73)
        assert run_json("put", "photos", str(photos), at) == {"stored": 120, "refused": {}}
        first = run_json("search", "photos", picture, "-k", "5", at)
        assert first["release"] == 1 and first["hits"][0]["id"] == "red-circle-0.png"
        assert len(first["hits"]) == 5
        made = run_json("sample", str(folder), "--release", "2")
        assert made == {
            "model_repo": str(folder / "model_repo"), "photos": str(photos), "release": 2,
            "pictures": 120,
        }  # fmt: skip
        with Client(gateway.address) as client:
            while [one.number for one in client.list_releases()] != [1, 2]:
                pass
            client.put("photos", {"new": Path(picture)}, {"new": {"year": 2026}})
        run("activate", "2", at)
        table = run("search", "photos", picture, at)
        assert "red-circle-0.png" in table and "upgraded" in table and "year=2026" in table
        second = run_json("search", "photos", picture, at)
        assert second["release"] == 2
        # Each release says how sure it is: the first sees no colour.
        assert second["hits"][0]["score"] > 0.5 > first["hits"][0]["score"] > 0.2
        assert {hit["id"].partition("-")[0] for hit in second["hits"][:5]} <= {"red", "new"}
        listed = run_json("gallery", "list", at)["galleries"]
        assert [(one["name"], one["items"], one["release"]) for one in listed] == [
            ("photos", "121", 2)
        ]
        assert "texts" in run("search", "photos", "--text", "a", at, code=65)
        assert "no; repeat with --yes" in run("gallery", "delete", "photos", at)
        gone = run_json("gallery", "delete", "photos", "--yes", at)
        assert gone == {"gallery": "photos", "items": 121, "deleted": True}
        assert "photos" in run("search", "photos", picture, at, code=66)


@pytest.mark.slow
def test_the_second_release_is_better_and_its_gate_was_measured(tmp_path: Path) -> None:
    assert write_sample(tmp_path, 1).migrated_and_native_map is None
    carried, stays = write_sample(tmp_path, 2).migrated_and_native_map or (0.0, 0.0)
    assert carried > stays
    one, two = manifest(tmp_path, 1), manifest(tmp_path, 2)
    assert (one.gate.verdict, two.gate.verdict) == ("first", "passed")
    assert (two.gate.map_gain_low or 0) > 0 and (two.gate.cmc1_gain_low or 0) > 0
    assert two.routes[0].map == pytest.approx(carried) and 0.5 < two.routes[0].retention <= 1
    assert {one.origin for one in two.calibration} == {"native", "upgraded", "old-model"}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="run `gateway sample` first"):
        write_sample(tmp_path, 2)
    (tmp_path / "photos").mkdir()
    with pytest.raises(AlreadyExistsError, match="photos: exists already"):
        write_sample(tmp_path, 1)
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["photos"]'
    (tmp_path / "photos").rmdir()
    write_sample(tmp_path, 1)
    with pytest.raises(AlreadyExistsError, match="has release 1 already"):
        write_sample(tmp_path, 1)
