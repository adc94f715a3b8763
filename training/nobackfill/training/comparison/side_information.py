"""Which side-information keeps most of what an unknown future model needs, for its bytes?

Each objective at 32, 64 and 128 bytes an item, beside the old embedding. A closed-form map reads
it, so that rows differ by what psi kept and not by how well a network was trained.
"""

from collections.abc import Mapping
from dataclasses import replace

from nobackfill.training.comparison.names import within
from nobackfill.training.comparison.rows import Row, Shared

SIDE = "side"
BYTES = (32, 64, 128)
# Bytes of a number, as `nobackfill.training.comparison.cost.stored` counts them.
OBJECTIVES: Mapping[str, float] = {
    "simclr": 4,
    "autoencoder": 4,
    "vicreg": 4,
    "distilled": 4,
    "alternate": 4,
    "binary_simclr": 1 / 8,
}


def side_information(shared: Shared) -> list[Row]:
    """Rows `side:OBJECTIVE_BYTES`, and `side:none`, the old embedding alone."""
    return [
        _row(shared, within(SIDE, "none")),
        *(
            _row(shared, within(SIDE, f"{kind}_{stored}"), kind, round(stored / size))
            for kind, size in OBJECTIVES.items()
            for stored in BYTES
        ),
    ]


def _row(shared: Shared, name: str, kind: str | None = None, width: int = 0) -> Row:
    """Through the map `affine`, on the views that ours is shown."""
    ours = {"mixed_views": 0, **shared.place.preset.ours, **shared.place.changes.get("upgrade", {})}
    views = {key: ours[key] for key in ("views", "mixed_views")}
    side = None if kind is None else shared.side(kind, width)
    row = shared.upgrade_row(name.replace(":", "-"), "affine", side, **views)
    return replace(row, name=name)
