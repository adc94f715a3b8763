"""Presets of comparisons: classes, rows, and hyper-parameters from configs/."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.metrics.distances import Metric
from nobackfill.research import published
from nobackfill.research.published import PublishedSet
from nobackfill.training.config import configs_folder, load_config

Values = Mapping[str, Any]
# Keys that a row determines: models and images of a training, and its place.
_ROLE = {
    *("kind", "run_dir", "images", "classes", "seed"),
    *("old", "old_side", "new", "new_side", "side", "method"),
}


@dataclass(frozen=True)
class Split:
    """How many first classes the old and the new model learn, and which classes are tested.

    Attributes:
        name: main, which tests every class, or unseen, which tests classes that no model learned.
        old_class_count: the number of classes of the old model, counted from the first one.
        new_class_count: the number of classes of the new model.
        first_tested_class, tested_class_end: the tested classes, from the first to before the end.
        chain_class_counts: numbers of classes of the first and the second of two older models, for
            chains of updates; None: the split has no chains and no special settings.
    """

    name: str
    old_class_count: int
    new_class_count: int
    first_tested_class: int
    tested_class_end: int
    chain_class_counts: tuple[int, int] | None = None


@dataclass(frozen=True)
class WarmUp:
    """Epochs of the common warm-up of all new models, and of each model's own training after it."""

    shared_epochs: int
    own_epochs: int


@dataclass(frozen=True)
class Preset:
    """The settings of a comparison on a data set.

    Attributes:
        name: the data set, as --data takes it.
        configs_folder: the folder of configs/ with the hyper-parameters.
        splits: which classes the models learn, and which are tested.
        autoencoder_changes: keys in which an autoencoder's training differs from other side
            encoders'.
        torch_threads: CPU threads of a training; None: torch's choice.
        dmu_hidden_dim: width of DMU's psi; 1,024 in the paper.
        row_groups: groups of rows to compare without --methods.
        row_groups_for_unseen_classes: the same for the split with unseen test classes.
        test_share: share of images to test on; None: the data has a test folder.
        metric: how vectors are compared.
        warm_up: all new models start from a common warm-up, which halves the time and treats them
            alike; None: each is trained from the start.
        is_development: this is a development split for selecting options, and not a table.
        published_set: the layout and the test of a published data set; None: class folders.
        new_embedder_changes: keys in which new models differ from old ones, such as the backbone.
        upgrade_configs_folder: the folder of configs/ with side encoders and upgrades, if
            `configs_folder` has none; the image size stays that of `configs_folder`.
        other_domain: the comparison whose training images are the set's part SIDE, and whose models
            FCT's Tables 9 and 14 test on this set; None: there is none.
        equal_steps: UniBCT's allocations train for as many steps as one on all images would; false:
            for the preset's epochs, as in the paper.
    """

    name: str
    configs_folder: str
    splits: tuple[Split, ...]
    autoencoder_changes: Values
    torch_threads: int | None
    dmu_hidden_dim: int
    row_groups: tuple[str, ...]
    row_groups_for_unseen_classes: tuple[str, ...]
    test_share: float | None
    metric: Metric
    warm_up: WarmUp | None = None
    is_development: bool = False
    published_set: PublishedSet | None = None
    new_embedder_changes: Values = field(default_factory=dict)
    upgrade_configs_folder: str | None = None
    equal_steps: bool = True
    other_domain: "Preset | None" = None

    @property
    def title(self) -> str:
        """The name of the comparison's files and tables."""
        return f"{self.name}-development" if self.is_development else self.name

    @cached_property
    def embedder(self) -> Values:
        """Hyper-parameters of phi, as in YAML.

        Read from configs/ once. Keys that a row determines, such as images and seed, are left out.

        Raises:
            ConfigurationError: the file is missing or invalid.
        """
        return self._configured("embedder-1.yaml")

    @cached_property
    def side_encoder(self) -> Values:
        """Hyper-parameters of psi, as in YAML.

        Read from configs/ once. Keys that a row determines, such as images and seed, are left out.

        Raises:
            ConfigurationError: the file is missing or invalid.
        """
        return self._transform("side_encoder-1.yaml")

    @cached_property
    def upgrade(self) -> Values:
        """Hyper-parameters of h and g for all methods except ours, as in YAML.

        Read from configs/ once. Keys that a row determines, such as method and seed, are left out.

        Raises:
            ConfigurationError: the file is missing or invalid.
        """
        return self._transform("upgrade-1-2-fct.yaml")

    @cached_property
    def our_upgrade(self) -> Values:
        """Hyper-parameters of h and g for our method, the default recipe.

        Read from configs/ once. Keys that a row determines, such as method and seed, are left out.

        Raises:
            ConfigurationError: the file is missing or invalid.
        """
        return self._transform("upgrade-1-2.yaml")

    def _transform(self, file: str) -> Values:
        """Read a configuration of psi or h, which another data set may lend."""
        if self.upgrade_configs_folder is None:
            return self._configured(file)
        values = dict(self._configured(file, self.upgrade_configs_folder))
        # Pixels of another data set would be of no use here.
        values.pop("pixel_cache", None)
        if "image_size" in values:
            values["image_size"] = self.embedder["image_size"]
        return values

    def _configured(self, file: str, folder: str | None = None) -> Values:
        config = load_config(configs_folder() / (folder or self.configs_folder) / file)
        values = config.model_dump(exclude_unset=True, exclude=_ROLE)
        return values if self.torch_threads is None else values | {"threads": self.torch_threads}


