"""What is refused: drafts that are not right, and publications that were tampered with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nobackfill.errors import GateFailedError, NobackfillError, NotFoundError, VerificationError
from nobackfill.release import manifest
from nobackfill.release.manifest import GateVerdict, Manifest
from nobackfill.release.publishing.draft import Draft
from nobackfill.release.publishing.publish import publish
from nobackfill.release.trust.trust import TrustedFolder
from tests.release.test_publish import chain, content
from tests.support.releases import draft

pytestmark = pytest.mark.usefixtures("near_gate")


def change(**update: object) -> Callable[[Draft], Draft]:
    return lambda one: Draft(one.manifest.model_copy(update=update), one.local_files)


def change_upgrade(**update: object) -> Callable[[Draft], Draft]:
    def changed(one: Draft) -> Draft:
        upgrade = one.manifest.upgrades[0].model_copy(update=update)
        return Draft(one.manifest.model_copy(update={"upgrades": (upgrade,)}), one.local_files)

    return changed


def damage(path: str) -> Callable[[Draft], Draft]:
    def damaged(one: Draft) -> Draft:
        data = bytearray(one.local_files[path].read_bytes())
        data[-20] ^= 1
        one.local_files[path].write_bytes(data)
        return one

    return damaged


def lose(path: str) -> Callable[[Draft], Draft]:
    def lost(one: Draft) -> Draft:
        return Draft(one.manifest, {p: file for p, file in one.local_files.items() if p != path})

    return lost


SPACE = "sp-" + "0" * 64
SIDE = "ss-" + "0" * 64
WRONG: list[tuple[str, Callable[[Draft], Draft], type[NobackfillError], str]] = [
    ("gate failed", change(gate=GateVerdict(verdict="failed", detail="-1.2 mAP")),
     GateFailedError, r"-1\.2 mAP"),
    ("gate not measured", change(gate=GateVerdict(verdict="not_measured")), GateFailedError,
     "not_measured"),
    ("gate first", change(gate=GateVerdict(verdict="first")), GateFailedError, "first"),
    ("space", change(space=SPACE), VerificationError, "space"),
    ("side space", change(side_space=SIDE), VerificationError, "side_space"),
    ("stranger", change(searches_directly=(SPACE,)), VerificationError, "searches_directly"),
    ("source space", change_upgrade(from_space=SPACE), VerificationError, "another space"),
    ("source dim", change_upgrade(from_dim=3), VerificationError, "another space"),
    ("source side", change_upgrade(from_side_space=SIDE), VerificationError, "side-information"),
    ("carried", change_upgrade(side="carries"), VerificationError, "different side encoders"),
    ("damaged", damage(manifest.upgrade_path(1, 2)), VerificationError, "upgrade_1_to_2"),
    ("damaged probes", damage(manifest.probes_path(2)), VerificationError, "probes-2"),
    ("missing", lose(manifest.embedder_path(2)), VerificationError, "embedder_2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "error", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_a_wrong_draft_is_refused_and_writes_nothing(
    spoil: Callable[[Draft], Draft], error: type[NobackfillError], message: str, tmp_path: Path
) -> None:
    repo = tmp_path / "repo"
    first, second = chain(tmp_path, 2)
    publish(repo, first)
    spoiled = spoil(second)
    before = content(repo)
    with pytest.raises(error, match=message):
        publish(repo, spoiled)
    assert content(repo) == before
    assert not (tmp_path / "repo.staging").exists()


@pytest.mark.parametrize("spoil", ["bit", "extra", "link", "missing", "linked folder", "config"])
def test_a_folder_that_was_tampered_with_is_not_used(spoil: str, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    for one in chain(tmp_path, 2):
        publish(repo, one)
    trust = TrustedFolder(repo, tmp_path / "state")
    trust.refresh()
    assert trust.verify_files(2) == repo
    model = repo / "embedder_2" / "1" / "model.onnx"
    match spoil:
        case "bit":
            data = bytearray(model.read_bytes())
            data[100] ^= 1
            model.write_bytes(data)
        case "extra":
            (repo / "embedder_2" / "1" / "model.py").write_text("import os")
        case "link":
            model.rename(tmp_path / "elsewhere")
            model.symlink_to(tmp_path / "elsewhere")
        case "missing":
            model.unlink()
        case "linked folder":
            (repo / "embedder_2").rename(tmp_path / "elsewhere")
            (repo / "embedder_2").symlink_to(tmp_path / "elsewhere")
        case _:
            (repo / "embedder_2" / "config.pbtxt").write_text('backend: "python"')
    with pytest.raises(VerificationError, match="embedder_2"):
        trust.verify_files(2)
    trust.verify_files(1)


def test_a_manifest_that_disagrees_with_what_was_signed_is_refused(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    first: Manifest = draft(tmp_path / "drafts", 1).manifest
    publish(repo, draft(tmp_path / "drafts", 1))
    trust = TrustedFolder(repo, tmp_path / "state")
    trust.refresh()
    (repo / "release-1.json").write_text(first.model_copy(update={"method": "x"}).model_dump_json())
    with pytest.raises(VerificationError):
        trust.manifest(1)
    with pytest.raises(NotFoundError):
        trust.manifest(2)
