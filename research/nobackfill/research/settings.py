"""Rows in special settings: consecutive updates, wrong labels, UniBCT's allocations, other domains;
and the limits of what stored vectors can give.

Settings exist only on the main split, which has `chain_class_counts`.

Limits are transforms that have seen the tested items, so they are bounds and not methods. Classes
of a gallery are unseen because their images were not available when h was trained. The information
that h lacks there is missing either in (old, psi) or in the training images. The limits tell which.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nobackfill.research.images import (
    SHIFTS,
    link_allocation,
    link_later_classes,
    link_share,
    link_with_label_noise,
    write_shifted_images,
)
from nobackfill.research.published import SIDE
from nobackfill.research.rows import (
    STEPS,
    TEST,
    ComparisonPlace,
    MethodRow,
    RowName,
    SharedModels,
    TrainingRun,
    setting_row_name,
)
from nobackfill.training.data.allocations import ALLOCATIONS, NEW_SHARES, SHARE

# Folders of images of tested classes, made on demand below the place's own.
TESTED = "tested"
LIMIT = "limit"


def upper_bound_rows(shared: SharedModels) -> list[MethodRow]:
    """List the limits: an affine map fitted on the tested items, and, if the tested classes are
    unseen, our method trained on other images of them.

    Nothing is trained; each row only describes its runs.

    Returns:
        One row on seen classes, two on unseen ones. Their images must be made by `prepare_images`.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    place, split, simclr = shared.place, shared.split, shared.side_encoder("simclr")

    def row(method: str, name: RowName, part: str) -> MethodRow:
        folder = place.images_folder / TESTED if split.first_tested_class else place.images_folder
        bound = shared.upgrade_row(
            setting_row_name(LIMIT, name),
            method,
            simclr,
            classes=None if split.first_tested_class else split.new_class_count,
            images=folder / part,
            held_out=0.0,
        )
        return replace(bound, is_upper_bound=True)

    own = row("affine", RowName.AFFINE_SIMCLR, TEST)
    if not split.first_tested_class:
        return [own]
    return [own, row("residual", RowName.RESIDUAL_SIMCLR, "train")]


NOISE = 0.2
# Folders of images that are made on demand, below the place's own.
FOREIGN, DISJOINT, GROWING = "foreign", "disjoint", "growing"
# The number of updates of the long chain.
HOPS = len(STEPS) + 1


def chain_rows(shared: SharedModels) -> list[MethodRow]:
    """List v1 -> v2 -> v3: FCT in two hops and directly (section 4.4), BCT and DMU in turn.

    The rows, in order: FCT with side-information in two hops, then directly, both without it, each
    hop alone with it and without, an independent v2 after v1, and BCT and DMU over both updates and
    over each. A split without chains has no such rows.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    split = shared.split
    if split.chain_class_counts is None:
        return []
    first, second = split.chain_class_counts
    place, v3 = shared.place, shared.new_model
    v1 = place.embedder("v1", classes=first, role="first")
    v2 = place.embedder("v2", classes=second, role="second")
    psi1 = place.side_encoder("v1-side", classes=first, kind="simclr")
    psi2 = place.side_encoder("v2-side", classes=second, kind="simclr")

    def hop(
        name: str, old: TrainingRun, new: TrainingRun, classes: int, **sides: Any
    ) -> TrainingRun:
        return place.upgrade(f"upgrade-{name}", old, new, classes=classes, **sides)

    third = split.new_class_count
    first_hop = hop("1-2", v1, v2, second, side=psi1, new_side=psi2)
    second_hop = hop("2-3", v2, v3, third, side=psi2)
    plain = hop("1-2-none", v1, v2, second), hop("2-3-none", v2, v3, third)
    return [
        MethodRow(RowName.TWO_HOP, v1, v3, (first_hop, second_hop), psi1),
        MethodRow(RowName.DIRECT, v1, v3, (hop("1-3", v1, v3, third, side=psi1),), psi1),
        MethodRow(RowName.TWO_HOP_NONE, v1, v3, plain),
        MethodRow("direct_none", v1, v3, (hop("1-3-none", v1, v3, third),)),
        MethodRow("first_hop", v1, v2, (first_hop,), psi1),
        MethodRow("second_hop", v2, v3, (second_hop,), psi2),
        MethodRow("first_hop_none", v1, v2, plain[:1]),
        MethodRow("second_hop_none", v2, v3, plain[1:]),
        MethodRow("independent_first_hop", v1, v2),
        *(
            row
            for method in ("bct", "dmu")
            for row in _trained_in_a_row(shared, method, v1, second)
        ),
    ]


def _trained_in_a_row(
    shared: SharedModels, method: str, v1: TrainingRun, second_count: int
) -> list[MethodRow]:
    """Describe phi_3, compatible with phi_2, which is compatible with phi_1: both updates, then
    each alone (BCT Table 4). DMU's gallery is migrated by psi_2 and then psi_3 (its Figure 3)."""
    place = shared.place
    options = {"hidden_dim": place.preset.dmu_hidden_dim} if method == "dmu" else {}
    recipe: dict[str, Any] = {"method": method, "options": options}
    second = place.embedder(f"{method}-v2", classes=second_count, role="second", old=v1, **recipe)
    third = place.embedder(f"{method}-v3", role="new", old=second, **recipe)
    updates = {
        "chain": (v1, third, (second, third)),
        "first_hop": (v1, second, (second,)),
        "second_hop": (second, third, (third,)),
    }
    return [
        MethodRow(f"{method}_{name}", old, new, route if method == "dmu" else ())
        for name, (old, new, route) in updates.items()
    ]


