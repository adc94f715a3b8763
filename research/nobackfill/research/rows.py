"""The rows of a comparison's table: their names, and the trainings and models behind them.

All rows of a table share one old model, and methods differ only in what they are. A training is
described here (its configuration and its needs) and run by `ensure_trained`. Methods that compete
for one role use the same random seeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from functools import cached_property
from pathlib import Path
from typing import Any

from nobackfill.research.presets import Preset, Split, Values
from nobackfill.research.published import SIDE
from nobackfill.training.config import SideEncoderConfig, parse_config
from nobackfill.training.loop.loop import ProgressBars
from nobackfill.training.loop.training import train


class RowName(StrEnum):
    """Names of rows in the table: the member's name in small letters."""

    INDEPENDENT = auto()
    BCT = auto()
    BCT_KD = auto()
    UNIBCT_VANILLA = auto()
    UNIBCT = auto()
    BCT_SYS = auto()
    DMU = auto()
    LWF_NEW_DATA = auto()
    BCT_WIDE = auto()
    BCT_RELU = auto()
    BCT_SOFTMAX_TO_COSINE = auto()
    BCT_CHAIN = auto()
    DMU_CHAIN = auto()
    AFFINE = auto()
    AFFINE_SIMCLR = auto()
    SOFT_PROTOTYPES_SIMCLR = auto()
    FCT_NONE = auto()
    FCT_AUTOENCODER = auto()
    FCT_ALTERNATE = auto()
    FCT_MIXUP = auto()
    FCT_SIMCLR = auto()
    FCT_RAW = auto()
    FCT_BINARY_SIMCLR = auto()
    FCT_SIMCLR_UNLABELLED = auto()
    FCT_MULTICROP = auto()
    FCT_SIDE_ONLY = auto()
    FCT_DOUBLED = auto()
    FCT_SMALL = auto()
    FCT_SIDE_QUARTER = auto()
    FCT_SIDE_DOUBLE = auto()
    FCT_BITS_FOURFOLD = auto()
    FCT_SIMCLR_BEST = auto()
    FCT_NONE_UPWEIGHTED = auto()
    FCT_SIMCLR_UPWEIGHTED = auto()
    KL = auto()
    REVERSED_KL = auto()
    LCE = auto()
    RBT = auto()
    FASTFILL_SIMCLR = auto()
    FASTFILL_JOINT = auto()
    RESIDUAL_NONE = auto()
    RESIDUAL_SIMCLR = auto()
    RESIDUAL_INT8 = auto()
    RESIDUAL_SMALL = auto()
    RESIDUAL_NO_LISTWISE = auto()
    RESIDUAL_ONE_VIEW = auto()
    RESIDUAL_BEST = auto()
    RESIDUAL_LABELLED = auto()
    RESIDUAL_THREE = auto()
    RESIDUAL_CHOSEN = auto()
    RESIDUAL_INNER = auto()
    RESIDUAL_INNER_SIMCLR = auto()
    RESIDUAL_JOINT = auto()
    RESIDUAL_BOTH_VIEWS = auto()
    RESIDUAL_SAME_CLASS = auto()
    FCT_MIXED = auto()
    AFFINE_MIXED = auto()
    RESIDUAL_NONE_UPWEIGHTED = auto()
    RESIDUAL_UPWEIGHTED = auto()
    DMU_RESIDUAL = auto()
    BT2 = auto()
    BT2_RESIDUAL = auto()
    LAMBDA_ORTHOGONAL = auto()
    LAMBDA_ORTHOGONAL_RESIDUAL = auto()
    D_SIMPLEX = auto()
    DIRECT = auto()
    TWO_HOP = auto()
    TWO_HOP_NONE = auto()
    NOISY_UNIBCT = auto()
    NOISY_UNIBCT_VANILLA = auto()
    LONG_CHAIN = auto()
    LONG_CHAIN_NONE = auto()
    # Rows of UniBCT's allocations.
    VANILLA = auto()
    REFINED = auto()


# The default recipe.
OURS = RowName.RESIDUAL_SIMCLR


