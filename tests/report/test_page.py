import base64
import html
import html.parser
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nobackfill.errors import InvalidInputError
from nobackfill.report.page import RunningPages
from tests.support.commands import Ended, run_here

ROOT = Path(__file__).parent.parent.parent
# Its width in CSS pixels.
PHONE = 390
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def run(*arguments: str | Path) -> Ended:
    """Run `python -m nobackfill.report` in this process."""
    return run_here(
        lambda: runpy.run_module("nobackfill.report", run_name="__main__"), "report", *arguments
    )


@pytest.fixture(scope="module")
def page(model_repo: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("out") / "upgrade.html"
    # As a process, once.
    command: list[str | Path] = [sys.executable, "-m", "nobackfill.report"]
    command += ["--model-repo", model_repo, "--release", "2", "--images", images, "-o", output]
    subprocess.run(command, cwd=ROOT, check=True)
    return output


class References(html.parser.HTMLParser):
    """Everything that a page would load, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in {"src", "href", "srcset"}]
        assert tag not in {"script", "link", "iframe", "object"}

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: Path) -> References:
    references = References()
    references.feed(page.read_text(encoding="utf-8"))
    return references


def test_the_page_needs_nothing_outside_itself(page: Path) -> None:
    content = read(page)
    assert len(content.loads) > 10
    assert all(load.startswith("data:image/") for load in content.loads)
    assert "url(" not in page.read_text(encoding="utf-8")


def test_the_page_tells_what_a_product_owner_asks(page: Path) -> None:
    text = read(page).text
    for words in (
        "From release 1 to release 2",
        "100.0 %",
        "of the quality that embedding every image again would give",
        "today to",
        "naive swap: what happens without an upgrade",
        "passed",
        "Who can search what",
        "If some images can still be embedded again",
        "The gallery before and after",
        "Searches that improved",
        "Searches that worsened",
        "The least certain items",
        "in multiples of the median item's",
        "lower bound",
        "upper bound",
        "new model ",
        "onnxruntime",
        "Route: 1 → 2",
        "24 of 24 images",
    ):
        assert words in text


def test_equal_inputs_give_an_equal_page_but_for_the_seconds(
    page: Path, model_repo: Path, images: Path, tmp_path: Path
) -> None:
    other = tmp_path / "again.html"
    run("--model-repo", model_repo, "--release", "2", "--images", images, "-o", other)
    seconds = re.compile(r"[0-9.]+ m?s\b")
    first, second = (seconds.sub("", p.read_text(encoding="utf-8")) for p in (page, other))
    assert first == second


def test_without_images_it_shows_what_was_published(model_repo: Path, tmp_path: Path) -> None:
    output = tmp_path / "published.html"
    assert run("--model-repo", model_repo, "--release", "2", "-o", output).returncode == 0
    text = read(output).text
    assert "give this report images" in text
    assert "Searches that worsened" not in text
    served = ("--console", "http://127.0.0.1:9465/secret/", "--browse", "http://127.0.0.1:8642/x")
    first = run("--model-repo", model_repo, "--release", "1", "-o", output, *served)
    assert first.returncode == 0, first.stderr
    assert "The first release" in read(output).text
    assert read(output).loads == [
        "http://127.0.0.1:9465/secret/release/1", "http://127.0.0.1:9465/secret/playground",
        "http://127.0.0.1:8642/x/release", "http://127.0.0.1:8642/x/uncertain",
    ]  # fmt: skip
    # It holds their secrets.
    assert output.stat().st_mode & 0o777 == 0o600


def test_a_report_leads_to_pages_alone() -> None:
    for wrong in ("javascript:alert(1)", "127.0.0.1:9465", "file:///etc/passwd", " http://x"):
        with pytest.raises(InvalidInputError, match="that `gateway serve --console` or"):
            RunningPages(console_address=wrong).links(2)
    assert RunningPages().links(2) == []


def test_wrong_input_gets_a_sentence_and_its_exit_code(
    model_repo: Path, images: Path, tmp_path: Path
) -> None:
    output = tmp_path / "none.html"
    unknown = run("--model-repo", model_repo, "--release", "7", "-o", output)
    assert (unknown.returncode, "cannot be shown: it is not published" in unknown.stderr) == (
        66,
        True,
    )
    missing = run(
        *("--model-repo", model_repo, "--release", "2"),
        *("--images", tmp_path / "nowhere", "-o", output),
    )
    assert (missing.returncode, "there is no such folder" in missing.stderr) == (66, True)
    (tmp_path / "broken" / "a").mkdir(parents=True)
    shutil.copytree(images, tmp_path / "broken", dirs_exist_ok=True)
    (tmp_path / "broken" / "a" / "0.png").write_bytes(b"no image")
    broken = run(
        *("--model-repo", model_repo, "--release", "2"),
        *("--images", tmp_path / "broken", "-o", output),
    )
    assert (broken.returncode, "0.png" in broken.stderr) == (65, True)
    assert not output.exists()
    for answer in (unknown, missing, broken):
        assert answer.stderr.count("\n") == 1


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (.ci/run installs it)")
def test_it_is_readable_on_a_phone(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    seen = on_a_phone(text, tmp_path)
    assert seen["page"] <= PHONE
    assert seen["matrix"] <= max(seen["charts"])
    charts = re.findall(r'class="chart[^>]*base64,([^"]+)"', text)
    assert len(charts) == len(seen["charts"]) == 4
    for chart, width in zip(charts, seen["charts"], strict=True):
        assert width > 0.8 * PHONE
        drawn = base64.b64decode(chart).decode()
        scale = width / float(re.findall(r'viewBox="0 0 ([0-9.]+)', drawn)[0])
        assert all(scale * float(size) >= 9 for size in re.findall(r"font: ([0-9.]+)px", drawn))


def on_a_phone(page: str, folder: Path) -> dict[str, Any]:
    """Widths in pixels of the page, its matrix and its charts, in a frame of a phone's width:
    chromium's own window is never narrower than 500."""
    # The page itself carries no script; this copy reports to the title of the page around it.
    script = """<script>onload = () => {
        const width = element => element.scrollWidth
        parent.document.title = JSON.stringify({
            page: width(document.documentElement), matrix: width(document.querySelector(".matrix")),
            charts: [...document.querySelectorAll("img.chart")].map(width)})}</script></body>"""
    framed = html.escape(page.replace("</body>", script))
    probe = folder / "probe.html"
    probe.write_text(f'<iframe width="{PHONE}" height="844" srcdoc="{framed}" style="border:0">')
    done = subprocess.run(
        [
            *(str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--window-size=500,900", f"--user-data-dir={folder / 'profile'}"),
            *("--virtual-time-budget=3000", "--dump-dom", probe.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"<title>({.*?})</title>", done.stdout)
    assert found is not None, done.stderr[-2000:]
    return dict(json.loads(found[1]))
