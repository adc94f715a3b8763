"""The verified view: news, its floor, and how far a wrong clock or a lost state can hurt."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import time_machine

from nobackfill.errors import (
    CannotWriteError,
    NotFoundError,
    UnavailableError,
    UnfitError,
    VerificationError,
)
from nobackfill.release.trust.trust import (
    Trust,
    VersionFloor,
    fetch_first_root,
    format_root_fingerprint,
)
from tests.support.simulator import BASE, Simulator

TEN_YEARS = timedelta(days=3652)


def trust_of(repo: Simulator, folder: Path, floor: VersionFloor | None = None) -> Trust:
    return Trust(folder, repo, BASE, repo.files["1.root.json"], floor)


def test_refresh_tells_news_from_nothing_new(tmp_path: Path) -> None:
    repo = Simulator()
    trust = trust_of(repo, tmp_path)
    assert trust.refresh() is True
    stored = (tmp_path / "trusted.json").read_bytes()
    assert trust.refresh() is False
    assert (tmp_path / "trusted.json").read_bytes() == stored
    repo.advance()
    assert trust.refresh() is True
    assert trust.version_floor().timestamp == repo.timestamp.version


def test_nothing_is_believed_without_a_root_or_a_refresh(tmp_path: Path) -> None:
    repo = Simulator()
    with pytest.raises(NotFoundError, match="root metadata"):
        Trust(tmp_path, repo, BASE)
    with pytest.raises(NotFoundError, match="refresh"):
        trust_of(repo, tmp_path).releases()


def test_a_root_of_somebody_else_is_refused(tmp_path: Path) -> None:
    repo, stranger = Simulator(), Simulator()
    with pytest.raises(VerificationError):
        Trust(tmp_path, repo, BASE, stranger.files["1.root.json"]).refresh()
    assert not (tmp_path / "trusted.json").exists()
    trust_of(repo, tmp_path).refresh()
    with pytest.raises(VerificationError, match="began with other root metadata"):
        Trust(tmp_path, repo, BASE, stranger.files["1.root.json"])


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"format": 1}', b"[" * 9999])
def test_a_damaged_state_is_refused_not_believed(damage: bytes, tmp_path: Path) -> None:
    repo = Simulator()
    trust_of(repo, tmp_path).refresh()
    (tmp_path / "trusted.json").write_bytes(damage)
    with pytest.raises(VerificationError, match="damaged"):
        Trust(tmp_path, repo, BASE)


def test_each_byte_of_the_stored_metadata_counts(tmp_path: Path) -> None:
    repo = Simulator()
    repo.add_file("release-1.json", b"manifest")
    repo.advance()
    trust_of(repo, tmp_path).refresh()
    stored = (tmp_path / "trusted.json").read_text()
    (tmp_path / "trusted.json").write_text(stored.replace("release-1.json", "release-7.json"))
    with pytest.raises(VerificationError):
        Trust(tmp_path, repo, BASE)


def test_a_chain_of_rotated_roots_is_followed_in_order(tmp_path: Path) -> None:
    repo = Simulator()
    trust = trust_of(repo, tmp_path)
    trust.refresh()
    for role in ("root", "timestamp", "snapshot", "targets", "root"):
        repo.next_root()
        old = repo.replace_key(role)
        repo.put_root(*({old} if role == "root" else set()), *repo.signers["root"])
    repo.advance()
    assert trust.refresh()
    assert trust.version_floor().root == 6
    assert trust_of(repo, tmp_path / "new").refresh()


def test_expired_roots_on_the_way_do_not_stop_a_device_that_was_away_for_years(
    tmp_path: Path,
) -> None:
    repo = Simulator()
    repo.next_root()
    repo.root.expires = datetime.now(UTC).replace(microsecond=0) - timedelta(days=400)
    repo.put_root()
    repo.next_root()
    repo.root.expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=30)
    repo.put_root()
    assert trust_of(repo, tmp_path).refresh()


def test_the_floor_holds_when_the_state_was_wiped(tmp_path: Path) -> None:
    repo = Simulator()
    old = dict(repo.files)
    repo.advance()
    trust = trust_of(repo, tmp_path)
    trust.refresh()
    floor = VersionFloor.model_validate_json(trust.version_floor().model_dump_json())
    shutil.rmtree(tmp_path)
    honest, repo.files = repo.files, old
    with pytest.raises(VerificationError, match="rolled back"):
        trust_of(repo, tmp_path, floor).refresh()
    assert not (tmp_path / "trusted.json").exists()
    # Without the floor the same attack works, so it is the floor that stops it.
    assert trust_of(repo, tmp_path / "unguarded").refresh()
    repo.files = honest
    assert trust_of(repo, tmp_path, floor).refresh()


@pytest.mark.parametrize("role", ["root", "timestamp", "snapshot", "targets"])
def test_the_floor_guards_each_role(role: str, tmp_path: Path) -> None:
    repo = Simulator()
    trust = trust_of(repo, tmp_path)
    trust.refresh()
    floor = trust.version_floor()
    higher = floor.model_copy(update={role: getattr(floor, role) + 1})
    with pytest.raises(VerificationError, match=role):
        trust_of(repo, tmp_path / "new", higher).refresh()


@pytest.mark.parametrize("wiped", [False, True])
def test_new_keys_recover_from_a_fast_forward_attack(wiped: bool, tmp_path: Path) -> None:
    """TUF 5.3.11: who stole online keys cannot push the counters so high that nobody returns."""
    repo = Simulator()
    honest = repo.timestamp.version, repo.snapshot.version
    repo.timestamp.version = repo.snapshot.version = 2**31
    repo.publish()
    trust = trust_of(repo, tmp_path)
    trust.refresh()
    floor = trust.version_floor()
    repo.timestamp.version, repo.snapshot.version = honest
    repo.advance()
    with pytest.raises(VerificationError):
        trust.refresh()
    repo.next_root()
    repo.replace_key("timestamp")
    repo.replace_key("snapshot")
    repo.put_root()
    repo.advance()
    if wiped:
        shutil.rmtree(tmp_path)
    assert trust_of(repo, tmp_path, floor).refresh()


def test_releases_and_withdrawals_are_read_from_signed_names_only(tmp_path: Path) -> None:
    repo = Simulator()
    for name in ("release-1.json", "release-10.json", "release-2.json", "release-x.json",
                 "release-01.json", "sub/release-3.json"):  # fmt: skip
        repo.add_file(name, b"{}")
    withdrawn = repo.targets.targets["release-10.json"]
    withdrawn.unrecognized_fields["custom"] = {"withdrawn": "it confuses cats"}
    repo.advance()
    trust = trust_of(repo, tmp_path)
    trust.refresh()
    assert trust.releases() == {1: None, 2: None, 10: "it confuses cats"}
    assert list(trust.releases()) == [1, 2, 10]
    with pytest.raises(UnfitError, match="release 2: its manifest cannot be used"):
        trust.newest_release()


def test_a_clock_ten_years_ahead_stops_news_and_nothing_else(tmp_path: Path) -> None:
    repo = Simulator()
    repo.add_file("release-1.json", b"{}")
    repo.advance()
    trust = trust_of(repo, tmp_path)
    trust.refresh()
    stored = (tmp_path / "trusted.json").read_bytes()
    repo.advance()
    with time_machine.travel(datetime.now(UTC) + TEN_YEARS, tick=False):
        with pytest.raises(VerificationError, match="clock"):
            trust.refresh()
        assert trust.releases() == {1: None}
        assert Trust(tmp_path, repo, BASE).releases() == {1: None}
    assert (tmp_path / "trusted.json").read_bytes() == stored
    assert trust.refresh()


def test_a_clock_ten_years_behind_does_not_make_old_metadata_fresh(tmp_path: Path) -> None:
    repo = Simulator()
    trust = trust_of(repo, tmp_path)
    trust.refresh()
    behind = datetime.now(UTC) - TEN_YEARS
    repo.advance()
    with time_machine.travel(behind, tick=False):
        assert trust.refresh()
    # Expired by any right clock, but not by the wrong one: the time seen before counts.
    repo.timestamp.expires = datetime.now(UTC).replace(microsecond=0) - timedelta(days=100)
    repo.advance()
    stored = (tmp_path / "trusted.json").read_bytes()
    with time_machine.travel(behind, tick=False), pytest.raises(VerificationError, match="expired"):
        trust.refresh()
    assert (tmp_path / "trusted.json").read_bytes() == stored


def test_the_first_root_is_shown_by_its_fingerprint() -> None:
    repo = Simulator()
    root = fetch_first_root(repo, BASE)
    assert root == repo.files["1.root.json"]
    groups = format_root_fingerprint(root).split(" ")
    assert [len(group) for group in groups] == [4] * 16
    assert format_root_fingerprint(root) != format_root_fingerprint(
        Simulator().files["1.root.json"]
    )


def test_a_first_root_that_is_none_is_refused() -> None:
    repo = Simulator()
    repo.files["1.root.json"] = repo.files["timestamp.json"]
    with pytest.raises(VerificationError):
        fetch_first_root(repo, BASE)
    del repo.files["1.root.json"]
    with pytest.raises(NotFoundError):
        fetch_first_root(repo, BASE)
    repo.files["1.root.json"] = b"x" * 600_000
    with pytest.raises(VerificationError, match="at most 512000 bytes"):
        fetch_first_root(repo, BASE)


def test_a_first_root_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nobackfill.release.trust.trust.METADATA_SECONDS", 0.5)
    repo = Simulator()
    dripped = bytearray()

    def drip(data: bytes) -> Iterator[bytes]:
        while len(dripped) < 1000:
            time.sleep(0.01)
            dripped.append(0)
            yield b"{"

    repo.tamper["1.root.json"] = drip
    with pytest.raises(UnavailableError, match="too slow"):
        fetch_first_root(repo, BASE)
    assert len(dripped) < 1000


def test_a_temporary_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = Simulator()
    trust = trust_of(repo, tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(CannotWriteError, match="missing"):
        trust.refresh()