def setting_row_name(setting: str, row: str | int) -> str:
    """Return the name of a row in a special setting, such as a domain: "SETTING:ROW". Neither part
    is checked."""
    return f"{setting}:{row}"


# The method of the default recipe.
OUR_METHOD = "residual"
# Roles of the models between the first and the last of a long chain of updates.
STEPS = ("step1", "step2", "step3", "step4")


@dataclass(frozen=True)
class TrainingRun:
    """A training that may not have run yet.

    Attributes:
        config_values: the keys of its configuration.
        prerequisites: the trainings whose models it reads; of an upgrade the old model is first.
    """

    config_values: Values
    prerequisites: tuple["TrainingRun", ...] = ()

    @property
    def folder(self) -> Path:
        """The run folder, which exists after the training.

        Raises:
            KeyError: `config_values` lacks the key run_dir.
        """
        return Path(self.config_values["run_dir"])


@dataclass(frozen=True)
class ComparisonPlace:
    """The place of one seed and split. Its methods describe trainings, and run none.

    Attributes:
        preset: the comparison.
        split: the classes of the models.
        seed: the seed.
        images_folder: the folder with `train` and `test`.
        runs_folder: the folder of the run folders.
        config_changes: keys that replace those of the preset, by kind, such as fewer epochs in
            tests.
    """

    preset: Preset
    split: Split
    seed: int
    images_folder: Path
    runs_folder: Path
    config_changes: Mapping[str, Values] = field(default_factory=dict)

    def embedder(
        self,
        name: str,
        *,
        role: str,
        classes: int | None = None,
        old: TrainingRun | None = None,
        initial_run: TrainingRun | None = None,
        images: Path | None = None,
        **values: Any,
    ) -> TrainingRun:
        """Describe an embedder's training.

        Give each run a name of its own: `ensure_trained` refuses a second one, or takes it as
        trained.

        Args:
            name: the name of the run folder.
            role: determines the random seed, so that competing methods start alike.
            classes: the number of first classes to learn; None: all of `images`, or without them
                those of the split's old or new model, by the role.
            old: the old model of a compatible method; None: none.
            initial_run: the run whose weights the training starts from; None: random weights.
            images: the training images; None: the place's own.
            values: further keys of the configuration, which replace others.

        Returns:
            The description; nothing is trained or written, and the keys are checked at the
            training.

        Raises:
            ConfigurationError: a file of the preset in configs/ is missing or invalid.
            ValueError: the role is unknown.
            KeyError: the role has no classes of its own, and there are neither classes nor images.
        """
        if classes is None and images is None:
            split = self.split
            classes = {"old": split.old_class_count, "new": split.new_class_count}[role]
        config: dict[str, object] = {
            **self._common("embedder", self._embedder(role), name, role),
            "images": images or self.images_folder / "train",
            "classes": classes,
            **({"old": old.folder} if old else {}),
            **({"init": initial_run.folder} if initial_run else {}),
            **values,
        }
        return TrainingRun(config, tuple(run for run in (old, initial_run) if run))

    def _embedder(self, role: str) -> Values:
        new = self.preset.new_embedder_changes if role == "new" else {}
        return {**self.preset.embedder, **new}

    def side_encoder(
        self,
        name: str,
        *,
        classes: int,
        kind: str,
        embedder: TrainingRun | None = None,
        simclr: TrainingRun | None = None,
        **values: Any,
    ) -> TrainingRun:
        """Describe a side-information encoder's training.

        Give each run a name of its own: `ensure_trained` refuses a second one, or takes it as
        trained. All side-information encoders of a place have the same random seed.

        Args:
            name: the name of the run folder.
            classes: the number of first classes to train on. A published set that has images for
                this of its own trains on all of them.
            kind: the kind of side-information, a value of the key side_info.
            embedder: the embedder whose features are projected, for the kinds inner and
                inner_simclr; None: none.
            simclr: the run of kind simclr, for the kind inner_simclr; None: none.
            values: further keys of the configuration, which replace others.

        Returns:
            The description; nothing is trained or written, and the keys are checked at the
            training.

        Raises:
            ConfigurationError: a file of the preset in configs/ is missing or invalid.
            KeyError: the kind is autoencoder, and the preset's `embedder` lacks augmentation.
        """
        base, published = _side_values(self.preset, kind), self.preset.published_set
        elsewhere = (
            published is not None and SIDE in published.part_listings and kind not in _OF_OLD
        )
        return TrainingRun(
            {
                **self._common("side_encoder", base, name, "side"),
                "images": self.images_folder / (SIDE if elsewhere else "train"),
                "classes": None if elsewhere else classes,
                "side_info": kind,
                **({"embedder": embedder.folder} if embedder else {}),
                **({"simclr": simclr.folder} if simclr else {}),
                **values,
            },
            tuple(run for run in (embedder, simclr) if run),
        )

    def upgrade(
        self,
        name: str,
        old: TrainingRun,
        new: TrainingRun,
        *,
        classes: int | None = None,
        images: Path | None = None,
        side: TrainingRun | None = None,
        new_side: TrainingRun | None = None,
        **values: Any,
    ) -> TrainingRun:
        """Describe an upgrade's training on the new model's images (FCT section 3.2).

        Give each run a name of its own: `ensure_trained` refuses a second one, or takes it as
        trained. All upgrades of a place have the same random seed.

        Args:
            name: the name of the run folder.
            old: the old model.
            new: the new model.
            classes: the number of first classes to train on; None: all of `images`, or without
                them those of the split's new model.
            images: the training images; None: the place's own.
            side: the encoder of the side-information that is read; None: none is read.
            new_side: the encoder of the side-information that g predicts; None: none is written.
            values: further keys of the configuration, such as `method`, which replace others.

        Returns:
            The description; nothing is trained or written, and the keys are checked at the
            training.

        Raises:
            ConfigurationError: a file of the preset in configs/ is missing or invalid.
        """
        prerequisites = [old, new]
        base = (
            self.preset.our_upgrade if values.get("method") == OUR_METHOD else self.preset.upgrade
        )
        if classes is None and images is None:
            classes = self.split.new_class_count
        config: dict[str, object] = {
            **self._common("upgrade", base, name, "upgrade"),
            "images": images or self.images_folder / "train",
            "classes": classes,
            "old": old.folder,
            "new": new.folder,
        }
        if side is not None:
            prerequisites.append(side)
            config["old_side"] = side.folder
        if new_side is not None:
            prerequisites.append(new_side)
            config |= {"new_side": new_side.folder, "side": "maps"}
        return TrainingRun({**config, **values}, tuple(prerequisites))

    def _common(self, kind: str, base: Values, name: str, role: str) -> dict[str, object]:
        # Only append: a role's position is part of its seed.
        roles = ("old", "new", "side", "upgrade", "first", "second", "other", *STEPS)
        return {
            "kind": kind,
            **base,
            **self.config_changes.get(kind, {}),
            "run_dir": self.runs_folder / name,
            "seed": 100 * self.seed + roles.index(role),
            # The same for all, so that all models hold out the same images.
            "split_seed": 0,
        }


