"""Keys and renewal: who signs what, exchanged keys, expiries."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import time_machine
from tuf.api.metadata import Metadata, Root

from nobackfill.errors import ConfigurationError, NotFoundError, VerificationError
from nobackfill.release.publishing.metadata import ROLES, Role, SigningKeys, require_signed_metadata
from nobackfill.release.publishing.publish import publish
from nobackfill.release.publishing.renew import metadata_expiries, resign, rotate, withdraw
from nobackfill.release.trust.trust import TrustedFolder
from tests.support.publication import seen
from tests.support.releases import draft

pytestmark = pytest.mark.usefixtures("near_gate")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    publish(tmp_path / "repo", draft(tmp_path / "drafts", 1))
    return tmp_path / "repo"


def keyids(repo: Path) -> dict[Role, list[str]]:
    root = require_signed_metadata(repo).root
    return {role: list(root.roles[role].keyids) for role in ROLES}


def test_each_role_has_a_key_of_its_own(repo: Path) -> None:
    ids = keyids(repo)
    assert all(len(of_role) == 1 for of_role in ids.values())
    assert len({of_role[0] for of_role in ids.values()}) == len(ROLES)
    assert require_signed_metadata(repo).root.consistent_snapshot


def test_terms_are_a_year_offline_and_thirty_days_online(repo: Path) -> None:
    now = datetime.now(UTC)
    days = {role: (when - now) / timedelta(days=1) for role, when in
            metadata_expiries(require_signed_metadata(repo)).items()}  # fmt: skip
    assert days == pytest.approx({"root": 365, "targets": 365, "snapshot": 30, "timestamp": 30},
                                 abs=0.01)  # fmt: skip


def test_resign_needs_the_online_keys_only(repo: Path, tmp_path: Path) -> None:
    for role in ("root", "targets"):
        (tmp_path / "repo.keys" / f"{role}.pem").unlink()
    before = require_signed_metadata(repo)
    with time_machine.travel(datetime.now(UTC) + timedelta(days=20)):
        assert resign(repo).signed_roles == ("snapshot", "timestamp")
        after = require_signed_metadata(repo)
    assert after.timestamp.expires - before.timestamp.expires > timedelta(days=19)
    assert after.targets == before.targets
    assert after.root == before.root


def test_resign_brings_an_expired_publication_back(repo: Path, tmp_path: Path) -> None:
    with time_machine.travel(datetime.now(UTC) + timedelta(days=31)):
        with pytest.raises(VerificationError, match="resign"):
            seen(repo, tmp_path / "state")
        resign(repo)
        assert seen(repo, tmp_path / "state") == {1: None}


def test_resign_renews_root_and_targets_in_the_second_half_of_their_year(
    repo: Path, tmp_path: Path
) -> None:
    with time_machine.travel(datetime.now(UTC) + timedelta(days=200)):
        assert resign(repo, dry_run=True).signed_roles == (
            "root",
            "targets",
            "snapshot",
            "timestamp",
        )
        assert require_signed_metadata(repo).root.version == 1
        assert resign(repo).signed_roles == ("root", "targets", "snapshot", "timestamp")
        assert require_signed_metadata(repo).root.version == 2
        assert resign(repo).signed_roles == ("snapshot", "timestamp")
        assert seen(repo, tmp_path / "state") == {1: None}


def test_resign_needs_a_publication(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        resign(tmp_path / "repo")


@pytest.mark.parametrize("roles", [[role] for role in ROLES] + [list(ROLES)], ids="+".join)
def test_rotated_keys_replace_the_old_ones(roles: list[Role], repo: Path, tmp_path: Path) -> None:
    reader = TrustedFolder(repo, tmp_path / "reader")
    reader.refresh()
    old_keys = tmp_path / "old"
    shutil.copytree(tmp_path / "repo.keys", old_keys)
    before = keyids(repo)
    rotate(repo, roles)
    after = keyids(repo)
    assert {role for role in ROLES if before[role] != after[role]} == set(roles)
    assert all(len(of_role) == 1 for of_role in after.values())
    # A reader of before follows, a new one begins at the first root.
    assert reader.refresh()
    assert seen(repo, tmp_path / "state") == {1: None}
    # The new keys are in place and go on signing; the old ones are refused.
    assert not list((tmp_path / "repo.keys").glob("*.next.pem"))
    resign(repo)
    withdraw(repo, 1, "for the test")
    for role in roles:
        with pytest.raises(ConfigurationError, match=role):
            SigningKeys(old_keys).require_key(role, require_signed_metadata(repo).root)


def test_a_lost_key_can_be_replaced_without_it(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "repo.keys" / "timestamp.pem").unlink()
    with pytest.raises(ConfigurationError, match="timestamp"):
        resign(repo)
    rotate(repo, ["timestamp"])
    resign(repo)
    assert seen(repo, tmp_path / "state") == {1: None}


def test_what_a_revoked_key_signs_is_refused_by_readers(repo: Path, tmp_path: Path) -> None:
    stolen = tmp_path / "stolen"
    shutil.copytree(tmp_path / "repo.keys", stolen)
    copy = tmp_path / "copy"
    shutil.copytree(repo, copy)
    reader = TrustedFolder(repo, tmp_path / "reader")
    rotate(repo, ["targets", "snapshot", "timestamp"])
    reader.refresh()
    # The thief publishes with the old keys, on top of what they were good for.
    withdraw(copy, 1, "by a thief", SigningKeys(stolen))
    for path in copy.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, repo)
    with pytest.raises(VerificationError):
        reader.refresh()
    assert reader.releases() == {1: None}


def test_keys_of_one_name_and_two_endings_get_a_new_one_each(tmp_path: Path) -> None:
    keys = SigningKeys(
        tmp_path / "keys", {"root": tmp_path / "a.root", "targets": tmp_path / "a.targets"}
    )
    repo = tmp_path / "repo"
    publish(repo, draft(tmp_path / "drafts", 1), keys)
    rotate(repo, ["targets", "root"], keys)
    ids = keyids(repo)
    assert len({of_role[0] for of_role in ids.values()}) == len(ROLES)
    root = require_signed_metadata(repo).root
    assert all(keys.find_key(role, root) is not None for role in ROLES)


def test_rotation_needs_the_root_key(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "repo.keys" / "root.pem").rename(tmp_path / "root.pem")
    with pytest.raises(ConfigurationError, match="--root-key"):
        rotate(repo, ["timestamp"])
    away = SigningKeys.of_publication(repo, {"root": tmp_path / "root.pem"})
    before = keyids(repo)
    assert rotate(repo, ["timestamp"], away, dry_run=True).signed_roles == ("timestamp",)
    assert keyids(repo) == before
    rotate(repo, ["timestamp", "root"], away)
    assert keyids(repo) != before
    # The new root key lies where the old one was.
    assert [path.name for path in tmp_path.glob("root*")] == ["root.pem"]
    assert not (tmp_path / "repo.keys" / "root.pem").exists()


@pytest.mark.parametrize("roles", [[], ["leaf"]])
def test_unknown_roles_are_refused(roles: list[Role], repo: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least one of"):
        rotate(repo, roles)


@pytest.mark.parametrize("data", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_files_that_are_no_keys_are_refused(data: bytes, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "repo.keys" / "timestamp.pem").write_bytes(data)
    with pytest.raises(ConfigurationError, match=r"timestamp\.pem"):
        resign(repo)


def test_keys_that_cannot_be_looked_for_are_a_wrong_configuration(
    repo: Path, tmp_path: Path
) -> None:
    """Such as in a folder of another user; here by a name that no file can have."""
    keys = SigningKeys.of_publication(repo, {"timestamp": tmp_path / ("k" * 300)})
    with pytest.raises(ConfigurationError, match=r"this signing key cannot be read \(File name"):
        resign(repo, keys)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        keys.is_complete()


def test_keys_that_others_may_read_are_refused(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "repo.keys" / "timestamp.pem").chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        resign(repo)


@pytest.mark.parametrize(
    "spoil", ["root", "timestamp", "snapshot", "targets", "missing", "manifest"]
)
def test_a_publisher_does_not_build_on_damaged_metadata(
    spoil: str, repo: Path, tmp_path: Path
) -> None:
    names = {"root": "1.root.json", "timestamp": "timestamp.json", "snapshot": "1.snapshot.json",
             "targets": "1.targets.json", "missing": "1.targets.json",
             "manifest": "release-1.json"}  # fmt: skip
    path = repo / names[spoil]
    if spoil == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    manifest = draft(tmp_path / "drafts", 1).manifest
    with pytest.raises(VerificationError):
        publish(repo, draft(tmp_path / "drafts", 2, [manifest]))


def test_a_broken_chain_of_roots_is_refused(repo: Path) -> None:
    rotate(repo, ["root"])
    newest = require_signed_metadata(repo).root.version
    skipped = Metadata[Root].from_file(str(repo / f"{newest}.root.json"))
    skipped.to_file(str(repo / f"{newest + 1}.root.json"))
    with pytest.raises(VerificationError, match="version"):
        require_signed_metadata(repo)