_DIGITS_ROWS = (
    "bct_family",
    "dmu_family",
    "adapted",
    "stationary",
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
)
DIGITS = Preset(
    name="digits",
    configs_folder="digits-8px",
    splits=(
        Split("main", 5, 10, 0, 10, chain_class_counts=(3, 6)),
        Split("unseen", 3, 7, 7, 10),
    ),
    autoencoder_changes={"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0},
    torch_threads=1,
    dmu_hidden_dim=256,
    row_groups=_DIGITS_ROWS,
    # Groups for a split with chains have no rows on this one.
    row_groups_for_unseen_classes=tuple(name for name in _DIGITS_ROWS if name != "arcface"),
    test_share=0.4,
    metric="cosine",
)

CIFAR100_CPU = Preset(
    name="cifar100-cpu",
    configs_folder="cifar100-cpu",
    splits=(
        Split("main", 50, 100, 0, 100, chain_class_counts=(25, 50)),
        Split("unseen", 40, 80, 80, 100),
    ),
    # FCT D.4.2.
    autoencoder_changes={"optimizer": "adam", "lr": 3e-4, "weight_decay": 0.0},
    # One process per core with one thread each: twice as fast here as several threads.
    torch_threads=1,
    dmu_hidden_dim=1024,
    row_groups=("core",),
    row_groups_for_unseen_classes=("core",),
    test_share=None,
    metric="cosine",
    # A long common part, so that the independent model is no weak bound; it is trained only once.
    warm_up=WarmUp(shared_epochs=8, own_epochs=5),
)

# ResNet50-128 at 32 pixels; the schedules of FCT D.5.
CIFAR100 = replace(
    CIFAR100_CPU,
    name="cifar100",
    configs_folder="cifar100",
    metric="l2",
    warm_up=None,
    torch_threads=None,
    autoencoder_changes={**CIFAR100_CPU.autoencoder_changes, "epochs": 100, "warmup_epochs": 5},
)
# The strong regime: the network of cifar100-cpu with twice the channels, on one GPU.
CIFAR100_GPU = replace(
    CIFAR100_CPU,
    name="cifar100-gpu",
    configs_folder="cifar100-gpu",
    row_groups=("strong",),
    row_groups_for_unseen_classes=("strong",),
    warm_up=None,
)
# The protocol of FCT's public code, in which FCT, FastFill and BT2 print figures.
CIFAR100_FCT = replace(
    CIFAR100,
    name="cifar100-fct",
    configs_folder="cifar100-fct",
    splits=CIFAR100.splits[:1],
    row_groups=("public_protocol",),
)
# Data sets of the papers, with the settings that they print. Nobody trained them here.
IMAGENET = replace(
    CIFAR100,
    name="imagenet",
    configs_folder="imagenet",
    splits=(Split("main", 500, 1000, 0, 1000, chain_class_counts=(250, 500)),),
    row_groups=("public_protocol",),
    published_set=published.IMAGENET,
)
PLACES365 = replace(
    IMAGENET,
    name="places365",
    configs_folder="places365",
    splits=(Split("main", 182, 365, 0, 365, chain_class_counts=(91, 182)),),
    published_set=published.PLACES365,
    other_domain=IMAGENET,
)
VGGFACE2 = replace(
    IMAGENET,
    name="vggface2",
    configs_folder="vggface2",
    # Other people are tested than those of the training.
    splits=(Split("main", 863, 8631, 0, 500, chain_class_counts=(431, 863)),),
    row_groups=("independent", "bct", "fct_none", "fct_alternate", "fct_raw", "residual_none"),
    metric="cosine",
    published_set=published.VGGFACE2,
    new_embedder_changes={"backbone": "resnet50"},
)
GLDV2 = replace(
    IMAGENET,
    name="gldv2",
    configs_folder="gldv2",
    splits=(Split("main", 24394, 81313, 0, 0, chain_class_counts=(20328, 40656)),),
    row_groups=("scenarios",),
    metric="cosine",
    published_set=published.GLDV2,
    upgrade_configs_folder="imagenet",
    equal_steps=False,
)
IJBC = replace(
    GLDV2,
    name="ijbc",
    configs_folder="imdbface",
    splits=(Split("main", 29500, 59000, 0, 0, chain_class_counts=(14750, 29500)),),
    row_groups=(
        *("independent", "l2", "lwf_new_data", "bct", "bct_kd", "bct_sys"),
        *("variants", "bct_chain", "bct_first_hop", "bct_second_hop", "independent_first_hop"),
    ),
    published_set=published.IJBC,
)
MS1MV3 = replace(
    GLDV2,
    name="ms1mv3",
    configs_folder="ms1mv3",
    splits=(Split("main", 28029, 93431, 0, 0, chain_class_counts=(14014, 28029)),),
    row_groups=("allocations",),
    published_set=published.MS1MV3,
)
MARKET1501 = replace(
    GLDV2,
    name="market1501",
    configs_folder="market1501",
    splits=(Split("main", 375, 751, 0, 0, chain_class_counts=(187, 375)),),
    row_groups=("independent", "bct"),
    published_set=published.MARKET1501,
)
PRESETS = {
    preset.name: preset
    for preset in (
        *(DIGITS, CIFAR100_CPU, CIFAR100_GPU, CIFAR100, CIFAR100_FCT),
        *(IMAGENET, PLACES365, VGGFACE2, GLDV2, IJBC, MS1MV3, MARKET1501),
    )
}


def scale_preset(preset: Preset, class_count: int) -> Preset:
    """Return a preset whose new model learns `class_count` classes, and older ones their shares.

    Tested classes stay.

    Args:
        preset: the comparison.
        class_count: at least 4, so that every model has one.
    """

    def scaled(split: Split) -> Split:
        def share(count: int) -> int:
            return count * class_count // split.new_class_count

        chain = split.chain_class_counts
        return replace(
            split,
            old_class_count=share(split.old_class_count),
            new_class_count=class_count,
            chain_class_counts=chain and (share(chain[0]), share(chain[1])),
        )

    return replace(preset, splits=tuple(map(scaled, preset.splits)))


def folder_preset(class_count: int) -> Preset:
    """Return the comparison of a folder of class folders, whose old model learns half the classes.

    A fifth of the classes, at least three, are tested as unseen ones. 30 % of each class's images
    are test images. Other settings are those of cifar100-cpu.

    Args:
        class_count: the number of class folders.

    Raises:
        InvalidInputError: there are fewer than 10 classes; old, new and unseen need 3 each.
    """
    if class_count < 10:
        raise InvalidInputError(
            f"--data: expected a folder with at least 10 class folders to compare methods on, got "
            f"{class_count}"
        )
    unseen = max(3, class_count // 5)
    new, half = class_count - unseen, class_count // 2
    splits = (
        Split("main", half, class_count, 0, class_count, (max(2, class_count // 4), half)),
        Split("unseen", new // 2, new, new, class_count),
    )
    return replace(
        CIFAR100_CPU,
        name="folder",
        splits=splits,
        row_groups_for_unseen_classes=("core_unseen",),
        test_share=0.3,
    )


def preset_named(name: str) -> Preset:
    """Return a preset by the name of its data set, a key of PRESETS.

    Raises:
        ConfigurationError: the name is unknown; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ConfigurationError(
            f"--data: unknown data {name!r}; expected {', '.join(PRESETS)}, or an existing folder "
            "of class folders"
        )
    return PRESETS[name]