# Kinds of side-information that have the old model's network.
_OF_OLD = ("alternate", "mixup", "inner", "inner_simclr")


def _side_values(preset: Preset, kind: str) -> Values:
    """Return the configuration of a psi by kind.

    An alternate old model is trained like the old one (FCT section 5.1), so that only its
    randomness, and mixup, differ. An autoencoder (D.4.2) and VICReg have their own learning rates.
    """
    if kind in _OF_OLD:
        known, dim = SideEncoderConfig.model_fields, preset.side_encoder["side_info_dim"]
        old_options = {key: value for key, value in preset.embedder.items() if key in known}
        if kind not in ("alternate", "mixup"):
            old_options["last_nonlin"] = False
        return {**old_options, "side_info_dim": 2 * dim if kind == "inner_simclr" else dim}
    if kind == "autoencoder":
        views = {"augmentation": preset.embedder["augmentation"]}
        return {**preset.side_encoder, **views, **preset.autoencoder_changes}
    if kind == "vicreg":
        # Its terms have weights of 25: with SimCLR's rate the first steps would diverge.
        return {**preset.side_encoder, "optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0}
    return preset.side_encoder


def ensure_trained(run: TrainingRun, trained: set[Path]) -> None:
    """Train a run and its prerequisites, unless they are trained.

    An interrupted training is resumed. Runs that were trained before an error stay, and are in
    `trained`. A training seeds torch's default generator.

    Args:
        run: the run.
        trained: run folders that need no check; the folders that this call trains are added.

    Raises:
        CannotWriteError: a run folder cannot be written.
        ConfigurationError: a configuration is invalid, a folder belongs to another configuration,
            or images cannot be read.
        InvalidInputError: there are too few classes or images, or an image cannot be decoded.
        VerificationError: a checkpoint is damaged.
        DivergedError: a loss is not finite.
        BusyError: another process trains in the folder.
        NotFoundError: pretrained weights do not exist.
        UnavailableError: pretrained weights cannot be downloaded.
        NoEncoderError: a release of an upgrade embeds no images.
        NobackfillError: a process that reads images was killed.
        UnfitError: this program cannot use a published release of an upgrade.
        ValueError, RuntimeError: an upgrade is solved from vectors that are not finite.
        ValueError: stats.jsonl or a stored check of images is damaged.
        OSError: a checkpoint, a file of weights or the lock exists, but cannot be opened.
    """
    if run.folder in trained:
        return
    for prerequisite in run.prerequisites:
        ensure_trained(prerequisite, trained)
    train(parse_config(dict(run.config_values), str(run.folder)), ProgressBars(visible=False))
    trained.add(run.folder)


TEST = "test"


@dataclass(frozen=True)
class MethodRow:
    """A row: `new_run` queries a gallery of `old_run`, directly or migrated along `upgrade_runs`.

    Attributes:
        name: the name in the table.
        old_run, new_run: the models.
        upgrade_runs: upgrades, or embedders whose own training made one (DMU's psi); none: queries
            search the old vectors directly.
        side_run: the encoder of the side-information that is stored with the old embeddings.
        uses_int8: upgrade with the exported, quantised file.
        test_folder: the folder of the place's images that are query and gallery.
        is_upper_bound: the transform has seen the tested images, so the row is a bound and not a
            method.
    """

    name: str
    old_run: TrainingRun
    new_run: TrainingRun
    upgrade_runs: tuple[TrainingRun, ...] = ()
    side_run: TrainingRun | None = None
    uses_int8: bool = False
    test_folder: str = TEST
    is_upper_bound: bool = False

    @property
    def runs(self) -> tuple[TrainingRun, ...]:
        """The trainings of this row, each once, without their prerequisites.

        They come in the order old, new, route, side.
        """
        sides = () if self.side_run is None else (self.side_run,)
        own = (self.old_run, self.new_run, *self.upgrade_runs, *sides)
        return tuple({run.folder: run for run in own}.values())


def upper_bound_key(row: MethodRow) -> tuple[object, ...]:
    """Return a key that is equal for rows with one upper bound: images, test and new backbone.

    Another backbone has another bound; another width of the embedding is a variant (BCT Table 3).

    Raises:
        KeyError: the new model's configuration lacks its images, classes or backbone.
    """
    new = row.new_run.config_values
    return row.test_folder, new["images"], new["classes"], new["backbone"], new.get("width")


class SharedModels:
    """Describes the models that the rows of one place share, and rows with them. It trains none."""

    def __init__(self, place: ComparisonPlace) -> None:
        self.place, self.split = place, place.split

    @cached_property
    def old_model(self) -> TrainingRun:
        """The old model, phi_old.

        Raises:
            ConfigurationError: a file of the preset in configs/ is missing or invalid.
        """
        return self.place.embedder("old", role="old")

    @cached_property
    def new_model(self) -> TrainingRun:
        """The new model phi_new*, trained independently of phi_old.

        Raises:
            ConfigurationError: a file of the preset in configs/ is missing or invalid.
        """
        return self._new("new")

    @cached_property
    def _begun(self) -> TrainingRun | None:
        """The common warm-up of the new models."""
        branch = self.place.preset.warm_up
        if branch is None:
            return None
        return self.place.embedder("new-begun", role="new", epochs=branch.shared_epochs)

    def _new(
        self,
        name: str,
        old: TrainingRun | None = None,
        begun: TrainingRun | None = None,
        **values: Any,
    ) -> TrainingRun:
        branch = self.place.preset.warm_up
        if branch is not None:
            values["epochs"] = branch.own_epochs
        return self.place.embedder(
            name, role="new", old=old, initial_run=begun or self._begun, **values
        )

    def side_encoder(self, kind: str, width: int | None = None) -> TrainingRun:
        """Describe an encoder of side-information, trained on the old model's classes.

        Equal arguments describe the same run. `kind` and `width` are checked at the training.

        Args:
            kind: its kind (FCT section 5.1), a value of the key side_info.
            width: the dimension of the side-information; None: the preset's.

        Raises:
            ConfigurationError: a file of the preset in configs/ is missing or invalid.
            KeyError: the kind is autoencoder, and the preset's `embedder` lacks augmentation.
        """
        name, size = f"side-{kind}", {}
        if width is not None:
            name, size = f"{name}-{width}", {"side_info_dim": width}
        return self.place.side_encoder(
            name,
            classes=self.split.old_class_count,
            kind=kind,
            embedder=self.old_model if kind in ("inner", "inner_simclr") else None,
            simclr=self.side_encoder("simclr") if kind == "inner_simclr" else None,
            **size,
        )

    def compatible_model(self, name: str, method: str, **options: Any) -> TrainingRun:
        """Describe a new model that is trained to be compatible with phi_old.

        Args:
            name: the name of the run.
            method: the compatible method, such as bct or dmu; it is checked at the training.
            options: options of the method; dmu's hidden_dim defaults to the preset's.

        Returns:
            The run; its training uses the split's `new_class_count` classes. It starts from the
            common warm-up if the preset has one.

        Raises:
            ConfigurationError: a file of the preset in configs/ is missing or invalid.
        """
        if method == "dmu":
            options = {"hidden_dim": self.place.preset.dmu_hidden_dim, **options}
        return self._new(name, self.old_model, method=method, options=options)

    def adapted_model(self, name: str, method: str, **values: Any) -> TrainingRun:
        """Describe a new model that starts from phi_new* and is adapted to the old space.

        Args:
            name: the name of the run.
            method: bt2 or lambda_orthogonal.
            values: further keys of the configuration, which replace others.

        Returns:
            The run; nothing is trained, and the keys are checked at the training.

        Raises:
            ConfigurationError: a file of the preset in configs/ is missing or invalid.
        """
        return self._new(name, self.old_model, self.new_model, method=method, **values)

    def upgrade_row(
        self,
        name: str,
        method: str,
        side: TrainingRun | None = None,
        *,
        old: TrainingRun | None = None,
        new: TrainingRun | None = None,
        **values: Any,
    ) -> MethodRow:
        """Describe a row: an upgrade from phi_old to phi_new*, the independent new model.

        Its upgrade trains in the folder `upgrade-NAME`, with ":" as "-".

        Args:
            name: the name of the row.
            method: the upgrade method; it is checked at the training.
            side: the encoder of the side-information that it reads; None: none is read.
            old, new: models that replace phi_old and phi_new*.
            values: further keys of the configuration, which replace others.

        Raises:
            ConfigurationError: a file of the preset in configs/ is missing or invalid.
        """
        old, new = old or self.old_model, new or self.new_model
        folder = f"upgrade-{name.replace(':', '-')}"
        run = self.place.upgrade(folder, old, new, side=side, method=method, **values)
        return MethodRow(name, old, new, (run,), side)
