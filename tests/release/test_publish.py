"""Publishing: what comes out, what is refused, and that refusals write nothing."""

import stat
from pathlib import Path

import pytest

from nobackfill import durable
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    ConfigurationError,
    NotFoundError,
    PreconditionError,
    VerificationError,
)
from nobackfill.release import manifest
from nobackfill.release.manifest import GateVerdict
from nobackfill.release.publishing.draft import Draft
from nobackfill.release.publishing.inspection import list_releases, verify_publication
from nobackfill.release.publishing.metadata import SigningKeys
from nobackfill.release.publishing.publish import publish
from nobackfill.release.publishing.renew import withdraw
from nobackfill.release.trust.trust import TrustedFolder
from tests.support.publication import files_of, seen
from tests.support.releases import draft

pytestmark = pytest.mark.usefixtures("near_gate")


def content(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def chain(folder: Path, count: int) -> list[Draft]:
    """Drafts of releases 1 to `count`, each with an upgrade from the one before."""
    drafts = [draft(folder / "drafts", 1)]
    for number in range(2, count + 1):
        drafts.append(draft(folder / "drafts", number, [drafts[-1].manifest], int8=True))
    return drafts


def test_releases_are_published_and_verified_by_a_reader(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    drafts = chain(tmp_path, 3)
    for one in drafts:
        done = publish(repo, one)
        assert not done.dry_run
        assert all((repo / path).stat().st_size == size for path, size in done.file_sizes.items())
    assert seen(repo, tmp_path / "state") == {1: None, 2: None, 3: None}
    trust = TrustedFolder(repo, tmp_path / "state")
    for one in drafts:
        assert trust.manifest(one.manifest.release) == one.manifest
    assert [entry.release for entry in list_releases(repo)] == [1, 2, 3]
    assert verify_publication(repo).releases == (1, 2, 3)
    assert not (tmp_path / "repo.staging").exists()


def test_triton_finds_whole_models_and_nothing_else_in_folders(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    for one in chain(tmp_path, 2):
        publish(repo, one)
    folders = sorted(path.name for path in repo.iterdir() if path.is_dir())
    assert folders == ["embedder_1", "embedder_2", "side_encoder_1", "side_encoder_2",
                       "upgrade_1_to_2"]  # fmt: skip
    for folder in folders:
        text = (repo / folder / "config.pbtxt").read_text()
        assert f'name: "{folder}"' in text
        assert 'backend: "onnxruntime"' in text
        assert (repo / folder / "1" / "model.onnx").is_file()
    assert (repo / "embedder_2" / "config.pbtxt").read_text() == EMBEDDER_CONFIG
    assert (repo / "upgrade_1_to_2" / "config.pbtxt").read_text() == UPGRADE_CONFIG


# What was written so must stay so: Triton and signed digests both depend on each byte.
EMBEDDER_CONFIG = """\
name: "embedder_2"
backend: "onnxruntime"
max_batch_size: 256
input { name: "image" data_type: TYPE_UINT8 dims: [ 8, 8, 3 ] }
output { name: "embedding" data_type: TYPE_FP32 dims: [ 64 ] }
dynamic_batching { }
instance_group [ { count: 1 } ]
"""
UPGRADE_CONFIG = """\
name: "upgrade_1_to_2"
backend: "onnxruntime"
max_batch_size: 256
input { name: "embedding" data_type: TYPE_FP32 dims: [ 64 ] }
input { name: "side" data_type: TYPE_FP32 dims: [ 32 ] }
output { name: "upgraded" data_type: TYPE_FP32 dims: [ 64 ] }
output { name: "upgraded_side" data_type: TYPE_FP32 dims: [ 32 ] }
output { name: "uncertainty" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
dynamic_batching { }
instance_group [ { count: 1 } ]
"""


def test_the_first_publish_makes_private_keys_and_says_so(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    first, second = chain(tmp_path, 2)
    assert publish(repo, first).new_key_folder == tmp_path / "repo.keys"
    assert publish(repo, second).new_key_folder is None
    assert stat.S_IMODE((tmp_path / "repo.keys").stat().st_mode) == 0o700
    for key in (tmp_path / "repo.keys").iterdir():
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_dry_run_checks_everything_and_writes_nothing(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    first, second = chain(tmp_path, 2)
    before = content(tmp_path)
    assert publish(repo, first, dry_run=True).dry_run
    assert content(tmp_path) == before
    publish(repo, first)
    before = content(tmp_path)
    planned = publish(repo, second, dry_run=True)
    assert content(tmp_path) == before
    assert publish(repo, second).file_sizes == planned.file_sizes
    with pytest.raises(AlreadyExistsError):
        publish(repo, second, dry_run=True)


def test_a_release_is_immutable_and_numbers_only_grow(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    first = draft(tmp_path / "drafts", 1)
    third = draft(tmp_path / "drafts", 3, [first.manifest])
    publish(repo, first)
    publish(repo, third)
    look = files_of(repo, 1)
    before = look()
    with pytest.raises(AlreadyExistsError, match="never replaced"):
        publish(repo, first)
    with pytest.raises(AlreadyExistsError, match="above 3"):
        publish(repo, draft(tmp_path / "drafts", 2, [first.manifest]))
    assert look() == before


def test_a_carried_side_encoder_is_not_published_twice(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    first = draft(tmp_path / "drafts", 1)
    second = draft(tmp_path / "drafts", 2, [first.manifest], side="carries")
    publish(repo, first)
    done = publish(repo, second)
    assert not any("side_encoder" in path for path in done.file_sizes)
    assert seen(repo, tmp_path / "state") == {1: None, 2: None}
    assert verify_publication(repo).releases == (1, 2)


def test_files_lie_where_their_names_say(tmp_path: Path) -> None:
    first = draft(tmp_path / "drafts", 1)
    published = first.manifest.embedder.file
    assert published is not None
    file = published.model_copy(update={"path": "embedder_9/1/model.onnx"})
    spec = first.manifest.embedder.model_copy(update={"file": file})
    files = {**first.local_files, file.path: first.local_files[manifest.embedder_path(1)]}
    wrong = Draft(first.manifest.model_copy(update={"embedder": spec}), files)
    with pytest.raises(VerificationError, match="expected the file embedder_1"):
        publish(tmp_path / "repo", wrong)


def test_a_forced_release_goes_out_and_says_so(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    forced = GateVerdict(verdict="failed", forced=True, detail="worse, but wanted")
    publish(repo, draft(tmp_path / "drafts", 1, gate=forced))
    assert list_releases(repo)[0].gate == "failed (forced)"


def test_an_upgrade_from_an_unpublished_release_is_refused(tmp_path: Path) -> None:
    _, second = chain(tmp_path, 2)
    with pytest.raises(VerificationError, match="not published"):
        publish(tmp_path / "repo", second)


def test_two_publishers_exclude_each_other(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    with durable.lock_file(tmp_path / "repo.lock"), pytest.raises(BusyError):
        publish(repo, draft(tmp_path / "drafts", 1))
    assert not (repo / "timestamp.json").exists()


def test_a_missing_targets_key_is_named_with_its_option(tmp_path: Path) -> None:
    repo, away = tmp_path / "repo", tmp_path / "usb"
    first, second = chain(tmp_path, 2)
    away.mkdir()
    offline = SigningKeys.of_publication(repo, {"targets": away / "targets.pem"})
    publish(repo, first, offline)
    assert not (tmp_path / "repo.keys" / "targets.pem").exists()
    with pytest.raises(ConfigurationError, match="--targets-key"):
        publish(repo, second)
    publish(repo, second, offline)


def test_leftovers_go_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    first, second = chain(tmp_path, 2)
    publish(repo, first)
    for name in ("README.md", ".gitkeep", "notes/file"):
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text("mine")
    for name in ("embedder_2/1/model.onnx", "text_encoder_2/1/model.onnx", "upgrade_1_to_2/half",
                 "release-2.json", "99.targets.json", "99.snapshot.json",
                 ".tmp-timestamp.json-x"):  # fmt: skip
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text("half")
    (tmp_path / "repo.staging" / "deep").mkdir(parents=True)
    assert verify_publication(repo).leftover_files == (
        "99.snapshot.json", "99.targets.json", "embedder_2", "release-2.json", "text_encoder_2",
        "upgrade_1_to_2",
    )  # fmt: skip
    publish(repo, second)
    assert seen(repo, tmp_path / "state") == {1: None, 2: None}
    assert verify_publication(repo).leftover_files == ()
    assert {"README.md", ".gitkeep", "notes"} <= {path.name for path in repo.iterdir()}
    assert not (repo / "99.targets.json").exists()


def test_a_lost_timestamp_does_not_cost_the_published_releases(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    drafts = chain(tmp_path, 3)
    for one in drafts[:2]:
        publish(repo, one)
    (repo / "timestamp.json").unlink()
    before = content(repo)
    with pytest.raises(VerificationError, match=r"timestamp\.json: .* is missing"):
        publish(repo, drafts[2])
    assert content(repo) == before


def test_withdrawing_is_news_once(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    for one in chain(tmp_path, 2):
        publish(repo, one)
    trust = TrustedFolder(repo, tmp_path / "state")
    trust.refresh()
    assert trust.newest_release() == 2
    before = content(tmp_path)
    assert withdraw(repo, 2, "it confuses cats", dry_run=True)
    assert content(tmp_path) == before
    assert withdraw(repo, 2, "it confuses cats")
    assert not withdraw(repo, 2, "it confuses cats")
    assert trust.refresh()
    assert trust.releases() == {1: None, 2: "it confuses cats"}
    assert trust.newest_release() == 1
    assert list(trust.manifests()) == [1]
    assert trust.manifest(2).release == 2
    with pytest.raises(NotFoundError):
        withdraw(repo, 7, "why not")
    for reason in ("  ", "a bell\a", "half a character \udcff"):
        with pytest.raises(PreconditionError):
            withdraw(repo, 1, reason)
