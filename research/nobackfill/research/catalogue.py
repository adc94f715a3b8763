"""The catalogue: every row of the comparison, by group.

A function for each group takes the models that rows share, and returns descriptions of rows. It
trains nothing and opens no image. Tables, sections and figures are those of the papers that
docs/papers.md lists.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nobackfill.errors import ConfigurationError
from nobackfill.research.presets import Preset, Values
from nobackfill.research.rows import (
    OUR_METHOD,
    ComparisonPlace,
    MethodRow,
    RowName,
    SharedModels,
    TrainingRun,
    setting_row_name,
)
from nobackfill.research.settings import (
    DEEPER,
    allocation_rows,
    chain_rows,
    disjoint_class_rows,
    foreign_domain_rows,
    growing_data_rows,
    label_noise_rows,
    long_chain_rows,
    new_data_rows,
    scenario_rows,
    upper_bound_rows,
)
from nobackfill.training.config import parse_config

# How often an epoch of `_upweighted` rows contains an image of a class new to the old model.
UNSEEN_COPIES = 4


def fct_size_rows(shared: SharedModels) -> list[MethodRow]:
    """List FCT with other widths of h (Table 11; a quarter is `fct_small`), and other sizes of
    side-information, in numbers and in bits (appendix G).

    Nothing is trained; each row only describes its runs. Parts of sizes are rounded down.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
        KeyError: the preset's `upgrade` lacks inner_dim.
    """
    preset, simclr = shared.place.preset, shared.side_encoder("simclr")
    dim, inner = preset.side_encoder["side_info_dim"], preset.upgrade["inner_dim"]
    others = {
        RowName.FCT_SIDE_QUARTER: ("simclr", dim // 4),
        "fct_side_half": ("simclr", dim // 2),
        RowName.FCT_SIDE_DOUBLE: ("simclr", 2 * dim),
        "fct_bits_double": ("binary_simclr", 2 * dim),
        RowName.FCT_BITS_FOURFOLD: ("binary_simclr", 4 * dim),
    }
    return [
        shared.upgrade_row(RowName.FCT_SIMCLR, "fct", simclr),
        shared.upgrade_row("fct_width_half", "fct", simclr, inner_dim=inner // 2),
        shared.upgrade_row("fct_width_double", "fct", simclr, inner_dim=2 * inner),
        shared.upgrade_row(RowName.FCT_BINARY_SIMCLR, "fct", shared.side_encoder("binary_simclr")),
        *(
            shared.upgrade_row(name, "fct", shared.side_encoder(kind, width))
            for name, (kind, width) in others.items()
        ),
    ]


def ablation_rows(shared: SharedModels) -> list[MethodRow]:
    """List our method without one of its parts, in smaller sizes, with labels and with other
    methods' views; other methods with our views; and parts that neither has.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
        KeyError: the preset's `upgrade` lacks inner_dim, or it or `our_upgrade` lacks views or
            warmup_epochs.
    """
    simclr, preset = shared.side_encoder("simclr"), shared.place.preset
    inner = preset.upgrade["inner_dim"]
    small = shared.upgrade_row(RowName.RESIDUAL_SMALL, "residual", simclr, inner_dim=inner // 4)
    published, preset_ours = preset.upgrade, preset.our_upgrade
    upweighted = _at_equal_steps(shared, published)
    ours_upweighted = _at_equal_steps(shared, preset_ours)
    as_ours = _views_and_steps(shared, preset_ours)
    labelled = _views_and_steps(shared, published) | {"options": {"classification": 1.0}}
    return [
        shared.upgrade_row(
            RowName.RESIDUAL_NO_LISTWISE, "residual", simclr, options={"listwise": 0.0}
        ),
        shared.upgrade_row(RowName.RESIDUAL_ONE_VIEW, "residual", simclr, mixed_views=0),
        small,
        replace(small, name="residual_small_int8", uses_int8=True),
        shared.upgrade_row(RowName.FCT_SIMCLR_BEST, "fct", simclr, keep_best=True),
        shared.upgrade_row(RowName.RESIDUAL_BEST, "residual", simclr, keep_best=True),
        shared.upgrade_row(RowName.FCT_NONE_UPWEIGHTED, "fct", **upweighted),
        shared.upgrade_row(RowName.FCT_SIMCLR_UPWEIGHTED, "fct", simclr, **upweighted),
        shared.upgrade_row(RowName.RESIDUAL_NONE_UPWEIGHTED, "residual", **ours_upweighted),
        shared.upgrade_row(RowName.RESIDUAL_UPWEIGHTED, "residual", simclr, **ours_upweighted),
        shared.upgrade_row(RowName.RESIDUAL_LABELLED, "residual", simclr, **labelled),
        shared.upgrade_row(RowName.RESIDUAL_THREE, "residual", simclr, options={"members": 3}),
        shared.upgrade_row(RowName.RESIDUAL_CHOSEN, "residual", simclr, choose=("share",)),
        shared.upgrade_row(RowName.RESIDUAL_INNER, "residual", shared.side_encoder("inner")),
        shared.upgrade_row(
            RowName.RESIDUAL_BOTH_VIEWS, "residual", simclr, options={"both_views": True}
        ),
        shared.upgrade_row(
            RowName.RESIDUAL_SAME_CLASS,
            "residual",
            simclr,
            options={"both_views": True, "same_class": 0.3},
        ),
        shared.upgrade_row(RowName.FCT_MIXED, "fct", simclr, **as_ours),
        shared.upgrade_row(RowName.AFFINE_MIXED, "affine", simclr, **as_ours),
    ]


def _views_and_steps(shared: SharedModels, recipe: Values) -> dict[str, Any]:
    """Return the views and epochs of a recipe."""
    values = {"mixed_views": 0, **recipe, **shared.place.config_changes.get("upgrade", {})}
    return {key: values[key] for key in ("views", "mixed_views", "epochs", "warmup_epochs")}


def _at_equal_steps(shared: SharedModels, recipe: Values) -> dict[str, Any]:
    """Return more copies per epoch with fewer epochs, so that the number of steps stays."""
    place, split = shared.place, shared.split
    values = {**recipe, **place.config_changes.get("upgrade", {})}
    epochs, warmup = values["epochs"], values["warmup_epochs"]
    longer = (
        1
        + (UNSEEN_COPIES - 1)
        * (split.new_class_count - split.old_class_count)
        / split.new_class_count
    )
    return {
        "unseen_copies": UNSEEN_COPIES,
        "epochs": round(epochs / longer),
        "warmup_epochs": warmup / longer,
    }


# Only linear layers are trained.
_TRAINING: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.0}


def adapted_model_rows(shared: SharedModels) -> list[MethodRow]:
    """List new models that adapt the independent one to the old space, and our upgrade on each.

    They are BT2, with a quarter more dimensions than the independent model (the paper's 32 and
    128), and lambda-orthogonality: searched directly, and with our upgrade from old to adapted
    space.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    dim, simclr = shared.place.preset.embedder["embedding_dim"], shared.side_encoder("simclr")
    bt2 = shared.adapted_model(RowName.BT2, "bt2", embedding_dim=dim + dim // 4, **_TRAINING)
    nearly = shared.adapted_model(RowName.LAMBDA_ORTHOGONAL, "lambda_orthogonal", **_TRAINING)
    return [
        MethodRow(RowName.BT2, shared.old_model, bt2),
        shared.upgrade_row(RowName.BT2_RESIDUAL, OUR_METHOD, simclr, new=bt2),
        MethodRow(RowName.LAMBDA_ORTHOGONAL, shared.old_model, nearly),
        shared.upgrade_row(RowName.LAMBDA_ORTHOGONAL_RESIDUAL, OUR_METHOD, simclr, new=nearly),
    ]


def d_simplex_rows(shared: SharedModels) -> list[MethodRow]:
    """List d-Simplex: old and new models that were trained apart under one fixed classifier.

    The row has an old model of its own. Its new model does not begin from the common warm-up, which
    another classifier trained.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    place = shared.place
    scale = place.preset.embedder.get("scale")
    head: dict[str, Any] = {"head": "simplex", "margin": None, "scale": scale}
    old = place.embedder("old-simplex", role="old", **head)
    new = place.embedder(RowName.D_SIMPLEX, role="new", old=old, method="d_simplex", **head)
    return [MethodRow(RowName.D_SIMPLEX, old, new)]


# Backbones of the old and of the new model, by prefix of the rows' names.
PAIRS: Mapping[str, tuple[str, str]] = {
    "resnet_to_vit": ("small_resnet", "small_vit"),
    "resnet_to_swin": ("small_resnet", "small_swin"),
    "mobilenet_to_resnet": ("small_mobilenet", "small_resnet"),
}
_TRANSFORMERS = ("small_vit", "small_swin")


def architecture_rows(shared: SharedModels) -> list[MethodRow]:
    """List pairs of different architectures: ResNet to transformers, MobileNet to ResNet.

    Each pair has the strongest compatible methods, other upgrades and ours. The networks are those
    for small images (`nobackfill.training.networks.backbones`), so that a CPU can train them. DMU's
    appendix B goes from a CNN to a transformer.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    return [row for pair in PAIRS for row in _pair(shared, pair)]


def _pair(shared: SharedModels, pair: str) -> list[MethodRow]:
    place, simclr = shared.place, shared.side_encoder("simclr")
    before, after = PAIRS[pair]
    old = place.embedder(f"old-{before}", role="old", **_settings(place, before))

    def new(name: str, **values: Any) -> TrainingRun:
        return place.embedder(name, role="new", **_settings(place, after), **values)

    def compatible(method: str, **options: Any) -> TrainingRun:
        return new(f"{pair}-{method}", old=old, method=method, options=options)

    own = new(f"new-{after}")

    def upgraded(name: str, method: str) -> MethodRow:
        return shared.upgrade_row(setting_row_name(pair, name), method, simclr, old=old, new=own)

    dmu = compatible("dmu", hidden_dim=place.preset.dmu_hidden_dim)
    return [
        MethodRow(setting_row_name(pair, RowName.INDEPENDENT), old, own),
        MethodRow(setting_row_name(pair, RowName.BCT_SYS), old, compatible("bct_sys")),
        MethodRow(setting_row_name(pair, RowName.DMU), old, dmu, (dmu,)),
        upgraded(RowName.AFFINE_SIMCLR, "affine"),
        upgraded(RowName.FCT_SIMCLR, "fct"),
        upgraded(RowName.RESIDUAL_SIMCLR, "residual"),
    ]


def _settings(place: ComparisonPlace, backbone: str) -> dict[str, Any]:
    """Return the settings of a backbone: transformers use Adam and twice the epochs.

    With the presets' settings they end below the old ResNet. Selected on a development seed of
    digits."""
    if backbone not in _TRANSFORMERS:
        return {"backbone": backbone}
    values = {**place.preset.embedder, **place.config_changes.get("embedder", {})}
    epochs, warmup = values["epochs"], values.get("warmup_epochs", 0.0)
    return {
        "backbone": backbone,
        "optimizer": "adam",
        "lr": 0.003,
        "weight_decay": 0.0,
        "epochs": 2 * epochs,
        "warmup_epochs": 2 * warmup,
    }


SIDE = "side"
BYTES = (32, 64, 128)
# Bytes per element, as `nobackfill.research.serve.stored_bytes` counts them.
OBJECTIVES: Mapping[str, float] = {
    "simclr": 4,
    "autoencoder": 4,
    "vicreg": 4,
    "distilled": 4,
    "alternate": 4,
    "binary_simclr": 1 / 8,
}


def side_information_rows(shared: SharedModels) -> list[MethodRow]:
    """List kinds of side-information by size: rows `side:OBJECTIVE_BYTES`, and `side:none`.

    Each objective has 32, 64 and 128 bytes per item. A closed-form map reads them, so that rows
    differ by the content of psi and not by the training of a network.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
        KeyError: the preset's `our_upgrade` lacks views, or its `embedder` augmentation.
    """
    return [
        _row(shared, setting_row_name(SIDE, "none")),
        *(
            _row(shared, setting_row_name(SIDE, f"{kind}_{count}"), kind, round(count / size))
            for kind, size in OBJECTIVES.items()
            for count in BYTES
        ),
    ]


def _row(shared: SharedModels, name: str, kind: str | None = None, width: int = 0) -> MethodRow:
    """Describe a row with the map `affine`, on our views."""
    ours = {
        "mixed_views": 0,
        **shared.place.preset.our_upgrade,
        **shared.place.config_changes.get("upgrade", {}),
    }
    views = {key: ours[key] for key in ("views", "mixed_views")}
    side = None if kind is None else shared.side_encoder(kind, width)
    return shared.upgrade_row(name, "affine", side, **views)


# Method and options by row.
COMPATIBLE: Mapping[str, tuple[str, Values]] = {
    "l2": ("l2", {}),
    "lwf": ("lwf", {}),
    "regress": ("regress", {}),
    "contrastive": ("contrastive", {}),
    RowName.BCT: ("bct", {}),
    RowName.BCT_KD: ("bct_kd", {}),
    RowName.BCT_SYS: ("bct_sys", {}),
    RowName.UNIBCT_VANILLA: ("unibct", {"prototypes": "vanilla"}),
    "unibct_drop": ("unibct", {"prototypes": "drop"}),
    RowName.UNIBCT: ("unibct", {}),
    "focal": ("focal", {}),
    "mixbct": ("mixbct", {}),
}
# Options of DMU by row.
DMU: Mapping[str, Values] = {
    RowName.DMU: {},
    "dmu_selective": {"forward": False},
    "dmu_forward": {"measure": "uniform"},
    "dmu_confidence": {"measure": "confidence"},
    "dmu_regression": {"regularizer": "regression"},
    # Weights that differ visibly: Eq. 9 on cosines times ArcFace's usual scale.
    "dmu_sharp": {"entropy_scale": 16.0, "weight_temperature": 0.25},
}
# The allocation of DMU Tables 3 to 8, and their rows that are options of DMU.
ABLATED = "extended-data"
_OF_TABLES = ("dmu_selective", "dmu_forward", "dmu_confidence", "dmu_regression")
VARIANTS = (RowName.BCT_WIDE, RowName.BCT_RELU, RowName.BCT_SOFTMAX_TO_COSINE)


def compatible_model_rows(shared: SharedModels) -> list[MethodRow]:
    """List independent training, BCT's and UniBCT's methods, and their baselines.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    rows = [MethodRow(RowName.INDEPENDENT, shared.old_model, shared.new_model)]
    for name, (method, options) in COMPATIBLE.items():
        rows.append(
            MethodRow(name, shared.old_model, shared.compatible_model(name, method, **options))
        )
    return rows


def dmu_rows(shared: SharedModels) -> list[MethodRow]:
    """List DMU, its ablations (Table 4), other weights (Table 3), regression (Table 7), and half
    and twice the width of psi (Table 5).

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    rows = []
    for name, options in DMU.items():
        run = shared.compatible_model(name, "dmu", **options)
        forward = options.get("forward", True) is True
        rows.append(MethodRow(name, shared.old_model, run, (run,) if forward else ()))
    width = shared.place.preset.dmu_hidden_dim
    for name, own in (("dmu_width_half", width // 2), ("dmu_width_double", 2 * width)):
        run = shared.compatible_model(name, "dmu", hidden_dim=own)
        rows.append(MethodRow(name, shared.old_model, run, (run,)))
    return rows


def dmu_ablation_rows(shared: SharedModels) -> list[MethodRow]:
    """List DMU Tables 3 to 8, from 30 % of each class's images to all: other weights (Table 3),
    parts (4), widths of psi (5), regression (7), other methods (8); and growing data (6).

    BCT by regression is DMU's regression with equal weights and without psi. A split without chains
    has no such rows.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
        KeyError: the preset's `embedder` lacks a backbone.
    """
    scenario = f"scenario-{ABLATED}"
    rows = [row for row in scenario_rows(shared) if row.name.startswith(f"{scenario}:")]
    if not rows:
        return []
    place, old = shared.place, rows[0].old_run
    width = place.preset.dmu_hidden_dim
    methods: dict[str, tuple[str, Values]] = {
        **{name: ("dmu", DMU[name]) for name in _OF_TABLES},
        "dmu_width_half": ("dmu", {"hidden_dim": width // 2}),
        "dmu_width_double": ("dmu", {"hidden_dim": 2 * width}),
        "bct_regression": (
            "dmu", {"measure": "uniform", "forward": False, "regularizer": "regression"},
        ),
        "focal": ("focal", {}),
        RowName.UNIBCT: ("unibct", {}),
    }  # fmt: skip
    for name, (method, options) in methods.items():
        psi = {"hidden_dim": width} if method == "dmu" else {}
        new = place.embedder(
            f"{scenario}-{name}",
            role="new",
            old=old,
            images=place.images_folder / ABLATED / "new",
            method=method,
            options={**psi, **options},
        )
        has_psi = method == "dmu" and options.get("forward", True) is True
        rows.append(
            MethodRow(setting_row_name(scenario, name), old, new, (new,) if has_psi else ())
        )
    return [*rows, *growing_data_rows(shared)]


def arcface_rows(shared: SharedModels) -> list[MethodRow]:
    """List FCT D.7: old and new model under ArcFace, with h's output normalised in training.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    place, simclr = shared.place, shared.side_encoder("simclr")
    scale = place.preset.embedder.get("scale")
    head: dict[str, Any] = {"head": "arcface", "margin": 0.3, "scale": scale}
    old = place.embedder("old-arcface", role="old", **head)
    new = place.embedder("new-arcface", role="new", **head)

    def row(name: str, method: str) -> MethodRow:
        name = setting_row_name("arcface", name)
        return shared.upgrade_row(name, method, simclr, old=old, new=new)

    return [
        MethodRow(setting_row_name("arcface", RowName.INDEPENDENT), old, new),
        row(RowName.AFFINE_SIMCLR, "affine"),
        row(RowName.FCT_SIMCLR, "fct"),
        row(RowName.RESIDUAL_SIMCLR, "residual"),
    ]


def bct_variant_rows(shared: SharedModels) -> list[MethodRow]:
    """List BCT Table 3: twice the dimension, and the two failures that it reports.

    A published set under the paper's head has all rows of the table, as it prints them: a deeper
    network (also in the rows of twice the dimension and of ReLU), and old models of all classes
    under a softmax with and without norms.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
        KeyError: the `embedder` of a published set lacks a backbone, or has one that DEEPER lacks.
    """
    place, preset = shared.place, shared.place.preset
    dim = preset.embedder["embedding_dim"]

    def bct(name: str, old: TrainingRun, **values: Any) -> MethodRow:
        run = place.embedder(name, role="new", old=old, method="bct", **values)
        return MethodRow(name, old, run)

    if preset.published_set is not None and preset.embedder.get("head") == "cosface":
        deeper = {"backbone": DEEPER[preset.embedder["backbone"]]}
        plain, normed = (
            place.embedder(
                f"old-all-{name}", classes=shared.split.new_class_count, role="old", **head
            )
            for name, head in (
                ("softmax", {"head": "softmax", "margin": None, "scale": None}),
                ("norm-softmax", {"margin": 0.0}),
            )
        )
        return [
            bct("bct_deeper", shared.old_model, **deeper),
            bct(RowName.BCT_WIDE, shared.old_model, embedding_dim=2 * dim, **deeper),
            bct(RowName.BCT_RELU, shared.old_model, last_nonlin=True, **deeper),
            bct("bct_norm_softmax_to_cosine", normed),
            bct(RowName.BCT_SOFTMAX_TO_COSINE, plain),
        ]
    softmax = place.embedder("old-softmax", role="old", head="softmax", margin=None, scale=None)
    return [
        bct(RowName.BCT_WIDE, shared.old_model, embedding_dim=2 * dim),
        bct(RowName.BCT_RELU, shared.old_model, last_nonlin=True),
        bct(RowName.BCT_SOFTMAX_TO_COSINE, softmax, head="cosface", margin=0.2, scale=16),
    ]


def closed_form_map_rows(shared: SharedModels) -> list[MethodRow]:
    """List closed-form maps, and the control that predicts class centres.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    simclr = shared.side_encoder("simclr")
    control = {"classes": shared.split.new_class_count}
    return [
        shared.upgrade_row("procrustes", "procrustes"),
        shared.upgrade_row("low_rank", "low_rank"),
        shared.upgrade_row(RowName.AFFINE, "affine"),
        shared.upgrade_row(RowName.AFFINE_SIMCLR, "affine", simclr),
        shared.upgrade_row("soft_prototypes", "soft_prototypes", options=control),
        shared.upgrade_row(
            RowName.SOFT_PROTOTYPES_SIMCLR, "soft_prototypes", simclr, options=control
        ),
    ]


def upgrade_method_rows(shared: SharedModels) -> list[MethodRow]:
    """List upgrades to an independent new model: variants of FCT, then other methods.

    FCT varies in its side-information, its size and its loss. A row with multi-crop is left out if
    the preset's SimCLR has small crops already, and the raw loss, if the preset's spaces have no
    unit vectors, where it is FCT's. The rows of `best` come last.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
        KeyError: the preset's `upgrade` lacks inner_dim, or its `embedder` augmentation.
    """
    place, split, simclr = shared.place, shared.split, shared.side_encoder("simclr")
    inner = place.preset.upgrade["inner_dim"]
    unlabelled = place.side_encoder("side-unlabelled", classes=split.new_class_count, kind="simclr")
    rows = [
        shared.upgrade_row(RowName.FCT_NONE, "fct"),
        *(
            shared.upgrade_row(RowName(f"fct_{kind}"), "fct", shared.side_encoder(kind))
            for kind in ("autoencoder", "alternate", "mixup", "simclr", "binary_simclr")
        ),
        shared.upgrade_row(RowName.FCT_SIMCLR_UNLABELLED, "fct", unlabelled),
        shared.upgrade_row(RowName.FCT_SIDE_ONLY, "fct", simclr, reads_embedding=False),
        _doubled(shared),
        shared.upgrade_row(RowName.FCT_SMALL, "fct", simclr, inner_dim=inner // 4),
        shared.upgrade_row(RowName.KL, "kl", simclr),
        shared.upgrade_row(RowName.REVERSED_KL, "reversed_kl", simclr),
        shared.upgrade_row(RowName.LCE, "lce", simclr),
        shared.upgrade_row(RowName.RBT, "rbt"),
        shared.upgrade_row(RowName.FASTFILL_JOINT, "fastfill", simclr, options={"joint": True}),
    ]
    # If the preset's SimCLR has small crops, the row would equal fct_simclr.
    if "small_crops" not in place.preset.side_encoder:
        crops = place.side_encoder(
            "side-multicrop", classes=split.old_class_count, kind="simclr", small_crops=2
        )
        rows.append(shared.upgrade_row(RowName.FCT_MULTICROP, "fct", crops))
    return [*rows, *_raw(shared), *best_method_rows(shared)]


def _raw(shared: SharedModels) -> list[MethodRow]:
    """List FCT by the squared L2 of raw outputs, as in its authors' code, if spaces are unit."""
    if shared.place.preset.embedder.get("head") == "softmax":
        return []
    kind = shared.place.preset.side_encoder.get("side_info", "simclr")
    side = shared.side_encoder(kind)
    return [shared.upgrade_row(RowName.FCT_RAW, "fct", side, options={"raw": True})]


# Old networks of FCT Table 4; the paper's MobileNet is V1, which torchvision does not have.
OLD_NETWORKS = {"resnet18": "resnet18", "mobilenet": "mobilenet_v2"}


def old_network_rows(shared: SharedModels) -> list[MethodRow]:
    """List FCT Table 4: FCT from old models of other networks, and of half the dimension.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    place, simclr = shared.place, shared.side_encoder("simclr")
    dim = place.preset.embedder["embedding_dim"]
    variants: dict[str, dict[str, Any]] = {
        **{name: {"backbone": backbone} for name, backbone in OLD_NETWORKS.items()},
        "half": {"embedding_dim": dim // 2},
    }
    rows = []
    for name, values in variants.items():
        old = place.embedder(f"old-{name}", role="old", **values)
        row = shared.upgrade_row(f"old-{name}", "fct", simclr, old=old)
        rows.append(replace(row, name=setting_row_name(f"old_{name}", "fct_simclr")))
    return rows


# FCT Table 10.
EMBEDDING_SIZES = (128, 256, 512, 1024, 2048)


def embedding_size_rows(shared: SharedModels) -> list[MethodRow]:
    """List FCT Table 10: old and new models that were trained apart, by size of the embedding.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """

    def row(dim: int) -> MethodRow:
        old, new = (
            shared.place.embedder(f"{role}-dim-{dim}", role=role, embedding_dim=dim)
            for role in ("old", "new")
        )
        return MethodRow(f"embedding_{dim}", old, new)

    return [row(dim) for dim in EMBEDDING_SIZES]


def best_method_rows(shared: SharedModels) -> list[MethodRow]:
    """List FastFill and ours with and without side-information, ours after DMU, and int8.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    simclr = shared.side_encoder("simclr")
    residual = shared.upgrade_row(RowName.RESIDUAL_SIMCLR, "residual", simclr)
    dmu = shared.compatible_model(RowName.DMU, "dmu")
    return [
        shared.upgrade_row("fastfill_none", "fastfill"),
        shared.upgrade_row(RowName.FASTFILL_SIMCLR, "fastfill", simclr),
        shared.upgrade_row(RowName.RESIDUAL_NONE, "residual"),
        residual,
        replace(residual, name=RowName.RESIDUAL_INT8, uses_int8=True),
        shared.upgrade_row(RowName.DMU_RESIDUAL, OUR_METHOD, simclr, new=dmu),
    ]


def core_rows(shared: SharedModels) -> list[MethodRow]:
    """List what a machine without an accelerator compares on CIFAR-100 within hours.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    simclr = shared.side_encoder("simclr")
    names = {RowName.INDEPENDENT, RowName.BCT, RowName.BCT_SYS, RowName.UNIBCT}
    return [
        *(row for row in compatible_model_rows(shared) if row.name in names),
        *(row for row in dmu_rows(shared) if row.name == RowName.DMU),
        *closed_form_map_rows(shared),
        shared.upgrade_row(RowName.FCT_NONE, "fct"),
        shared.upgrade_row(RowName.FCT_ALTERNATE, "fct", shared.side_encoder("alternate")),
        shared.upgrade_row(RowName.FCT_SIMCLR, "fct", simclr),
        shared.upgrade_row(RowName.FCT_SIDE_ONLY, "fct", simclr, reads_embedding=False),
        *best_method_rows(shared),
    ]


def public_protocol_rows(shared: SharedModels) -> list[MethodRow]:
    """List the rows of FCT's public CIFAR-100 protocol, and ours.

    `pages.PAPER_FIGURES` has what the papers print for them.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    simclr = shared.side_encoder("simclr")
    return [
        *(
            row
            for row in compatible_model_rows(shared)
            if row.name in (RowName.INDEPENDENT, RowName.BCT)
        ),
        shared.upgrade_row(RowName.FCT_NONE, "fct"),
        shared.upgrade_row(RowName.FCT_SIMCLR, "fct", simclr),
        shared.upgrade_row("fastfill_none", "fastfill"),
        shared.upgrade_row("fastfill_joint_none", "fastfill", options={"joint": True}),
        shared.upgrade_row(RowName.RESIDUAL_NONE, "residual"),
        shared.upgrade_row(RowName.RESIDUAL_SIMCLR, "residual", simclr),
    ]


def strong_model_rows(shared: SharedModels) -> list[MethodRow]:
    """List transforms to a strong new model, and the parts of the joint recipe one by one.

    `residual_joint` has all of them: side-information of both kinds, a plain and a mixed view per
    image, a term of the image's class, and three networks distilled into one. Rows of other methods
    with the same side-information tell what it alone is worth.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
        KeyError: as in `upgrade_method_rows` and `ablation_rows`.
    """
    both = shared.side_encoder("inner_simclr")
    joint = {"both_views": True, "same_class": 0.3, "members": 3, "distilled": True}
    named = {
        RowName.INDEPENDENT,
        RowName.AFFINE_SIMCLR,
        RowName.SOFT_PROTOTYPES_SIMCLR,
        RowName.FCT_NONE,
        RowName.FCT_SIMCLR,
        RowName.FASTFILL_SIMCLR,
        RowName.FASTFILL_JOINT,
        RowName.RESIDUAL_SIMCLR,
        RowName.RESIDUAL_INNER,
        RowName.RESIDUAL_BOTH_VIEWS,
        RowName.RESIDUAL_SAME_CLASS,
    }
    rows = (
        *compatible_model_rows(shared),
        *closed_form_map_rows(shared),
        *upgrade_method_rows(shared),
        *ablation_rows(shared),
    )
    return [
        *{row.name: row for row in rows if row.name in named}.values(),
        shared.upgrade_row("affine_inner_simclr", "affine", both),
        shared.upgrade_row("fct_inner_simclr", "fct", both),
        shared.upgrade_row(RowName.RESIDUAL_INNER_SIMCLR, "residual", both),
        shared.upgrade_row(RowName.RESIDUAL_JOINT, "residual", both, options=joint),
    ]


def core_unseen_rows(shared: SharedModels) -> list[MethodRow]:
    """List the rows of `core` that need no second training of an image model.

    Nothing is trained; each row only describes its runs. They stay in the order of `core`.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    names = {
        RowName.INDEPENDENT,
        RowName.AFFINE,
        RowName.AFFINE_SIMCLR,
        RowName.SOFT_PROTOTYPES_SIMCLR,
        RowName.FCT_NONE,
        RowName.FCT_SIMCLR,
        RowName.FASTFILL_SIMCLR,
        RowName.RESIDUAL_SIMCLR,
    }
    return [row for row in core_rows(shared) if row.name in names]


def core_unseen_compatible_rows(shared: SharedModels) -> list[MethodRow]:
    """List the compatible new models of `core`, which `core_unseen_rows` omits.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    names = {RowName.BCT, RowName.BCT_SYS, RowName.UNIBCT, RowName.DMU}
    return [row for row in core_rows(shared) if row.name in names]


def _doubled(shared: SharedModels) -> MethodRow:
    """Describe FCT A.1: the old embedding enlarged by the size of the side-information."""
    preset = shared.place.preset
    dim = preset.embedder["embedding_dim"] + preset.side_encoder["side_info_dim"]
    old = shared.place.embedder("old-doubled", role="old", embedding_dim=dim)
    return shared.upgrade_row(RowName.FCT_DOUBLED, "fct", old=old)


GROUPS: dict[str, Callable[[SharedModels], list[MethodRow]]] = {
    "core": core_rows,
    "public_protocol": public_protocol_rows,
    "strong": strong_model_rows,
    "core_unseen": core_unseen_rows,
    "core_unseen_compatible": core_unseen_compatible_rows,
    "bct_family": compatible_model_rows,
    "dmu_family": dmu_rows,
    "adapted": adapted_model_rows,
    "stationary": d_simplex_rows,
    "variants": bct_variant_rows,
    "new_data": new_data_rows,
    "arcface": arcface_rows,
    "architectures": architecture_rows,
    "maps": closed_form_map_rows,
    "transforms": upgrade_method_rows,
    "chains": chain_rows,
    "noise": label_noise_rows,
    "allocations": allocation_rows,
    "long_chain": long_chain_rows,
    "foreign": foreign_domain_rows,
    "disjoint": disjoint_class_rows,
    "side_information": side_information_rows,
    "sizes": fct_size_rows,
    "embedding_sizes": embedding_size_rows,
    "old_networks": old_network_rows,
    "scenarios": scenario_rows,
    "ablations": dmu_ablation_rows,
    "parts": ablation_rows,
    "limits": upper_bound_rows,
}


def list_rows(place: ComparisonPlace, names: Sequence[str]) -> list[MethodRow]:
    """Return the rows of groups and methods, each once, in the catalogue's order.

    All groups are described, also those that no name requests.

    Args:
        place: the seed and split of the rows.
        names: names of groups and of rows, in any order; none: no row. On a split without chains an
            unknown name is ignored, because some rows exist only on the main split.

    Returns:
        Descriptions of rows; nothing is trained. If several rows have one name, the first group's
        counts.

    Raises:
        ConfigurationError: on the main split, a name is neither a group nor a method; or a file of
            the preset in configs/ is missing or invalid.
        KeyError: the preset's settings lack a key that a group reads, such as inner_dim.
    """
    shared = SharedModels(place)
    groups = {name: make(shared) for name, make in GROUPS.items()}
    known = {row.name for rows in groups.values() for row in rows}
    unknown = [name for name in names if name not in GROUPS and name not in known]
    # Chains and allocations exist only on the main split.
    if unknown and place.split.chain_class_counts is not None:
        raise ConfigurationError(
            f"--methods, --once: unknown method {unknown[0]!r}; expected a group ("
            f"{', '.join(GROUPS)}) or a method ({', '.join(sorted(known))})"
        )
    by_name: dict[str, MethodRow] = {}
    for group, rows in groups.items():
        for row in rows:
            if group in names or row.name in names:
                by_name.setdefault(row.name, row)
    return list(by_name.values())


def digest_of_rows(preset: Preset, rows: Mapping[str, Iterable[str]]) -> str:
    """Return the SHA-256 of the configurations behind rows, in hex, without places and seeds.

    The order of the names does not count. Nothing is trained. Keys that a row does not set do not
    count, so a changed default leaves the digest.

    Args:
        preset: the comparison.
        rows: names of rows by split; a split without names adds nothing, and unknown splits are
            ignored.

    Raises:
        ConfigurationError: the main split's catalogue does not have a row (any more), or a row's
            configuration or a file of the preset is invalid. Unknown rows of other splits are
            ignored.
        KeyError: the preset's settings lack a key that a group reads.
    """
    trained = {}
    for split in preset.splits:
        here = ComparisonPlace(preset, split, 0, Path("data", split.name), Path("runs", split.name))
        for row in list_rows(here, tuple(rows.get(split.name, ()))):
            for run in row.runs:
                config = parse_config(dict(run.config_values), preset.name)
                trained[run.folder] = config.model_dump(mode="json", exclude_unset=True)
    content = json.dumps([trained[folder] for folder in sorted(trained)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
