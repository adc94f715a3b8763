"""Rows in settings of their own: updates in a row, wrong labels, UniBCT's allocations.

They exist on the main split alone, whose `first_of_chain` says so.
"""

from pathlib import Path

from training.allocations import ALLOCATIONS
from training.comparison.data import allocated, with_label_noise
from training.comparison.recipe import Place, Run
from training.comparison.rows import Row, Shared

NOISE = 0.2


def chains(shared: Shared) -> list[Row]:
    """v1 -> v2 -> v3: FCT in two hops and directly (section 4.4), BCT and DMU one on the other."""
    split = shared.split
    if split.first_of_chain is None or split.second_of_chain is None:
        return []
    place, v3 = shared.place, shared.new
    v1 = place.embedder("v1", classes=split.first_of_chain, role="first")
    v2 = place.embedder("v2", classes=split.second_of_chain, role="second")
    psi1 = place.side_encoder("v1-side", classes=split.first_of_chain, kind="simclr")
    psi2 = place.side_encoder("v2-side", classes=split.second_of_chain, kind="simclr")

    def hop(name: str, old: Run, new: Run, classes: int, **sides: Run) -> Run:
        return place.upgrade(f"upgrade-{name}", old, new, classes=classes, **sides)

    second, third = split.second_of_chain, split.new
    first_hop = hop("1-2", v1, v2, second, side=psi1, new_side=psi2)
    second_hop = hop("2-3", v2, v3, third, side=psi2)
    plain = hop("1-2-none", v1, v2, second), hop("2-3-none", v2, v3, third)
    return [
        Row("two_hop", v1, v3, (first_hop, second_hop), psi1),
        Row("direct", v1, v3, (hop("1-3", v1, v3, third, side=psi1),), psi1),
        Row("two_hop_none", v1, v3, plain),
        Row("direct_none", v1, v3, (hop("1-3-none", v1, v3, third),)),
        *(_trained_in_a_row(shared, method, v1) for method in ("bct", "dmu")),
    ]


def _trained_in_a_row(shared: Shared, method: str, v1: Run) -> Row:
    """phi_3, compatible with phi_2, which is compatible with phi_1 (BCT Table 4, DMU Table 6)."""
    place, split = shared.place, shared.split
    options = {"hidden_dim": place.preset.dmu_hidden_dim} if method == "dmu" else {}

    def step(name: str, classes: int | None, role: str, old: Run) -> Run:
        return place.embedder(
            name, classes=classes, role=role, old=old, method=method, options=options
        )

    second = step(f"{method}-v2", split.second_of_chain, "second", v1)
    third = step(f"{method}-v3", split.new, "new", second)
    return Row(f"{method}_chain", v1, third)


def noise(shared: Shared) -> list[Row]:
    """UniBCT's prototypes where a fifth of the new training set's labels are wrong."""
    if shared.split.first_of_chain is None:
        return []
    place = shared.place
    images = place.images / "noisy"

    def row(name: str, prototypes: str) -> Row:
        run = place.embedder(
            name,
            classes=shared.split.new,
            role="new",
            old=shared.old,
            images=images,
            method="unibct",
            options={"prototypes": prototypes},
        )
        return Row(name, shared.old, run)

    return [row("noisy_unibct", "refined"), row("noisy_unibct_vanilla", "vanilla")]


def allocations(shared: Shared) -> list[Row]:
    """UniBCT Table 2: five allocations, each with its rivals; an old and an independent new model
    of their own."""
    if shared.split.first_of_chain is None:
        return []
    place = shared.place
    methods: dict[str, tuple[str, dict[str, object]]] = {
        "independent": ("independent", {}),
        "regress": ("regress", {}),
        "contrastive": ("contrastive", {}),
        "vanilla": ("unibct", {"prototypes": "vanilla"}),
        "refined": ("unibct", {}),
    }
    rows = []
    for allocation in ALLOCATIONS:
        images = place.images / allocation
        kind = "class" if allocation.endswith("class") else "data"
        # Allocations by data share their old training set, and so do those by class.
        old = place.embedder(
            f"old-{kind}", classes=None, role="old", images=place.images / f"open-{kind}" / "old"
        )
        for name, (method, options) in methods.items():
            new = place.embedder(
                f"{allocation}-{name}",
                classes=None,
                role="new",
                old=None if method == "independent" else old,
                images=images / "new",
                method=method,
                options=options,
            )
            rows.append(Row(f"{allocation}:{name}", old, new))
    return rows


def prepare(place: Place, rows: list[Row]) -> None:
    """Make the images that `rows` train on and that are not there, from the training images."""
    train = place.images / "train"
    for row in rows:
        for run in row.runs:
            images = run.values["images"]
            assert isinstance(images, Path)
            if images.is_dir():
                continue
            if images.name == "noisy":
                with_label_noise(train, images, NOISE, place.seed)
            else:
                allocated(train, images.parent.name, images.parent, place.seed)
