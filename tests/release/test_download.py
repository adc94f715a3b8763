"""Downloads: resumed, capped, verified, durable."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tuf.api.exceptions import DownloadError, SlowRetrievalError

from nobackfill import pace
from nobackfill.errors import NotFoundError, UnavailableError, VerificationError
from nobackfill.release.trust.trust import Trust
from tests.support.simulator import BASE, Simulator

PATH = "embedder_1/1/model.onnx"
DATA = bytes(range(256)) * 20_000


@pytest.fixture
def repo() -> Simulator:
    simulator = Simulator()
    simulator.add_file(PATH, DATA)
    simulator.advance()
    return simulator


@pytest.fixture
def trust(repo: Simulator, tmp_path: Path) -> Trust:
    found = Trust(tmp_path / "state", repo, BASE, repo.files["1.root.json"])
    found.refresh()
    return found


def test_a_file_arrives_once_and_is_then_left_alone(
    repo: Simulator, trust: Trust, tmp_path: Path
) -> None:
    path = trust.download(PATH, tmp_path)
    assert path == tmp_path / PATH
    assert path.read_bytes() == DATA
    repo.reads.clear()
    assert trust.download(PATH, tmp_path) == path
    assert repo.reads == []
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]


def test_a_broken_download_goes_on_where_it_ended(
    repo: Simulator, trust: Trust, tmp_path: Path
) -> None:
    sent: list[int] = []

    def breaking(data: bytes) -> Iterator[bytes]:
        sent.append(0)
        for start in range(0, min(len(data), 2_000_000), 100_000):
            sent[-1] += 100_000
            yield data[start : start + 100_000]
        if len(data) > 2_000_000:
            raise DownloadError("the network went away")

    repo.tamper[PATH] = breaking
    for _ in range(2):
        with pytest.raises(UnavailableError, match="try again"):
            trust.download(PATH, tmp_path)
        assert not (tmp_path / PATH).exists()
    assert trust.download(PATH, tmp_path).read_bytes() == DATA
    assert sum(sent) <= len(DATA) + 100_000


def test_a_host_that_ends_early_keeps_the_part(
    repo: Simulator, trust: Trust, tmp_path: Path
) -> None:
    repo.tamper[PATH] = lambda data: iter([data[: len(data) // 2]])
    with pytest.raises(UnavailableError, match="stopped after"):
        trust.download(PATH, tmp_path)
    part = tmp_path / f"{PATH}.part"
    assert part.read_bytes() == DATA[: len(DATA) // 2]
    repo.tamper.clear()
    assert trust.download(PATH, tmp_path).read_bytes() == DATA
    assert not part.exists()


def test_a_bad_part_is_thrown_away_and_the_file_read_anew(
    repo: Simulator, trust: Trust, tmp_path: Path
) -> None:
    part = tmp_path / f"{PATH}.part"
    part.parent.mkdir(parents=True)
    for damage in (b"wrong" * 100, b"x" * (len(DATA) + 1), b"x" * len(DATA), b""):
        part.write_bytes(damage)
        assert trust.download(PATH, tmp_path).read_bytes() == DATA
        (tmp_path / PATH).unlink()


def test_endless_data_is_cut_at_the_signed_length(
    repo: Simulator, trust: Trust, tmp_path: Path
) -> None:
    read = 0

    def endless(data: bytes) -> Iterator[bytes]:
        nonlocal read
        while True:
            read += 65_536
            yield b"x" * 65_536

    repo.tamper[PATH] = endless
    with pytest.raises(VerificationError, match="more than"):
        trust.download(PATH, tmp_path)
    assert read <= 1.1 * len(DATA)
    assert [p for p in tmp_path.rglob("*") if "model.onnx" in p.name] == []


def test_other_content_of_the_same_length_is_refused(
    repo: Simulator, trust: Trust, tmp_path: Path
) -> None:
    repo.files[PATH] = DATA[:-1] + b"!"
    with pytest.raises(VerificationError, match="differs from"):
        trust.download(PATH, tmp_path)
    assert [p for p in tmp_path.rglob("*") if "model.onnx" in p.name] == []


def test_a_dripping_host_is_given_up_and_its_part_kept(
    repo: Simulator, trust: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "STALL_SECONDS", 0.3)
    read = 0

    def drip(data: bytes) -> Iterator[bytes]:
        nonlocal read
        for byte in data[:1000]:
            read += 1
            time.sleep(0.01)
            yield bytes([byte])

    repo.tamper[PATH] = drip
    with pytest.raises(UnavailableError, match="bytes a second"):
        trust.download(PATH, tmp_path)
    assert 0 < read < 1000
    assert (tmp_path / f"{PATH}.part").exists()


def test_a_silent_host_is_given_up(repo: Simulator, trust: Trust, tmp_path: Path) -> None:
    def silent(data: bytes) -> Iterator[bytes]:
        yield data[:5]
        raise SlowRetrievalError("nothing came")

    repo.tamper[PATH] = silent
    with pytest.raises(UnavailableError, match="slow"):
        trust.download(PATH, tmp_path)


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/outside", "a/../../outside", "..", "embedder_1/../../outside"]
)
def test_a_signed_path_that_leads_out_is_refused(
    path: str, repo: Simulator, tmp_path: Path
) -> None:
    repo.add_file(path, b"data")
    repo.advance()
    trust = Trust(tmp_path / "state", repo, BASE, repo.files["1.root.json"])
    trust.refresh()
    folder = tmp_path / "deep" / "folder"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(VerificationError, match="leads out"):
        trust.download(path, folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_nobody_signed_is_not_fetched(repo: Simulator, trust: Trust, tmp_path: Path) -> None:
    repo.files["extra"] = b"data"
    with pytest.raises(NotFoundError):
        trust.download("extra", tmp_path)
    assert "extra" not in repo.reads
