"""What mkdocs calls while it builds: pages that are made, and links that lead out of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from manual import commands, faces, notebooks, protocol
from nobackfill.research.results import draw, points, read_results

ROOT = Path(__file__).parents[1]
CURVE = "methods-digits.svg"
_SHIM = Path(__file__).parent / "vendored" / "iframe-worker.js"
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<to>[^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the start page, the reference and the notebooks."""
    made: dict[str, str | bytes] = {
        "index.md": start(),
        "reference/protocol.md": protocol.page(),
        "reference/commands.md": commands.page(),
        "reference/python.md": faces.page(),
        **notebooks.pages(),
        CURVE: curve(),
        f"assets/{_SHIM.name}": _SHIM.read_text("utf-8"),
    }
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Files of the repository have no address here: their names stay, as words. A notebook has its
    page, and the comparison a drawing."""
    folder = Path(page.file.src_uri).parent
    markdown = markdown.replace(".ipynb)", ".md)")
    if page.file.src_uri == "methods.md":
        drawn = f"\n![What is kept, against bytes and microseconds an item]({CURVE})\n"
        markdown = markdown.replace("\n## CIFAR-100\n", f"{drawn}\n## CIFAR-100\n")
    return _LINK.sub(lambda link: _inside(link, folder, files), markdown)


def curve() -> bytes:
    """Quality against cost of the methods on digits, from the committed figures."""
    results = read_results(ROOT / "bench" / "results" / "compare-digits-core.json")
    return draw(points(results), "Quality and cost on digits")


def start() -> str:
    """README.md, its links as the site has them."""
    text = (ROOT / "README.md").read_text("utf-8")
    return re.sub(r"\]\(docs/", "](", text)


def _inside(link: re.Match[str], folder: Path, files: Files) -> str:
    target = (ROOT / "docs" / folder / link["to"]).resolve()
    if target.is_relative_to(ROOT / "docs") and (
        str(target.relative_to(ROOT / "docs")) in files.src_uris
    ):
        return link[0]
    beside = target if target.exists() else ROOT / link["to"]
    # Where it leads nowhere, mkdocs says so.
    return f"{link['text']} (`{beside.relative_to(ROOT)}`)" if beside.exists() else link[0]
