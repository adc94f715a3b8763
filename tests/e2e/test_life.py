"""The life of `make demo` at tiny size: killed in the middle once, begun again, and looked at."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from manual.pictures import draw
from nobackfill.errors import NotFoundError
from tests.support.browser import CHROMIUM
from tests.support.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
# The gate cannot decide on 5 queries of each class; the quick start passes it on all of them.
TINY = (
    *("--images-per-class", "60", "--epochs", "20", "--batch-size", "16", "--force"),
    *("--clients", "2", "--steady-seconds", "1"),
)
STEPS = 14
# Seconds; only a machine that is busy with much else needs them.
PATIENCE = 400
pytestmark = pytest.mark.timeout(3 * PATIENCE)


def command(out: Path, options: Sequence[str] = TINY) -> list[str]:
    return [sys.executable, "-m", "demo.life", "--out", str(out), *options]


def run(out: Path, options: Sequence[str] = TINY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(out, options), cwd=ROOT, capture_output=True, text=True)


def processes_of(out: Path) -> list[str]:
    """Command lines of running processes that name the demo's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if str(out) in line:
                found.append(line)
    return found


# The life alone takes minutes.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a life that was killed while it filled the galleries, and then lived on."""
    folder = tmp_path_factory.mktemp("life") / "out"
    first = subprocess.Popen(
        command(folder), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(
            lambda: (folder / "logs" / "gateway.log").exists() or first.poll() is not None,
            "the gateway was never started",
            PATIENCE,
        )
    finally:
        os.kill(first.pid, signal.SIGKILL)
        _, words = first.communicate()
    assert first.returncode == -signal.SIGKILL, words
    wait_until(lambda: not processes_of(folder), "children outlive the demo", PATIENCE)
    second = run(folder)
    assert second.returncode == 0, second.stderr
    assert second.stderr.count("done before") >= 3
    assert "The upgrade keeps" in second.stdout
    return folder


@pytest.fixture(scope="module")
def report(out: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return figures


def test_nothing_of_it_runs_on(out: Path) -> None:
    assert processes_of(out) == []


def test_report_json_has_the_promised_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["cells", "server", "edge", "seconds"]
    assert list(report["cells"]) == ["old/old", "new/old", "new/upgraded", "new/new"]
    assert list(report["edge"]["cells"]) == ["old/old", "new/upgraded"]
    for cell in [*report["cells"].values(), *report["edge"]["cells"].values()]:
        assert list(cell) == ["cmc1", "cmc5", "map"]
        assert all(0 <= value <= 100 for value in cell.values())
    for key in (
        *("items", "requests", "failed", "p50_ms_steady", "p99_ms_steady", "p99_ms_swap"),
        *("swap_seconds", "upgrade_items_per_second"),
    ):
        assert isinstance(report["server"][key], int | float)
    assert {"items", "sync_seconds"} <= set(report["edge"])
    assert len(report["seconds"]) == STEPS


def test_no_search_failed_and_the_upgrade_holds(report: dict[str, Any]) -> None:
    cells, server, edge = report["cells"], report["server"], report["edge"]
    assert (server["failed"], server["failures"], edge["failed_during_sync"]) == (0, {}, 0)
    assert server["requests"] > 50
    assert edge["searches_during_sync"] >= 1
    assert cells["new/old"]["map"] < cells["old/old"]["map"] < cells["new/upgraded"]["map"]
    assert cells["new/upgraded"]["map"] >= 0.85 * cells["new/new"]["map"]
    assert edge["cells"]["new/upgraded"]["map"] > edge["cells"]["old/old"]["map"]
    assert edge["same_hits_as_server"] > 90


def test_the_images_are_gone_and_the_copies_are_for_measuring(out: Path) -> None:
    assert not (out / "data" / "server").exists()
    assert not (out / "data" / "device").exists()
    assert len(list((out / "measuring-only" / "server").glob("*/*.png"))) > 100


def test_report_html_needs_nothing_outside_itself(out: Path) -> None:
    text = (out / "report.html").read_text(encoding="utf-8")
    assert text.count('src="data:image/png;base64,') > 100
    assert text.count('src="') == text.count('src="data:')
    assert "built-in" not in text
    assert "embedded again" in (out / "upgrade.html").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="no sqlite3 command here")
def test_sqlite3_shows_a_readable_gallery(out: Path, report: dict[str, Any]) -> None:
    gallery = out / "device" / "gallery.sqlite"
    shown = subprocess.run(
        ["sqlite3", "-readonly", gallery, "SELECT count(*) FROM items; PRAGMA integrity_check;"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split() == [str(report["edge"]["items"]), "ok"]


def test_the_pictures_of_the_documents_are_drawn_from_it(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make pictures`: reports, the device's gallery and the console, as `--open` shows them."""
    if CHROMIUM is None and not os.environ.get("CI"):
        pytest.skip("no chromium here: apt-get install chromium")
    monkeypatch.setenv("NOBACKFILL_TRITON", "in-process")
    drawn = {}
    for path in draw(out, tmp_path):
        with Image.open(path) as picture:
            drawn[path.name] = picture.size
    assert {name: width for name, (width, _) in drawn.items()} == {
        "life.png": 1020, "upgrade.png": 900, "upgrade-searches.png": 900,
        "browse.png": 1100, "console.png": 1100,
    }  # fmt: skip
    # Of what the pages refer to none is drawn by hand.
    assert set(drawn) == {path.name for path in (ROOT / "docs").glob("*.png")}
    assert processes_of(out) == []
    (out / "data" / "device").unlink()


def test_pictures_of_no_life_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="run `make demo`"):
        next(draw(tmp_path, tmp_path))
    with pytest.raises(NotFoundError, match="--into"):
        next(draw(tmp_path, tmp_path / "nowhere"))


def test_a_finished_life_is_only_shown_again(out: Path) -> None:
    before = (out / "report.json").read_bytes()
    again = run(out)
    assert again.returncode == 0
    assert again.stderr.count("done before") == STEPS
    assert (out / "report.json").read_bytes() == before


def test_other_options_do_not_mix_with_a_run(out: Path) -> None:
    other = run(out, ("--epochs", "2"))
    assert (other.returncode, "--fresh" in other.stderr) == (78, True)


def test_wrong_input_gets_a_sentence_and_its_exit_code(tmp_path: Path) -> None:
    missing = run(tmp_path / "out", ("--images", str(tmp_path / "nowhere")))
    assert (missing.returncode, "expected a folder of class folders" in missing.stderr) == (
        65,
        True,
    )
    unknown = run(tmp_path / "out", ("--rollout", "sideways"))
    assert (unknown.returncode, "sideways" in unknown.stderr) == (2, True)
    (tmp_path / "file").write_text("")
    unwritable = run(tmp_path / "file" / "out")
    assert (unwritable.returncode, "cannot be written" in unwritable.stderr) == (73, True)