def long_chain_rows(shared: SharedModels) -> list[MethodRow]:
    """List FCT appendix H: five small updates from the old to the new classes, h of h of h.

    There is a row for each number of updates, with the side-information that g predicts, and one
    without, by increasing number. A split without chains has no such rows.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    split, place = shared.split, shared.place
    if split.chain_class_counts is None:
        return []
    classes = [
        split.old_class_count + (split.new_class_count - split.old_class_count) * hop // HOPS
        for hop in range(HOPS + 1)
    ]
    between = [
        place.embedder(f"chain-{count}", classes=count, role=role)
        for count, role in zip(classes[1:-1], STEPS, strict=True)
    ]
    models = [shared.old_model, *between, shared.new_model]
    sides = [shared.side_encoder("simclr")]
    for count in classes[1:-1]:
        side = place.side_encoder(f"chain-side-{count}", classes=count, kind="simclr")
        sides.append(side)
    route: tuple[TrainingRun, ...] = ()
    plain: tuple[TrainingRun, ...] = ()
    rows = []
    for hop in range(HOPS):
        old, new, count = models[hop], models[hop + 1], classes[hop + 1]
        name = f"upgrade-chain-{count}"
        # The last update needs no side-information for a next one.
        new_side = None if hop + 1 == HOPS else sides[hop + 1]
        route += (place.upgrade(name, old, new, classes=count, side=sides[hop], new_side=new_side),)
        plain += (place.upgrade(f"{name}-none", old, new, classes=count),)
        rows += [
            MethodRow(
                setting_row_name(RowName.LONG_CHAIN, hop + 1), models[0], new, route, sides[0]
            ),
            MethodRow(setting_row_name(RowName.LONG_CHAIN_NONE, hop + 1), models[0], new, plain),
        ]
    return rows


def foreign_domain_rows(shared: SharedModels) -> list[MethodRow]:
    """List FCT appendix B: the same models in domains that none of them was trained on.

    A preset with another domain tests the models of that one (Table 9: ImageNet's on Places); other
    presets shift their own test images. A split without chains has no such rows.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
        KeyError: the `embedder` of the models' preset lacks augmentation.
    """
    if shared.split.chain_class_counts is None:
        return []
    other = _other_domain(shared)
    if other is not None:
        return [
            replace(row, name=setting_row_name(other.place.preset.name, row.name))
            for row in _by_side_information(other)
        ]
    rows = _by_side_information(shared)
    return [
        replace(row, name=setting_row_name(domain, row.name), test_folder=f"{FOREIGN}/{domain}")
        for domain in SHIFTS
        for row in rows
    ]


def _other_domain(shared: SharedModels) -> SharedModels | None:
    """Return the models of the preset's other domain, in folders of their own; None without one."""
    place, preset = shared.place, shared.place.preset.other_domain
    if preset is None:
        return None
    own = Path(SIDE).parent
    return SharedModels(
        replace(
            place,
            preset=preset,
            split=preset.splits[0],
            images_folder=place.images_folder / own,
            runs_folder=place.runs_folder / own,
        )
    )


def _by_side_information(shared: SharedModels) -> list[MethodRow]:
    """List FCT's kinds of side-information, and ours with SimCLR."""
    return [
        MethodRow(RowName.INDEPENDENT, shared.old_model, shared.new_model),
        shared.upgrade_row(RowName.FCT_NONE, "fct"),
        *(
            shared.upgrade_row(RowName(f"fct_{kind}"), "fct", shared.side_encoder(kind))
            for kind in ("autoencoder", "alternate", "simclr")
        ),
        shared.upgrade_row(RowName.RESIDUAL_SIMCLR, "residual", shared.side_encoder("simclr")),
    ]


def disjoint_class_rows(shared: SharedModels) -> list[MethodRow]:
    """List FCT appendix I: phi_new, h and the test have only classes that phi_old never saw.

    The rows are a direct search, FCT without side-information, and FCT with that of SimCLR. With
    another domain phi_old has its classes, and phi_new those of the preset (Table 14: ImageNet,
    Places). Otherwise phi_new has the preset's later classes. A split without chains has no such
    rows.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    place, split = shared.place, shared.split
    if split.chain_class_counts is None:
        return []
    other = _other_domain(shared)
    if other is not None:
        old, new, tested = other.new_model, shared.new_model, TEST
        images = place.images_folder / "train"
    else:
        old, tested = shared.old_model, f"{DISJOINT}/{TEST}"
        images = place.images_folder / DISJOINT / "train"
        new = place.embedder("disjoint-new", role="new", images=images)

    def row(name: str, side: TrainingRun | None) -> MethodRow:
        run = place.upgrade(f"upgrade-disjoint-{name}", old, new, side=side, images=images)
        return MethodRow(
            setting_row_name(DISJOINT, name), old, new, (run,), side, test_folder=tested
        )

    alone = MethodRow(setting_row_name(DISJOINT, RowName.INDEPENDENT), old, new, test_folder=tested)
    return [
        alone,
        row(RowName.FCT_NONE, None),
        row(RowName.FCT_SIMCLR, shared.side_encoder("simclr")),
    ]


def new_data_rows(shared: SharedModels) -> list[MethodRow]:
    """List LwF as in BCT Table 1: phi_new is trained only on images of classes new to phi_old.

    Row `lwf` of the comparison uses all images, as the other methods do. A split without chains has
    no such rows.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    place, split = shared.place, shared.split
    if split.chain_class_counts is None:
        return []
    images = place.images_folder / DISJOINT / "train"
    new = place.embedder(
        RowName.LWF_NEW_DATA, role="new", old=shared.old_model, images=images, method="lwf"
    )
    return [MethodRow(RowName.LWF_NEW_DATA, shared.old_model, new)]


def label_noise_rows(shared: SharedModels) -> list[MethodRow]:
    """List UniBCT's refined, then vanilla prototypes with a fifth of wrong labels in the new
    training set.

    A split without chains has no such rows.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    if shared.split.chain_class_counts is None:
        return []
    place = shared.place
    images = place.images_folder / "noisy"

    def row(name: str, prototypes: str) -> MethodRow:
        run = place.embedder(
            name,
            classes=shared.split.new_class_count,
            role="new",
            old=shared.old_model,
            images=images,
            method="unibct",
            options={"prototypes": prototypes},
        )
        return MethodRow(name, shared.old_model, run)

    return [row(RowName.NOISY_UNIBCT, "refined"), row(RowName.NOISY_UNIBCT_VANILLA, "vanilla")]


# A deeper backbone for each, of BCT Table 3, DMU's fourth scenario and UniBCT's fifth allocation.
DEEPER = {
    "resnet18": "resnet50", "resnet50": "resnet101", "resnet101": "resnet152",
    "small": "small_resnet",
}  # fmt: skip


def allocation_rows(shared: SharedModels) -> list[MethodRow]:
    """List UniBCT Table 2: five allocations, each with an independent new model and four others.

    Each training takes as many steps as one on all images would, so that fewer images do not mean
    less training. A preset without equal_steps has its own epochs, as in the paper, the deeper new
    model of `identical-data`, and two more rows of `extended-data` (Tables 3 and 4): prototypes
    without outliers, and BCT. Allocations by data share an old model, and so do those by class. A
    split without chains has no such rows.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    if shared.split.chain_class_counts is None:
        return []
    place = shared.place

    def steps(share: float) -> dict[str, Any]:
        if not place.preset.equal_steps:
            return {}
        values = {**place.preset.embedder, **place.config_changes.get("embedder", {})}
        epochs, warmup = values["epochs"], values.get("warmup_epochs", 0.0)
        return {"epochs": round(epochs / share), "warmup_epochs": warmup / share}

    methods: dict[str, tuple[str, dict[str, object]]] = {
        RowName.INDEPENDENT: ("independent", {}),
        "regress": ("regress", {}),
        "contrastive": ("contrastive", {}),
        RowName.VANILLA: ("unibct", {"prototypes": "vanilla"}),
        RowName.REFINED: ("unibct", {}),
    }
    more: dict[str, tuple[str, dict[str, object]]] = {
        "drop": ("unibct", {"prototypes": "drop"}),
        "bct": ("bct", {}),
    }
    rows = []
    for allocation in ALLOCATIONS:
        images = place.images_folder / allocation
        as_printed = not place.preset.equal_steps
        backbone = place.preset.embedder.get("backbone")
        deeper: dict[str, Any] = (
            {"backbone": DEEPER[backbone]}
            if as_printed and allocation == "identical-data" and backbone in DEEPER
            else {}
        )
        kind = "class" if allocation.endswith("class") else "data"
        # Allocations by data share an old training set, and so do allocations by class.
        old = place.embedder(
            f"old-{kind}",
            role="old",
            images=place.images_folder / f"open-{kind}" / "old",
            **steps(SHARE),
        )
        wanted = methods | (more if as_printed and allocation == "extended-data" else {})
        for name, (method, options) in wanted.items():
            new = place.embedder(
                f"{allocation}-{name}",
                role="new",
                old=None if method == "independent" else old,
                images=images / "new",
                method=method,
                options=options,
                **deeper,
                **steps(NEW_SHARES[allocation]),
            )
            rows.append(MethodRow(setting_row_name(allocation, name), old, new))
    return rows


SCENARIOS = ("extended-data", "open-data", "extended-class")


def scenario_rows(shared: SharedModels) -> list[MethodRow]:
    """List DMU Table 1: an independent new model, BCT and DMU in four scenarios.

    30 % of the data to all of it, to the other 70 %, 30 % of the classes to all, and 30 % of the
    data to all by a deeper network; after a ResNet50 also by Swin (Table 11). Every training has
    the preset's epochs, as in the paper. A split without chains has no such rows, and a backbone
    that DEEPER lacks no deeper scenario.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
        KeyError: the preset's `embedder` lacks a backbone.
    """
    if shared.split.chain_class_counts is None:
        return []
    place = shared.place
    backbone = place.preset.embedder["backbone"]
    settings: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in SCENARIOS}
    if backbone in DEEPER:
        settings["deeper"] = ("extended-data", {"backbone": DEEPER[backbone]})
    if backbone == "resnet50":
        settings["swin"] = ("extended-data", {"backbone": "swin_t"})
    rows = []
    for setting, (allocation, values) in settings.items():
        kind = "class" if allocation.endswith("class") else "data"
        images = place.images_folder / f"open-{kind}" / "old"
        old = place.embedder(f"scenario-old-{kind}", role="old", images=images)
        for method in ("independent", "bct_sys", "dmu"):
            new = place.embedder(
                f"scenario-{setting}-{method}",
                role="new",
                old=None if method == "independent" else old,
                images=place.images_folder / allocation / "new",
                method=method,
                options={"hidden_dim": place.preset.dmu_hidden_dim} if method == "dmu" else {},
                **values,
            )
            name = setting_row_name(f"scenario-{setting}", method)
            rows.append(MethodRow(name, old, new, (new,) if method == "dmu" else ()))
    return rows


