"""The sizes of a comparison: which classes, networks and lengths."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.metrics.distances import Metric

Values = Mapping[str, object]


@dataclass(frozen=True)
class Split:
    """Which classes the old and the new model learn (the first so many), and which are tested.

    `first_of_chain` and `second_of_chain`: classes of two older models, for updates in a row.
    """

    name: str
    old: int
    new: int
    tested_first: int
    tested_end: int
    first_of_chain: int | None = None
    second_of_chain: int | None = None


@dataclass(frozen=True)
class Branch:
    """Epochs of the warm-up that all new models share, and of each one's own way after it."""

    shared_epochs: int
    own_epochs: int


@dataclass(frozen=True)
class Preset:
    """Everything that compare.py takes for granted about a data set."""

    name: str
    splits: tuple[Split, ...]
    # Configuration keys of each kind, as in YAML.
    embedder: Values
    side_encoder: Values
    # Keys in which an autoencoder's training differs from the other side encoders'.
    autoencoder: Values
    upgrade: Values
    # Width of DMU's psi; 1,024 in the paper.
    dmu_hidden_dim: int
    # Groups of rows that are compared where --methods says nothing.
    groups: tuple[str, ...]
    # The same for the split that tests unseen classes.
    unseen_groups: tuple[str, ...]
    # Images apart for the test, where the data has no test folder of its own.
    test_share: float | None
    # Whether each seed has its own partition into training and test images.
    partition_by_seed: bool
    metric: Metric
    # Where given, the independent and the compatible new models begin as one, which saves the half
    # of their time and treats them alike.
    branch: Branch | None = None


_DIGITS_VIEWS = {
    "rotate_degrees": 12,
    "scale": 0.15,
    "translate": 0.08,
    "shear": 0.15,
    "brightness": 0.1,
}
_PHOTO_VIEWS = {"horizontal_flip": True, "translate": 0.125}
_CONTRASTIVE_VIEWS = {
    "horizontal_flip": True,
    "crop_area": 0.2,
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.4,
    "grayscale": 0.2,
}

