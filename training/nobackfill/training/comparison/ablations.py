"""What FCT's h and ours gain from each of their parts: side-information, views, terms, sizes.

All of them on the old and new model that every row shares.
"""

from typing import Any

from nobackfill.training.comparison.names import Name
from nobackfill.training.comparison.presets import Values
from nobackfill.training.comparison.rows import Row, Shared

# How often an epoch of the rows `_upweighted` draws an image of a class new to the old model.
UNSEEN_COPIES = 4


def sizes(shared: Shared) -> list[Row]:
    """FCT's h against its own width (Table 11; a quarter is `fct_small`) and the size of the
    side-information, in numbers and in bits (appendix G).
    """
    preset, simclr = shared.place.preset, shared.side("simclr")
    dim, inner = preset.side_encoder["side_info_dim"], preset.upgrade["inner_dim"]
    assert isinstance(dim, int) and isinstance(inner, int)
    others = {
        Name.FCT_SIDE_QUARTER: ("simclr", dim // 4),
        "fct_side_half": ("simclr", dim // 2),
        Name.FCT_SIDE_DOUBLE: ("simclr", 2 * dim),
        "fct_bits_double": ("binary_simclr", 2 * dim),
        Name.FCT_BITS_FOURFOLD: ("binary_simclr", 4 * dim),
    }
    return [
        shared.upgrade_row(Name.FCT_SIMCLR, "fct", simclr),
        shared.upgrade_row("fct_width_half", "fct", simclr, inner_dim=inner // 2),
        shared.upgrade_row("fct_width_double", "fct", simclr, inner_dim=2 * inner),
        shared.upgrade_row(Name.FCT_BINARY_SIMCLR, "fct", shared.side("binary_simclr")),
        *(
            shared.upgrade_row(name, "fct", shared.side(kind, width))
            for name, (kind, width) in others.items()
        ),
    ]


def parts(shared: Shared) -> list[Row]:
    """Ours without one of its parts, in smaller sizes, on labels and the rivals' views; rivals on
    ours; and parts that neither has.
    """
    simclr, preset = shared.side("simclr"), shared.place.preset
    inner = preset.upgrade["inner_dim"]
    assert isinstance(inner, int)
    small = shared.upgrade_row(Name.RESIDUAL_SMALL, "residual", simclr, inner_dim=inner // 4)
    published, preset_ours = preset.upgrade, preset.ours
    upweighted = _at_equal_steps(shared, published)
    ours_upweighted = _at_equal_steps(shared, preset_ours)
    as_ours = _views_and_steps(shared, preset_ours)
    labelled = _views_and_steps(shared, published) | {"options": {"classification": 1.0}}
    return [
        shared.upgrade_row(
            Name.RESIDUAL_NO_LISTWISE, "residual", simclr, options={"listwise": 0.0}
        ),
        shared.upgrade_row(Name.RESIDUAL_ONE_VIEW, "residual", simclr, mixed_views=0),
        small,
        Row("residual_small_int8", small.old, small.new, small.route, simclr, int8=True),
        shared.upgrade_row(Name.FCT_SIMCLR_BEST, "fct", simclr, keep_best=True),
        shared.upgrade_row(Name.RESIDUAL_BEST, "residual", simclr, keep_best=True),
        shared.upgrade_row(Name.FCT_NONE_UPWEIGHTED, "fct", **upweighted),
        shared.upgrade_row(Name.FCT_SIMCLR_UPWEIGHTED, "fct", simclr, **upweighted),
        shared.upgrade_row(Name.RESIDUAL_NONE_UPWEIGHTED, "residual", **ours_upweighted),
        shared.upgrade_row(Name.RESIDUAL_UPWEIGHTED, "residual", simclr, **ours_upweighted),
        shared.upgrade_row(Name.RESIDUAL_LABELLED, "residual", simclr, **labelled),
        shared.upgrade_row(Name.RESIDUAL_THREE, "residual", simclr, options={"members": 3}),
        shared.upgrade_row(Name.RESIDUAL_CHOSEN, "residual", simclr, choose=("share",)),
        shared.upgrade_row(Name.FCT_MIXED, "fct", simclr, **as_ours),
        shared.upgrade_row(Name.AFFINE_MIXED, "affine", simclr, **as_ours),
    ]


def _views_and_steps(shared: Shared, recipe: Values) -> dict[str, Any]:
    """What a recipe shows an upgrade, and how long."""
    values = {"mixed_views": 0, **recipe, **shared.place.changes.get("upgrade", {})}
    return {key: values[key] for key in ("views", "mixed_views", "epochs", "warmup_epochs")}


def _at_equal_steps(shared: Shared, recipe: Values) -> dict[str, Any]:
    """More copies an epoch, so many fewer epochs: rivals take the same number of steps."""
    place, split = shared.place, shared.split
    values = {**recipe, **place.changes.get("upgrade", {})}
    epochs, warmup = values["epochs"], values["warmup_epochs"]
    assert isinstance(epochs, int) and isinstance(warmup, int | float)
    longer = 1 + (UNSEEN_COPIES - 1) * (split.new - split.old) / split.new
    return {
        "unseen_copies": UNSEEN_COPIES,
        "epochs": round(epochs / longer),
        "warmup_epochs": warmup / longer,
    }