def growing_data_rows(shared: SharedModels) -> list[MethodRow]:
    """List DMU Table 6: models of 25, 50 and 75 % of each class's images, updated in a row.

    Rows `growing-50:METHOD` and `growing-75:METHOD` search the gallery of the 25 %. A compatible
    model is trained with the generation before it as the old one, and DMU's gallery passes psi of
    every generation. Every training has the preset's epochs.

    Nothing is trained; each row only describes its runs.

    Raises:
        ConfigurationError: a file of the preset in configs/ is missing or invalid.
    """
    place = shared.place

    def model(share: int, name: str, role: str, **values: Any) -> TrainingRun:
        images = place.images_folder / GROWING / str(share)
        return place.embedder(f"growing-{share}-{name}", role=role, images=images, **values)

    first = model(25, "old", "first")
    rows = []
    for method in ("independent", "bct_sys", "dmu"):
        previous: TrainingRun | None = None if method == "independent" else first
        options = {"hidden_dim": place.preset.dmu_hidden_dim} if method == "dmu" else {}
        route: tuple[TrainingRun, ...] = ()
        for share, role in ((50, "second"), (75, "new")):
            new = model(share, method, role, old=previous, method=method, options=options)
            if method == "dmu":
                route += (new,)
            rows.append(MethodRow(setting_row_name(f"growing-{share}", method), first, new, route))
            previous = None if previous is None else new
    return rows


