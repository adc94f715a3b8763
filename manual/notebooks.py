"""The notebooks of docs/notebooks as pages: what they say and what they run, without outputs."""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def pages() -> dict[str, str]:
    """The pages in Markdown, by their path in the site."""
    return {f"notebooks/{path.stem}.md": page(path) for path in sorted(FOLDER.glob("*.ipynb"))}


def page(path: Path) -> str:
    """One notebook's cells in order; the name of its file below the title."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    parts = [_cell(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    file = f"`docs/notebooks/{path.name}`, a notebook: a test runs it as it stands."
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, file, rest.strip(), *parts[1:]]) + "\n"


def _cell(kind: str, source: str) -> str:
    return f"```python\n{source}\n```" if kind == "code" else source
