"""The compatibility matrix as a picture: rows the query model, columns the gallery."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nobackfill.durable import write_file
from nobackfill.quality.retrieval import MatrixCell


def write_picture(cells: Sequence[MatrixCell], path: Path) -> None:
    """Draw mAP and CMC-1 of every cell into a PNG."""
    # Imported here: only this command draws, and it takes a second.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows = sorted({cell.name.query for cell in cells})
    columns = sorted({cell.name.gallery for cell in cells}, key=lambda g: (g[-1], len(g), g))
    values = np.full((len(rows), len(columns)), np.nan)
    figure = Figure(figsize=(2 + 1.5 * len(columns), 1.5 + 0.9 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for cell in cells:
        row, column = rows.index(cell.name.query), columns.index(cell.name.gallery)
        values[row, column] = cell.figures["map"]
        text = f"mAP {100 * cell.figures['map']:.1f}\nCMC-1 {100 * cell.figures['cmc1']:.1f}"
        colour = "white" if cell.figures["map"] < 0.5 else "black"
        axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), [" > ".join(map(str, gallery)) for gallery in columns])
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    axes.set_xlabel("gallery: release whose vectors are searched, and the upgrades they took")
    axes.set_ylabel("query: release")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, image.getvalue())
