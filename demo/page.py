"""report.html: the table, and a grid of real queries with what each gallery answered."""

import base64
import io
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from demo.ranking import class_of
from demo.summary import ROWS

# Columns of the grid, and the file of answers that each shows.
COLUMNS = {
    "before": "old-old",
    "naive swap": "new-old",
    "upgraded": "new-upgraded",
    "embedded again": "new-new",
}
HITS = 5
MOST_QUERIES = 12
# The largest side of a picture in the page, in pixels.
SIDE = 96


@dataclass(frozen=True)
class Tile:
    """A picture as a data URI, with its class."""

    picture: str
    label: str


@dataclass(frozen=True)
class Query:
    picture: str
    label: str
    columns: list[list[Tile]]


def write_report(
    out: Path, figures: dict[str, Any], seed: int, links: Mapping[str, str] | None = None
) -> Path:
    """Write OUT/report.html from the answers kept in OUT/answers; `links`: what is shown live ->
    its address."""
    answers = {
        title: json.loads((out / "answers" / f"{name}.json").read_text(encoding="utf-8"))
        for title, name in COLUMNS.items()
    }
    gallery = out / "measuring-only" / "server"
    queries = [
        Query(
            _picture(out / "data" / "queries" / query),
            class_of(query),
            [
                [Tile(_picture(gallery / hit), class_of(hit)) for hit in found[query][:HITS]]
                for found in answers.values()
            ],
        )
        for query in _drawn(list(answers["before"]), seed)
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    cells = figures["cells"]
    text = environment.get_template("page.html.j2").render(
        **figures,
        rows=ROWS,
        kept=100 * cells["new/upgraded"]["map"] / cells["new/new"]["map"],
        titles=list(COLUMNS),
        queries=queries,
        seed=seed,
        links=links or {},
    )
    page = out / "report.html"
    page.write_text(text, encoding="utf-8")
    return page


def _drawn(queries: list[str], seed: int) -> list[str]:
    """One query of each class, by seed, so that nobody picked the pretty ones."""
    shuffled = random.Random(seed).sample(queries, len(queries))  # noqa: S311 - no secret
    first = {class_of(query): query for query in shuffled}
    return [first[label] for label in sorted(first)][:MOST_QUERIES]


def _picture(path: Path) -> str:
    with Image.open(path) as image:
        image.thumbnail((SIDE, SIDE))
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
