"""Hooks of mkdocs: generate pages, and replace links that lead out of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from manual import commands, faces, notebooks, protocol
from nobackfill.research.results import cost_points, draw_costs, read_results

ROOT = Path(__file__).parents[1]
CURVE = "methods-digits.svg"
_SHIM = Path(__file__).parent / "vendored" / "iframe-worker.js"
_STYLE = Path(__file__).parent / "site.css"
# Below the first paragraph of the landing page.
_BUTTONS = """
[Migrate your own store](adopt.md){ .md-button .md-button--primary }
[See the demo](demo.md){ .md-button }
"""
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<to>[^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the start page, the reference and the notebooks."""
    pages: dict[str, str | bytes] = {
        "index.md": start(),
        "reference/protocol.md": protocol.page(),
        "reference/commands.md": commands.page(),
        "reference/python.md": faces.page(),
        **notebooks.pages(),
        CURVE: curve(),
        f"assets/{_SHIM.name}": _SHIM.read_text("utf-8"),
        f"assets/{_STYLE.name}": _STYLE.read_text("utf-8"),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links to files of the repository by their names, and to notebooks by their pages.

    Also adds the drawing of quality against cost to the tutorial's table of digits.
    """
    folder = Path(page.file.src_uri).parent
    markdown = markdown.replace(".ipynb)", ".md)")
    if page.file.src_uri == "tutorials/researcher.md":
        drawing = f"\n![What is kept, against bytes and microseconds an item](../{CURVE})\n"
        markdown = markdown.replace("\n## Next\n", f"{drawing}\n## Next\n")
    return _LINK.sub(lambda link: _inside(link, folder, files), markdown)


def curve() -> bytes:
    """Draw quality against cost of the methods on digits, from the committed figures."""
    results = read_results(ROOT / "bench" / "results" / "compare-digits-core.json")
    return draw_costs(cost_points(results), "Quality and cost on digits")


def start() -> str:
    """Return the landing page: README.md with the links of the site, and buttons."""
    text = (ROOT / "README.md").read_text("utf-8")
    before, picture, after = re.sub(r"\]\(docs/", "](", text).partition("\n![")
    return f"---\nhide: [navigation]\n---\n{before}{_BUTTONS}{picture}{after}"


def _inside(link: re.Match[str], folder: Path, files: Files) -> str:
    target = (ROOT / "docs" / folder / link["to"]).resolve()
    if target.is_relative_to(ROOT / "docs") and (
        str(target.relative_to(ROOT / "docs")) in files.src_uris
    ):
        return link[0]
    file = target if target.exists() else ROOT / link["to"]
    # mkdocs reports a link that leads nowhere.
    return f"{link['text']} (`{file.relative_to(ROOT)}`)" if file.exists() else link[0]
