"""`make drawings`: the SVG drawings of README.md. Figures come from bench/results/adoption.json."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from nobackfill.durable import write_file

ROOT = Path(__file__).parents[1]
WIDTH = 480
# Title in the drawing -> name of the model pair in the committed results.
PAIRS = {
    "MiniLM-L3 → MiniLM-L6, API descriptions": "L3 to L6, operations (botocore)",
    "MiniLM-L6 → MPNet, package descriptions": "L6 to mpnet, descriptions (Debian)",
}
# Names of the options in the results -> names in prose.
OPTIONS = {
    "stay": "stay",
    "query adapter": "query adapter",
    "map": "map",
    "both": "rank fusion",
    "lazily": "lazy re-embedding",
    "re-embed": "re-embed all",
}
# A page embeds the drawing as an image, so the drawing itself must follow a dark colour scheme. Its
# own background keeps it legible if a reader chooses the other scheme for the page.
STYLE = """
  .page { fill: #fff; }
  text { font: 14px system-ui, sans-serif; fill: #1c2733; }
  .title { font-weight: 600; } .soft { fill: #5b6875; font-size: 12px; }
  .bar { fill: #b9c6d3; } .chosen { fill: #0072b2; }
  .box { fill: #eef3f7; stroke: #7f93a6; } .line { stroke: #7f93a6; fill: none; stroke-width: 1.5; }
  .tip { fill: #7f93a6; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #12181f; } .box { fill: #1f2933; }
    text { fill: #e6edf3; } .soft { fill: #9fb0c0; }
    .bar { fill: #50606f; } .chosen { fill: #58a6d6; }
  }
"""


def verdict() -> str:
    """Draw R@1 of the options of two model pairs, the verdict's option in colour."""
    rows = json.loads((ROOT / "bench/results/adoption.json").read_text("utf-8"))["tables"][0][
        "rows"
    ]
    parts: list[str] = []
    top = 20
    for title, pair in PAIRS.items():
        found = [row for row in rows if row["pair"] == pair]
        parts += _options(title, found, top)
        top += 46 + 24 * len(found)
    soft = "R@1 in %: queries that find their one right item first. Blue: the verdict."
    parts.append(_text(8, top - 6, soft, "soft"))
    return _drawing(top + 6, "Known items found by each option, for two pairs of models", parts)


def _options(title: str, rows: list[Mapping[str, float | str]], top: int) -> Iterator[str]:
    yield _text(8, top, title, "title")
    for number, row in enumerate(rows):
        y = top + 12 + 24 * number
        share = float(row["R@1"])
        chosen = row["verdict"] == "named"
        yield _text(8, y + 14, OPTIONS[str(row["way"]).split(" ")[0]], "title" if chosen else "")
        yield f'<rect class="{"chosen" if chosen else "bar"}" x="166" y="{y}" ' \
              f'width="{2.6 * share:.1f}" height="18" rx="2"/>'  # fmt: skip
        yield _text(172 + 2.6 * share, y + 14, f"{share:.1f}", "title" if chosen else "")


def system() -> str:
    """Draw the way of a release from training to gateways and devices."""
    boxes = {
        "train": (8, 12, 156, "train an upgrade", "images, both models"),
        "publish": (8, 112, 156, "publish", "signed, behind a gate"),
        "gateway": (202, 112, 270, "gateway: canary, flip, roll back", "gRPC search under traffic"),
        "store": (202, 212, 270, "galleries of the server", "SQLite, PostgreSQL, Milvus"),
        "device": (8, 212, 156, "device: sync", "one file, offline"),
    }
    parts = [part for box in boxes.values() for part in _box(*box)]
    parts += [*_arrow(86, 64, 86, 108), *_arrow(164, 138, 198, 138)]
    parts += [*_arrow(86, 164, 86, 208), *_arrow(337, 164, 337, 208)]
    parts.append(_text(345, 190, "migrates vectors", "soft"))
    parts.append(_text(202, 36, "An upgrade turns old vectors and their", "soft"))
    parts.append(_text(202, 54, "side-information into vectors of the new", "soft"))
    parts.append(_text(202, 72, "space. No image is needed.", "soft"))
    return _drawing(276, "A release goes from training to a gateway and to devices", parts)


def _box(x: int, y: int, width: int, title: str, note: str) -> Iterator[str]:
    yield f'<rect class="box" x="{x}" y="{y}" width="{width}" height="52" rx="6"/>'
    yield _text(x + 10, y + 22, title, "title")
    yield _text(x + 10, y + 41, note, "soft")


def _arrow(x1: int, y1: int, x2: int, y2: int) -> Iterator[str]:
    across = x2 > x1
    tip = (
        f"{x2 - 8},{y2 - 5} {x2 - 8},{y2 + 5}" if across else f"{x2 - 5},{y2 - 8} {x2 + 5},{y2 - 8}"
    )
    yield f'<path class="line" d="M{x1} {y1}L{x2} {y2}"/>'
    yield f'<polygon class="tip" points="{x2},{y2} {tip}"/>'


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'


def _drawing(height: int, title: str, parts: list[str]) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join(
        [
            head,
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


DRAWINGS = {"docs/verdict.svg": verdict, "docs/system.svg": system}


def main() -> None:
    """Write every drawing to its place in docs/."""
    for name, draw in DRAWINGS.items():
        write_file(ROOT / name, draw().encode(), 0o644)
        print(name)


if __name__ == "__main__":
    main()
