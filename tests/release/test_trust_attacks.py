"""Attacks on a reader of metadata, after the TUF specification and its conformance suite.

Each attack (attacks.py) is made on a reader that has already seen honest metadata. It must be
refused, and must leave the trusted state byte for byte as it was.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tuf.api.exceptions import SlowRetrievalError

from nobackfill.errors import NotFoundError, UnavailableError, VerificationError
from nobackfill.release.trust.trust import Trust
from tests.release.attacks import ATTACKS, SIGNED_WRONG
from tests.support.simulator import BASE, Simulator


@pytest.fixture
def repo() -> Simulator:
    simulator = Simulator()
    simulator.advance()
    simulator.advance()
    return simulator


def reader(repo: Simulator, folder: Path) -> Trust:
    trust = Trust(folder, repo, BASE, repo.files["1.root.json"])
    trust.refresh()
    return trust


def content(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def assert_refused(repo: Simulator, trust: Trust, folder: Path, expected: type[Exception]) -> None:
    before, floor = content(folder), trust.version_floor()
    with pytest.raises(expected):
        trust.refresh()
    assert content(folder) == before
    assert trust.version_floor() == floor
    # A reader that starts anew from the same state is not fooled either.
    with pytest.raises(expected):
        Trust(folder, repo, BASE).refresh()
    assert content(folder) == before


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attack_is_refused_and_changes_nothing(
    attack: Callable[[Simulator], None], repo: Simulator, tmp_path: Path
) -> None:
    trust = reader(repo, tmp_path)
    attack(repo)
    assert_refused(repo, trust, tmp_path, VerificationError)


@pytest.mark.parametrize(("how", "role"), SIGNED_WRONG, ids=lambda v: getattr(v, "__name__", v))
def test_metadata_signed_by_strangers_or_nobody_is_refused(
    how: Callable[[str], Callable[[Simulator], None]], role: str, repo: Simulator, tmp_path: Path
) -> None:
    trust = reader(repo, tmp_path)
    honest = repo.signers[role]
    how(role)(repo)
    assert_refused(repo, trust, tmp_path, VerificationError)
    repo.signers[role] = honest
    repo.advance()
    assert trust.refresh()


def endless(data: bytes) -> Iterator[bytes]:
    while True:
        yield b"x" * 65536


def too_slow(data: bytes) -> Iterator[bytes]:
    yield data[:10]
    raise SlowRetrievalError("nothing came")


@pytest.mark.parametrize(
    "name", ["timestamp.json", "4.snapshot.json", "4.targets.json", "2.root.json"]
)
def test_endless_metadata_is_cut_off(name: str, repo: Simulator, tmp_path: Path) -> None:
    trust = reader(repo, tmp_path)
    repo.advance()
    repo.files.setdefault(name, b"{}")
    repo.tamper[name] = endless
    assert_refused(repo, trust, tmp_path, VerificationError)
    repo.tamper.clear()
    repo.files.pop("2.root.json", None)
    assert trust.refresh()


def test_slow_metadata_is_given_up(repo: Simulator, tmp_path: Path) -> None:
    trust = reader(repo, tmp_path)
    repo.tamper["timestamp.json"] = too_slow
    assert_refused(repo, trust, tmp_path, UnavailableError)


@pytest.mark.parametrize("name", ["timestamp.json", "4.snapshot.json", "4.targets.json"])
def test_missing_metadata_is_refused(name: str, repo: Simulator, tmp_path: Path) -> None:
    trust = reader(repo, tmp_path)
    repo.advance()
    data = repo.files.pop(name)
    assert_refused(repo, trust, tmp_path, NotFoundError)
    repo.files[name] = data
    assert trust.refresh()