def prepare_images(place: ComparisonPlace, rows: list[MethodRow]) -> None:
    """Make the missing images that `rows` are trained and tested on, below the place's images.

    Folders that exist stay as they are; whether they are complete is not checked, because each
    appears only then. They hold absolute symbolic links to the images, except shifted folders,
    which hold new pictures. After an error a folder FOLDER.part may stay. Only one process may
    prepare a place at a time.

    Args:
        place: the place of the images.
        rows: the rows; none: nothing is made.

    Raises:
        OSError: the folder cannot be written, or an image cannot be decoded. PermissionError: this
            user may not list a folder.
        ConfigurationError: the place's own images cannot be read, or a class has a single image.
        InvalidInputError: they lack class folders, or one is empty.
        ValueError: label noise is to be made from images of a single class.
        KeyError: a shifted folder has a name that is no key of SHIFTS.
    """
    for row in rows:
        folders = [run.config_values["images"] for run in row.runs]
        # The place's own tests are there; those of a protocol lie elsewhere.
        tested = [] if row.test_folder == TEST else [place.images_folder / row.test_folder]
        for images in (*folders, *tested):
            if not images.is_dir():
                _make(place, images)


def _make(place: ComparisonPlace, images: Path) -> None:
    train, test = place.images_folder / "train", place.images_folder / TEST
    group = images.parent.name
    if images.name == "noisy":
        link_with_label_noise(train, images, NOISE, place.seed)
    elif group == FOREIGN:
        write_shifted_images(test, images)
    elif group == GROWING:
        link_share(train, images, int(images.name) / 100, place.seed)
    elif group == DISJOINT:
        link_later_classes(place.images_folder / images.name, images, place.split.old_class_count)
    elif group == TESTED:
        link_later_classes(
            place.images_folder / images.name, images, place.split.first_tested_class
        )
    else:
        link_allocation(train, group, images.parent, place.seed)