DIGITS = Preset(
    name="digits",
    splits=(
        Split("main", 5, 10, 0, 10, first_of_chain=3, second_of_chain=6),
        Split("unseen", 3, 7, 7, 10),
    ),
    embedder={
        "image_size": 8,
        "backbone": "small",
        "width": 16,
        "embedding_dim": 32,
        "head": "cosface",
        "margin": 0.2,
        "scale": 16,
        "epochs": 25,
        "warmup_epochs": 1,
        "batch_size": 64,
        "lr": 0.1,
        "weight_decay": 5e-4,
        "threads": 1,
        "augmentation": _DIGITS_VIEWS,
    },
    side_encoder={
        "image_size": 8,
        "backbone": "small",
        "width": 16,
        "side_info_dim": 32,
        "projection_dim": 32,
        "temperature": 0.2,
        "head": "cosface",
        "margin": 0.2,
        "scale": 16,
        "epochs": 40,
        "warmup_epochs": 2,
        "batch_size": 128,
        "lr": 0.1,
        "weight_decay": 5e-4,
        "threads": 1,
        "augmentation": {**_DIGITS_VIEWS, "contrast": 0.3, "noise": 0.05, "erase": 0.3},
    },
    autoencoder={"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0},
    upgrade={
        "epochs": 40,
        "warmup_epochs": 2,
        "batch_size": 128,
        "optimizer": "adam",
        "lr": 1e-3,
        "weight_decay": 3.0517578125e-5,
        "projection_dim": 64,
        "inner_dim": 256,
        "views": 6,
        "threads": 1,
        "augmentation": _DIGITS_VIEWS,
    },
    dmu_hidden_dim=256,
    groups=(
        "bct_family",
        "dmu_family",
        "variants",
        "maps",
        "transforms",
        "chains",
        "noise",
        "allocations",
        "long_chain",
        "foreign",
        "disjoint",
        "sizes",
        "parts",
    ),
    unseen_groups=("bct_family", "dmu_family", "variants", "maps", "transforms", "sizes", "parts"),
    test_share=0.4,
    partition_by_seed=True,
    metric="cosine",
)

CIFAR100_CPU = Preset(
    name="cifar100-cpu",
    splits=(
        Split("main", 50, 100, 0, 100, first_of_chain=25, second_of_chain=50),
        Split("unseen", 40, 80, 80, 100),
    ),
    embedder={
        "image_size": 32,
        "backbone": "small_resnet",
        "width": 24,
        "embedding_dim": 128,
        "head": "cosface",
        "margin": 0.1,
        "scale": 16,
        "epochs": 8,
        "warmup_epochs": 1,
        "batch_size": 128,
        "lr": 0.1,
        "weight_decay": 5e-4,
        "precision": "auto",
        # As many processes as cores, each with one thread: twice as fast here as sharing them.
        "threads": 1,
        "augmentation": _PHOTO_VIEWS,
    },
    side_encoder={
        "image_size": 32,
        "backbone": "small_resnet",
        "width": 24,
        "side_info_dim": 128,
        "projection_dim": 128,
        "temperature": 0.2,
        "head": "cosface",
        "margin": 0.1,
        "scale": 16,
        "epochs": 12,
        "warmup_epochs": 1,
        "batch_size": 512,
        "lr": 0.3,
        "weight_decay": 1e-4,
        "precision": "auto",
        "threads": 1,
        "augmentation": _CONTRASTIVE_VIEWS,
    },
    # FCT D.4.2.
    autoencoder={"optimizer": "adam", "lr": 3e-4, "weight_decay": 0.0},
    upgrade={
        "epochs": 30,
        "warmup_epochs": 2,
        "batch_size": 512,
        "optimizer": "adam",
        "lr": 5e-4,
        "weight_decay": 3.0517578125e-5,
        "projection_dim": 256,
        "inner_dim": 512,
        "views": 4,
        "threads": 1,
        "augmentation": _PHOTO_VIEWS,
    },
    dmu_hidden_dim=1024,
    groups=("core",),
    unseen_groups=("core_unseen",),
    test_share=None,
    partition_by_seed=False,
    metric="cosine",
    branch=Branch(shared_epochs=3, own_epochs=5),
)

# The FCT authors' protocol (fct.txt D.5): ResNet50-128, SGD with momentum .875, 100 epochs.
CIFAR100 = replace(
    CIFAR100_CPU,
    name="cifar100",
    metric="l2",
    branch=None,
    embedder={
        "image_size": 32,
        "backbone": "resnet50",
        "embedding_dim": 128,
        "head": "softmax",
        "epochs": 100,
        "warmup_epochs": 5,
        "batch_size": 256,
        "lr": 0.256,
        "momentum": 0.875,
        "weight_decay": 3.0517578125e-5,
        "precision": "bf16-mixed",
        "augmentation": _PHOTO_VIEWS,
    },
    side_encoder={
        "image_size": 32,
        "backbone": "resnet50",
        "side_info_dim": 128,
        "projection_dim": 128,
        "temperature": 0.2,
        "head": "softmax",
        "small_crops": 2,
        "epochs": 200,
        "warmup_epochs": 10,
        "batch_size": 512,
        "lr": 0.5,
        "weight_decay": 1e-4,
        "precision": "bf16-mixed",
        "augmentation": _CONTRASTIVE_VIEWS,
    },
    autoencoder={**CIFAR100_CPU.autoencoder, "epochs": 100, "warmup_epochs": 5},
    upgrade={
        **{key: value for key, value in CIFAR100_CPU.upgrade.items() if key != "threads"},
        "epochs": 80,
        "warmup_epochs": 5,
        "inner_dim": 2048,
        "views": 8,
    },
)
PRESETS = {preset.name: preset for preset in (DIGITS, CIFAR100_CPU, CIFAR100)}


def folder_preset(classes: int) -> Preset:
    """The comparison of a folder of class folders of photographs: half of the classes -> all.

    Raises InvalidInputError for fewer than 10 classes: old, new and unseen need 3, 3 and 3.
    """
    if classes < 10:
        raise InvalidInputError(
            f"expected at least 10 class folders to compare methods on, got {classes}"
        )
    unseen = max(3, classes // 5)
    new = classes - unseen
    splits = (
        Split("main", classes // 2, classes, 0, classes, max(2, classes // 4), classes // 2),
        Split("unseen", new // 2, new, new, classes),
    )
    return replace(
        CIFAR100_CPU, name="folder", splits=splits, test_share=0.3, partition_by_seed=True
    )


def preset_named(name: str) -> Preset:
    """Raises ConfigurationError for an unknown name, naming the known."""
    if name not in PRESETS:
        raise ConfigurationError(
            f"unknown data {name!r}; known: {', '.join(PRESETS)}, or a folder of class folders"
        )
    return PRESETS[name]
