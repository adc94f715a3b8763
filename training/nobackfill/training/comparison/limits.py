"""How much the stored vectors could give: transforms that saw what is tested. No methods, bounds.

A gallery's classes are unseen because nobody had their images when h was trained. What h loses
there may be lost in (old, psi), or for want of images; these rows tell which.
"""

from nobackfill.training.comparison.names import Name, within
from nobackfill.training.comparison.rows import TEST, Row, Shared

# Folders of the images of tested classes, made on demand below the place's own.
TESTED = "tested"
LIMIT = "limit"


def limits(shared: Shared) -> list[Row]:
    """An affine map of the tested items themselves, and, where the tested classes are unseen, ours
    trained on other images of them.
    """
    place, split, simclr = shared.place, shared.split, shared.side("simclr")

    def row(method: str, name: Name, part: str) -> Row:
        folder = place.images / TESTED if split.tested_first else place.images
        run = place.upgrade(
            f"upgrade-limit-{name}",
            shared.old,
            shared.new,
            classes=None if split.tested_first else split.new,
            side=simclr,
            method=method,
            images=folder / part,
            held_out=0.0,
        )
        return Row(within(LIMIT, name), shared.old, shared.new, (run,), simclr, limit=True)

    own = row("affine", Name.AFFINE_SIMCLR, TEST)
    if not split.tested_first:
        return [own]
    return [own, row("residual", Name.RESIDUAL_SIMCLR, "train")]
