"""Folders that the workers of a run share."""

import threading
import time
from pathlib import Path

import pytest

from tests.support.once import filled


def test_whoever_asks_meanwhile_waits_for_the_one_who_fills_it(tmp_path: Path) -> None:
    fills, seen = [], []

    def fill(folder: Path) -> None:
        fills.append(folder)
        time.sleep(0.1)
        (folder / "whole").touch()

    def ask() -> None:
        seen.append((filled(tmp_path / "made" / "once", fill) / "whole").exists())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fills) == 1
    assert seen == [True] * 4


def test_what_failed_half_way_is_begun_anew(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise ValueError

    with pytest.raises(ValueError):
        filled(tmp_path / "once", fail)
    folder = filled(tmp_path / "once", lambda folder: (folder / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
