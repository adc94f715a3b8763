"""Claims, wishes and a day's cost in a file that processes share."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from nobackfill.errors import DamagedError
from nobackfill.serving import LedgerFile
from nobackfill.serving.ledger import today_utc


def test_an_item_is_claimed_once_and_a_day_has_its_budget(tmp_path: Path) -> None:
    day = today_utc()
    path = tmp_path / "ledger.sqlite"
    with closing(LedgerFile[str](path)) as one, closing(LedgerFile[str](path)) as two:
        assert one.claim(["a", "b"], day, 3) == ["a", "b"]
        assert two.claim(["b", "c", "d"], day, 3) == ["c"]
        assert two.requested_keys(9) == ["b", "d"]
        assert two.count_claimed(day) == 3
        one.finish_claims(["b"])
        assert two.requested_keys(9) == ["d"]
        # What could not be embedded is paid back once, and is wanted by nobody.
        one.return_claims(["a"])
        one.return_claims(["a"])
        assert (two.count_claimed(day), two.requested_keys(9)) == (2, ["d"])
        assert two.claim(["d", "a"], day, 3) == ["d"]
        assert two.claim(["a"], "2026-02-27", 3) == ["a"]


def test_claims_of_a_process_that_ended_are_free(tmp_path: Path) -> None:
    day = today_utc()
    path = tmp_path / "ledger.sqlite"
    script = (
        "import sys\nfrom pathlib import Path\nfrom nobackfill.serving import LedgerFile\n"
        f"print(LedgerFile(Path(sys.argv[1])).claim([1, 2], {day!r}, 2))\n"
    )
    child = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(child, check=True, capture_output=True, text=True)
    assert done.stdout == "[1, 2]\n"
    with closing(LedgerFile[int](path)) as ledger:
        assert ledger.claim([2, 3], today_utc(), 9) == [2, 3]
        # Nobody gives back what it cost.
        assert ledger.count_claimed(today_utc()) == 4


def test_a_page_that_is_damaged_while_the_file_is_open(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(LedgerFile[str](path)) as ledger:
        ledger.claim([f"a long name of item {number:08}" for number in range(5000)], today_utc(), 0)
    content = bytearray(path.read_bytes())
    # The schema's page stays, so that the file opens.
    content[8192:] = b"\xff" * (len(content) - 8192)
    with closing(LedgerFile[str](path)) as ledger:
        assert len(ledger.requested_keys(9)) == 9
        ledger.close()
        path.write_bytes(content)
        with pytest.raises(DamagedError):
            ledger.requested_keys(9)
        with pytest.raises(DamagedError):
            ledger.claim(["a"], today_utc(), 9)
