"""The presets of a comparison: classes, rows and, from configs/, hyper-parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.metrics.distances import Metric
from nobackfill.training.config import configs, load_config

Values = Mapping[str, object]
# What a row of the comparison decides: which models a training reads, on what, and where it lies.
_ROLE = {
    *("kind", "run_dir", "images", "classes", "seed"),
    *("old", "old_side", "new", "new_side", "side", "method"),
}


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
    # The folder of configs/ that holds the hyper-parameters.
    configs: str
    splits: tuple[Split, ...]
    # Keys in which an autoencoder's training differs from the other side encoders'.
    autoencoder: Values
    # CPU threads of a training; None: torch's own choice.
    threads: int | None
    # Width of DMU's psi; 1,024 in the paper.
    dmu_hidden_dim: int
    # Groups of rows that are compared where --methods says nothing.
    groups: tuple[str, ...]
    # The same for the split that tests unseen classes.
    unseen_groups: tuple[str, ...]
    # Images apart for the test, where the data has no test folder of its own.
    test_share: float | None
    metric: Metric
    # Where given, the independent and the compatible new models begin as one, which saves the half
    # of their time and treats them alike.
    branch: Branch | None = None
    # Whether it chooses hyper-parameters (comparison/development.py) rather than fills a table.
    development: bool = False

    @property
    def title(self) -> str:
        """What files and tables of this comparison are called."""
        return f"{self.name}-development" if self.development else self.name

    @cached_property
    def embedder(self) -> Values:
        """Hyper-parameters of phi, as in YAML."""
        return self._configured("embedder-1.yaml")

    @cached_property
    def side_encoder(self) -> Values:
        """Hyper-parameters of psi, as in YAML."""
        return self._configured("side_encoder-1.yaml")

    @cached_property
    def upgrade(self) -> Values:
        """Hyper-parameters of h and g, as in YAML, of every method but ours."""
        return self._configured("upgrade-1-2-fct.yaml")

    @cached_property
    def ours(self) -> Values:
        """Those of our h and g: the default recipe."""
        return self._configured("upgrade-1-2.yaml")

    def _configured(self, file: str) -> Values:
        config = load_config(configs() / self.configs / file)
        values = config.model_dump(exclude_unset=True, exclude=_ROLE)
        return values if self.threads is None else values | {"threads": self.threads}


DIGITS = Preset(
    name="digits",
    configs="digits-8px",
    splits=(
        Split("main", 5, 10, 0, 10, first_of_chain=3, second_of_chain=6),
        Split("unseen", 3, 7, 7, 10),
    ),
    autoencoder={"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0},
    threads=1,
    dmu_hidden_dim=256,
    groups=(
        "bct_family",
        "dmu_family",
        "adapted",
        "variants",
        "new_data",
        "arcface",
        "architectures",
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
        "limits",
    ),
    unseen_groups=(
        "bct_family",
        "dmu_family",
        "adapted",
        "variants",
        "architectures",
        "maps",
        "transforms",
        "sizes",
        "parts",
        "limits",
    ),
    test_share=0.4,
    metric="cosine",
)

CIFAR100_CPU = Preset(
    name="cifar100-cpu",
    configs="cifar100-cpu",
    splits=(
        Split("main", 50, 100, 0, 100, first_of_chain=25, second_of_chain=50),
        Split("unseen", 40, 80, 80, 100),
    ),
    # FCT D.4.2.
    autoencoder={"optimizer": "adam", "lr": 3e-4, "weight_decay": 0.0},
    # As many processes as cores, each with one thread: twice as fast here as sharing them.
    threads=1,
    dmu_hidden_dim=1024,
    groups=("core",),
    unseen_groups=("core",),
    test_share=None,
    metric="cosine",
    # The shared part is long: it is paid once, and leaves the independent model no weak bound.
    branch=Branch(shared_epochs=8, own_epochs=5),
)

# The FCT authors' protocol (fct.txt D.5).
CIFAR100 = replace(
    CIFAR100_CPU,
    name="cifar100",
    configs="cifar100",
    metric="l2",
    branch=None,
    threads=None,
    autoencoder={**CIFAR100_CPU.autoencoder, "epochs": 100, "warmup_epochs": 5},
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
        CIFAR100_CPU,
        name="folder",
        splits=splits,
        unseen_groups=("core_unseen",),
        test_share=0.3,
    )


def preset_named(name: str) -> Preset:
    """Raises ConfigurationError for an unknown name, naming the known."""
    if name not in PRESETS:
        raise ConfigurationError(
            f"unknown data {name!r}; known: {', '.join(PRESETS)}, or a folder of class folders"
        )
    return PRESETS[name]
