"""A static host that means harm: every behaviour ends within the deadline, as an error of ours."""

import threading
from pathlib import Path

import pytest
from tuf.api.metadata import TargetFile

from nobackfill import pace
from nobackfill.errors import NotFoundError, UnavailableError, VerificationError
from nobackfill.release.trust import trust
from nobackfill.release.trust.trust import download_signed_file, fetch_first_root, fetcher_for
from tests.support.evil_host import BEHAVIOURS, every_fifth, evil_host
from tests.support.waiting import wait_until

REFUSED = (UnavailableError, VerificationError, NotFoundError)
DATA = b"signed" * 100
TARGET = TargetFile.from_data("embedder_1/1/model.onnx", DATA, ["sha256"])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "READ_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(pace, "STALL_SECONDS", 0.4)
    monkeypatch.setattr(trust, "METADATA_SECONDS", 0.6)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", every_fifth(BEHAVIOURS))
def test_no_behaviour_holds_a_reader_or_leaves_anything(name: str, tmp_path: Path) -> None:
    with evil_host(BEHAVIOURS[name]) as address:
        fetcher, base = fetcher_for(address)
        with pytest.raises(REFUSED):
            fetch_first_root(fetcher, base)
        with pytest.raises(REFUSED):
            download_signed_file(fetcher, base, TARGET, tmp_path / TARGET.path)
    here = [path for path in tmp_path.rglob("*") if path.is_file()]
    # What came in time may be the beginning of the file, and is kept for the next try.
    assert all(path.name == "model.onnx.part" for path in here)
    assert all(path.stat().st_size <= TARGET.length for path in here)
    wait_until(
        lambda: all(thread.name != "fetch" for thread in threading.enumerate()),
        "a fetch thread outlives its host",
    )
