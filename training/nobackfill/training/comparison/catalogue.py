"""Every row that compare.py knows, by group. A row's name is the method's name in the table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nobackfill.errors import ConfigurationError
from nobackfill.training.comparison.ablations import parts, sizes
from nobackfill.training.comparison.adapted import adapted
from nobackfill.training.comparison.architectures import architectures
from nobackfill.training.comparison.limits import limits
from nobackfill.training.comparison.names import Name, within
from nobackfill.training.comparison.presets import Values
from nobackfill.training.comparison.recipe import Place, Run
from nobackfill.training.comparison.rows import Row, Shared
from nobackfill.training.comparison.settings import (
    allocations,
    chains,
    disjoint,
    foreign,
    long_chain,
    new_data,
    noise,
)
from nobackfill.training.comparison.side_information import side_information

# Method and options by row.
COMPATIBLE: Mapping[str, tuple[str, Values]] = {
    "l2": ("l2", {}),
    "lwf": ("lwf", {}),
    "regress": ("regress", {}),
    "contrastive": ("contrastive", {}),
    Name.BCT: ("bct", {}),
    Name.BCT_KD: ("bct_kd", {}),
    Name.BCT_SYS: ("bct_sys", {}),
    Name.UNIBCT_VANILLA: ("unibct", {"prototypes": "vanilla"}),
    "unibct_drop": ("unibct", {"prototypes": "drop"}),
    Name.UNIBCT: ("unibct", {}),
    "focal": ("focal", {}),
    "mixbct": ("mixbct", {}),
}
# Options of DMU by row.
DMU: Mapping[str, Values] = {
    Name.DMU: {},
    "dmu_selective": {"forward": False},
    "dmu_forward": {"measure": "uniform"},
    "dmu_confidence": {"measure": "confidence"},
    "dmu_regression": {"regularizer": "regression"},
    # Weights that differ: what Eq. 9 gives on cosines times ArcFace's usual scale.
    "dmu_sharp": {"entropy_scale": 16.0, "weight_temperature": 0.25},
}
VARIANTS = (Name.BCT_WIDE, Name.BCT_RELU, Name.BCT_SOFTMAX_TO_COSINE)


def compatible(shared: Shared) -> list[Row]:
    """Independent training, BCT's and UniBCT's methods and their baselines."""
    rows = [Row(Name.INDEPENDENT, shared.old, shared.new)]
    for name, (method, options) in COMPATIBLE.items():
        rows.append(Row(name, shared.old, shared.compatible(name, method, **options)))
    return rows


def dmu(shared: Shared) -> list[Row]:
    """DMU, its ablations (Table 4), other weights (Table 3), regression (Table 7), half and twice
    the width of psi (Table 5).
    """
    rows = []
    for name, options in DMU.items():
        run = shared.compatible(name, "dmu", **options)
        forward = options.get("forward", True) is True
        rows.append(Row(name, shared.old, run, (run,) if forward else ()))
    width = shared.place.preset.dmu_hidden_dim
    for name, own in (("dmu_width_half", width // 2), ("dmu_width_double", 2 * width)):
        run = shared.compatible(name, "dmu", hidden_dim=own)
        rows.append(Row(name, shared.old, run, (run,)))
    return rows


def arcface(shared: Shared) -> list[Row]:
    """FCT D.7: old and new under ArcFace, whose spaces hold directions; so h's output is normalised
    in training, too.
    """
    place, split, simclr = shared.place, shared.split, shared.side("simclr")
    head: dict[str, Any] = {
        "head": "arcface",
        "margin": 0.3,
        "scale": place.preset.embedder.get("scale"),
    }
    old = place.embedder("old-arcface", classes=split.old, role="old", **head)
    new = place.embedder("new-arcface", classes=split.new, role="new", **head)

    def row(name: str, method: str) -> Row:
        run = place.upgrade(
            f"upgrade-arcface-{name}", old, new, classes=split.new, side=simclr, method=method
        )
        return Row(within("arcface", name), old, new, (run,), simclr)

    return [
        Row(within("arcface", Name.INDEPENDENT), old, new),
        row(Name.AFFINE_SIMCLR, "affine"),
        row(Name.FCT_SIMCLR, "fct"),
        row(Name.RESIDUAL_SIMCLR, "residual"),
    ]


def variants(shared: Shared) -> list[Row]:
    """BCT Table 3: twice the dimension, and the two failures that it reports."""
    place, split = shared.place, shared.split
    dim = place.preset.embedder["embedding_dim"]
    assert isinstance(dim, int)

    def bct(name: str, old: Run, **values: Any) -> Row:
        run = place.embedder(name, classes=split.new, role="new", old=old, method="bct", **values)
        return Row(name, old, run)

    softmax = place.embedder(
        "old-softmax", classes=split.old, role="old", head="softmax", margin=None, scale=None
    )
    return [
        bct(Name.BCT_WIDE, shared.old, embedding_dim=2 * dim),
        bct(Name.BCT_RELU, shared.old, last_nonlin=True),
        bct(Name.BCT_SOFTMAX_TO_COSINE, softmax, head="cosface", margin=0.2, scale=16),
    ]


def maps(shared: Shared) -> list[Row]:
    """Closed-form maps, and the control that prints class centres."""
    simclr = shared.side("simclr")
    control = {"classes": shared.split.new}
    return [
        shared.upgrade_row("procrustes", "procrustes"),
        shared.upgrade_row("low_rank", "low_rank"),
        shared.upgrade_row(Name.AFFINE, "affine"),
        shared.upgrade_row(Name.AFFINE_SIMCLR, "affine", simclr),
        shared.upgrade_row("soft_prototypes", "soft_prototypes", options=control),
        shared.upgrade_row(Name.SOFT_PROTOTYPES_SIMCLR, "soft_prototypes", simclr, options=control),
    ]


def transforms(shared: Shared) -> list[Row]:
    """FCT with every kind of side-information, other losses and sizes, rivals, and beyond."""
    place, split, simclr = shared.place, shared.split, shared.side("simclr")
    inner = place.preset.upgrade["inner_dim"]
    assert isinstance(inner, int)
    unlabelled = place.side_encoder("side-unlabelled", classes=split.new, kind="simclr")
    rows = [
        shared.upgrade_row(Name.FCT_NONE, "fct"),
        *(
            shared.upgrade_row(Name(f"fct_{kind}"), "fct", shared.side(kind))
            for kind in ("autoencoder", "alternate", "mixup", "simclr", "binary_simclr")
        ),
        shared.upgrade_row(Name.FCT_SIMCLR_UNLABELLED, "fct", unlabelled),
        shared.upgrade_row(Name.FCT_SIDE_ONLY, "fct", simclr, reads_embedding=False),
        _doubled(shared),
        shared.upgrade_row(Name.FCT_SMALL, "fct", simclr, inner_dim=inner // 4),
        shared.upgrade_row(Name.KL, "kl", simclr),
        shared.upgrade_row(Name.REVERSED_KL, "reversed_kl", simclr),
        shared.upgrade_row(Name.LCE, "lce", simclr),
        shared.upgrade_row(Name.RBT, "rbt"),
        shared.upgrade_row(Name.FASTFILL_JOINT, "fastfill", simclr, options={"joint": True}),
    ]
    # Where the preset's own SimCLR has small crops, the row would be fct_simclr again.
    if "small_crops" not in place.preset.side_encoder:
        crops = place.side_encoder(
            "side-multicrop", classes=split.old, kind="simclr", small_crops=2
        )
        rows.append(shared.upgrade_row(Name.FCT_MULTICROP, "fct", crops))
    return rows + best(shared)


def best(shared: Shared) -> list[Row]:
    """FastFill and ours, with and without side-information; DMU first and ours on top; int8."""
    simclr = shared.side("simclr")
    residual = shared.upgrade_row(Name.RESIDUAL_SIMCLR, "residual", simclr)
    return [
        shared.upgrade_row("fastfill_none", "fastfill"),
        shared.upgrade_row(Name.FASTFILL_SIMCLR, "fastfill", simclr),
        shared.upgrade_row(Name.RESIDUAL_NONE, "residual"),
        residual,
        Row(Name.RESIDUAL_INT8, residual.old, residual.new, residual.route, simclr, int8=True),
        shared.on_top(Name.DMU_RESIDUAL, shared.compatible(Name.DMU, "dmu")),
    ]


def core(shared: Shared) -> list[Row]:
    """What a machine without an accelerator compares on CIFAR-100 within hours."""
    simclr = shared.side("simclr")
    wanted = {Name.INDEPENDENT, Name.BCT, Name.BCT_SYS, Name.UNIBCT}
    return [
        *(row for row in compatible(shared) if row.name in wanted),
        *(row for row in dmu(shared) if row.name == Name.DMU),
        *maps(shared),
        shared.upgrade_row(Name.FCT_NONE, "fct"),
        shared.upgrade_row(Name.FCT_ALTERNATE, "fct", shared.side("alternate")),
        shared.upgrade_row(Name.FCT_SIMCLR, "fct", simclr),
        shared.upgrade_row(Name.FCT_SIDE_ONLY, "fct", simclr, reads_embedding=False),
        *best(shared),
    ]


def core_unseen(shared: Shared) -> list[Row]:
    """Of `core` what needs no second training of an image model."""
    wanted = {
        Name.INDEPENDENT,
        Name.AFFINE,
        Name.AFFINE_SIMCLR,
        Name.SOFT_PROTOTYPES_SIMCLR,
        Name.FCT_NONE,
        Name.FCT_SIMCLR,
        Name.FASTFILL_SIMCLR,
        Name.RESIDUAL_SIMCLR,
    }
    return [row for row in core(shared) if row.name in wanted]


def core_unseen_compatible(shared: Shared) -> list[Row]:
    """Of `core` what `core_unseen` leaves out: new models that learn beside the old one."""
    wanted = {Name.BCT, Name.BCT_SYS, Name.UNIBCT, Name.DMU}
    return [row for row in core(shared) if row.name in wanted]


def _doubled(shared: Shared) -> Row:
    """FCT A.1: as many more numbers in the old embedding as side-information would take."""
    place, split = shared.place, shared.split
    dim, side_dim = (
        place.preset.embedder["embedding_dim"],
        place.preset.side_encoder["side_info_dim"],
    )
    assert isinstance(dim, int) and isinstance(side_dim, int)
    old = place.embedder("old-doubled", classes=split.old, role="old", embedding_dim=dim + side_dim)
    run = place.upgrade(
        f"upgrade-{Name.FCT_DOUBLED}", old, shared.new, classes=split.new, method="fct"
    )
    return Row(Name.FCT_DOUBLED, old, shared.new, (run,))


GROUPS: dict[str, Callable[[Shared], list[Row]]] = {
    "core": core,
    "core_unseen": core_unseen,
    "core_unseen_compatible": core_unseen_compatible,
    "bct_family": compatible,
    "dmu_family": dmu,
    "adapted": adapted,
    "variants": variants,
    "new_data": new_data,
    "arcface": arcface,
    "architectures": architectures,
    "maps": maps,
    "transforms": transforms,
    "chains": chains,
    "noise": noise,
    "allocations": allocations,
    "long_chain": long_chain,
    "foreign": foreign,
    "disjoint": disjoint,
    "side_information": side_information,
    "sizes": sizes,
    "parts": parts,
    "limits": limits,
}


def rows_of(place: Place, wanted: Sequence[str]) -> list[Row]:
    """The rows of the named groups and methods, each once, in the catalogue's order.

    Raises ConfigurationError for a name that is neither.
    """
    shared = Shared(place)
    groups = {name: make(shared) for name, make in GROUPS.items()}
    known = {row.name for rows in groups.values() for row in rows}
    unknown = [name for name in wanted if name not in GROUPS and name not in known]
    # Chains and allocations exist on the main split alone.
    if unknown and place.split.first_of_chain is not None:
        raise ConfigurationError(
            f"unknown method {unknown[0]!r}; groups: {', '.join(GROUPS)}; methods: "
            f"{', '.join(sorted(known))}"
        )
    chosen: dict[str, Row] = {}
    for group, rows in groups.items():
        for row in rows:
            if group in wanted or row.name in wanted:
                chosen.setdefault(row.name, row)
    return list(chosen.values())
