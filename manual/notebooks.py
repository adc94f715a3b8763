"""The notebooks of docs/notebooks as pages: their text, their code and what it printed."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def pages() -> dict[str, str]:
    """The pages in Markdown, by their path in the site."""
    return {f"notebooks/{path.stem}.md": page(path) for path in sorted(FOLDER.glob("*.ipynb"))}


def page(path: Path) -> str:
    """One notebook's cells in order; the name of its file below the title."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    parts = [_cell(cell) for cell in cells]
    file = f"`docs/notebooks/{path.name}`, a notebook: a test runs it as it stands."
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, file, rest.strip(), *parts[1:]]) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    printed = "".join(line for output in cell["outputs"] for line in output["text"])
    shown = f"\n\n```text\n{printed.rstrip()}\n```" if printed else ""
    return f"```python\n{source}\n```{shown}"
