"""The configuration of a training: its keys, checked by pydantic, and the YAML files that hold it.

There are three kinds: `embedder` (phi), `side_encoder` (psi) and `upgrade` (h and g). Paths are
relative to the working directory.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from nobackfill.errors import ConfigurationError

HeadName = Literal["softmax", "normalized_softmax", "cosface", "arcface", "simplex"]
# Prefixes of timm's and open_clip's model names, as backbones and as weights.
TIMM, OPEN_CLIP = "timm:", "open_clip:"
# Values of red, green and blue.
Rgb = tuple[float, float, float]
Positive = Annotated[float, Field(gt=0)]
# The range of numpy's seeds.
Seed = Annotated[int, Field(ge=0, lt=2**32)]
SideInfo = Literal[
    "simclr",
    "autoencoder",
    "alternate",
    "mixup",
    "binary_simclr",
    "vicreg",
    "distilled",
    "inner",
    "inner_simclr",
]


# Keys without influence on the result: a training may resume with other values.
HOW_IMAGES_ARE_READ = {"in_memory_mib", "workers", "pixel_cache"}


class _ConfigKeys(BaseModel):
    # JSON has no infinity: a run folder with an infinite value could not be read again.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Augmentation(_ConfigKeys):
    """Augmentation of batches of images; each number is the largest change that is drawn."""

    rotate_degrees: float = Field(0.0, ge=0, le=180)
    # Log-scale: 0.2 draws scales between 1/1.2 and 1.2.
    scale: float = Field(0.0, ge=0, lt=4)
    # As a share of the image's side.
    translate: float = Field(0.0, ge=0, le=0.5)
    shear: float = Field(0.0, ge=0, le=1)
    horizontal_flip: bool = False
    # Brightness and contrast factors within 1 +- this.
    brightness: float = Field(0.0, ge=0, lt=1)
    contrast: float = Field(0.0, ge=0, lt=1)
    # Saturation factor within 1 +- this, and a share of pictures turned grey.
    saturation: float = Field(0.0, ge=0, le=1)
    grayscale: float = Field(0.0, ge=0, le=1)
    # Random resized crop: the least share of the area that is kept; 1: no crop.
    crop_area: float = Field(1.0, gt=0, le=1)
    noise: float = Field(0.0, ge=0, le=1)
    erase: float = Field(0.0, ge=0, le=1)


class _Training(_ConfigKeys):
    """Keys of every kind."""

    run_dir: Path
    # A folder of class folders of images.
    images: Path
    # Train on the first N class folders by name; absent: all.
    classes: int | None = Field(None, ge=1)
    # A file with the names of the class folders, one per line (its first word), in the order in
    # which `classes` counts; absent: all folders, by name.
    class_list: Path | None = None
    # Decoded images up to this size are held in memory. More images are read on demand, after a
    # check that all of them can be decoded.
    in_memory_mib: int = Field(2048, ge=0)
    # Processes that read images on demand; absent: one per core; 0: the training's own process.
    workers: int | None = Field(None, ge=0, le=256)
    # A folder that caches resized images, size x size x 3 bytes each; trainings may share it.
    pixel_cache: Path | None = None
    # Skip files that are no images, and list them; false: refuse the folder.
    skip_corrupt: bool = False
    # Share of each class that no model trains on; used for stopping, variance and calibration.
    held_out: float = Field(0.1, ge=0, lt=0.9)
    # Selects the held-out images; use the same seed for models that are compared.
    split_seed: Seed = 0
    seed: Seed = 0
    epochs: int = Field(ge=1)
    warmup_epochs: float = Field(0.0, ge=0)
    batch_size: int = Field(128, ge=2)
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = Field(gt=0)
    # Epochs after which the rate is a tenth, ascending (BCT, UniBCT); none: one cosine to 0.
    lr_steps: tuple[Positive, ...] = ()
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    gradient_clip: float | None = Field(None, gt=0)
    # Epochs between checkpoints (and one at the end); a killed training resumes from the last.
    checkpoint_every: int = Field(5, ge=1)
    # Steps between lines of stats.jsonl.
    log_every: int = Field(10, ge=1)
    # Values of lightning-fabric.
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    devices: int = Field(1, ge=1)
    # auto: bf16-mixed if the device multiplies in bf16, else 32-true.
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed"] = "32-true"
    # CPU threads of the training; absent: torch's choice.
    threads: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                "the key warmup_epochs: expected a number below the key epochs, which is "
                f"{self.epochs}; got {self.warmup_epochs}"
            )
        steps = list(self.lr_steps)
        if steps and (steps != sorted(set(steps)) or steps[-1] >= self.epochs):
            raise ValueError(
                "the key lr_steps: expected ascending epochs below the key epochs, which is "
                f"{self.epochs}; got {steps}"
            )
        return self


class _Network(_Training):
    """An image network: backbone and input size."""

    image_size: int = Field(ge=8, le=1024)
    backbone: str = "small"
    # Used only by networks named `small` or `small_…`, each of which counts it in its own way: see
    # `nobackfill.training.networks.backbones`.
    width: int = Field(32, ge=4, le=512)
    # A nonlinearity after the last linear layer (the papers report that this fails).
    last_nonlin: bool = False
    pooling: Literal["avg", "gem"] = "avg"
    # Pretrained weights to start from: a name that torchvision has for the backbone (DEFAULT,
    # IMAGENET1K_V2), a file (.safetensors, or a state dict of torch.save), or timm:NAME.TAG or
    # open_clip:NAME/TAG, which also selects the backbone.
    weights: str | None = None
    # Pixels in 0..1 are normalised as (x - pixel_mean) / pixel_std. Named weights bring their own
    # values unless these keys are given.
    pixel_mean: Rgb = (0.5, 0.5, 0.5)
    pixel_std: tuple[Positive, Positive, Positive] = (0.5, 0.5, 0.5)
    augmentation: Augmentation = Augmentation()

    @model_validator(mode="before")
    @classmethod
    def _public_weights(cls, values: object) -> object:
        """Select the backbone of timm's or open_clip's weights."""
        if isinstance(values, dict) and str(values.get("weights")).startswith((TIMM, OPEN_CLIP)):
            return values | {"backbone": values["weights"]}
        return values


class EmbedderConfig(_Network):
    """phi: a backbone under a classification head."""

    kind: Literal["embedder"]
    embedding_dim: int = Field(ge=2, le=4096)
    head: HeadName = "cosface"
    # None: the head's default (CosFace .4 / 32, ArcFace .3 rad / 30, normalised softmax and simplex
    # scale 20).
    margin: float | None = Field(None, ge=0)
    scale: float | None = Field(None, gt=0)
    # The share of the target that is spread over all classes; only under the head softmax.
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    # Start from the embedder of another run, for example a common warm-up; also from its head, if
    # kind and classes are the same. `bt2` and `lambda_orthogonal` freeze it.
    init: Path | None = None
    # `independent`, or a compatible method of training/methods/, which reads `old` and `options`.
    method: str = "independent"
    old: Path | None = None
    options: dict[str, str | int | float | bool] = {}

    @model_validator(mode="after")
    def _one_beginning(self) -> Self:
        if self.init is not None and self.weights is not None:
            raise ValueError(
                "expected one of the keys init and weights to start from, got both; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _smoothing_fits(self) -> Self:
        if self.label_smoothing and self.head != "softmax":
            raise ValueError(
                f"the key label_smoothing needs head: softmax, got {self.head}; set head: softmax, "
                "or leave label_smoothing out"
            )
        return self


class SideEncoderConfig(_Network):
    """psi: an encoder of side-information for future upgrades (FCT section 3.4)."""

    kind: Literal["side_encoder"]
    side_info: SideInfo = "simclr"
    side_info_dim: int = Field(ge=2, le=4096)
    # `inner`: the run of the old embedder whose pooled features psi projects, without a training.
    embedder: Path | None = None
    # `inner_simclr`: the run of kind simclr whose output is the second half of psi's.
    simclr: Path | None = None
    # SimCLR.
    temperature: float = Field(0.1, gt=0)
    # Dimension in which SimCLR and `distilled` compute their loss; VICReg uses four times as many.
    projection_dim: int = Field(128, ge=2)
    # Number of small crops besides the two full views (multi-crop); 0: none.
    small_crops: int = Field(0, ge=0, le=12)
    small_crop_area: float = Field(0.3, gt=0, le=1)
    # Head of the alternate old model and of its mixup variant.
    head: HeadName = "cosface"
    margin: float | None = Field(None, ge=0)
    scale: float | None = Field(None, gt=0)
    mixup_alpha: float = Field(0.2, gt=0)

    @model_validator(mode="after")
    def _embedder_fits(self) -> Self:
        if (self.side_info in ("inner", "inner_simclr")) != (self.embedder is not None):
            raise ValueError(
                "expected the keys side_info: inner and embedder: RUN together, or neither; got "
                f"side_info: {self.side_info} and "
                f"{'no embedder' if self.embedder is None else f'embedder: {self.embedder}'}"
            )
        if (self.side_info == "inner_simclr") != (self.simclr is not None):
            raise ValueError(
                "expected the keys side_info: inner_simclr and simclr: RUN together, or neither; "
                f"got side_info: {self.side_info} and "
                f"{'no simclr' if self.simclr is None else f'simclr: {self.simclr}'}"
            )
        if self.simclr is not None and self.side_info_dim % 2:
            raise ValueError(
                "expected an even side_info_dim, half of it for each part of inner_simclr; got "
                f"{self.side_info_dim}"
            )
        return self


class PublishedSource(_ConfigKeys):
    """A release of a publication folder, whose published models are used.

    Attributes:
        model_repo: the publication folder.
        release: the number of the release.
    """

    model_repo: Path
    release: int = Field(ge=1)


class StoredVectorFiles(_ConfigKeys):
    """Vectors of a release that are stored elsewhere, for an upgrade without the old model.

    Attributes:
        vectors: a .npy file of float32 [n, dim].
        paths: a text file with one image path per line, relative to `images`, in row order.
        release: the number under which the vectors' embedder is published.
    """

    vectors: Path
    paths: Path
    release: int = Field(ge=1)


Source = Path | PublishedSource


class UpgradeConfig(_Training):
    """h and g: (old embedding, old side-information) -> new embedding, new side-information."""

    kind: Literal["upgrade"]
    # A run folder, or {model_repo, release}; `old` may also be {vectors, paths, release}.
    old: Source | StoredVectorFiles
    new: Source
    # Run folders of side encoders; a published release brings its own. Absent: the upgrade does not
    # read, or not write, side-information.
    old_side: Path | None = None
    new_side: Path | None = None
    # carries: the new release keeps the old side encoder, so side-information stays valid.
    side: Literal["maps", "carries", "drops"] = "drops"
    # false: ignore the stored side-information (FCT's control with the zero vector).
    reads_side: bool = True
    # false: read only side-information (FCT section 5.1).
    reads_embedding: bool = True
    method: str = "fct"
    options: dict[str, str | int | float | bool] = {}
    # Options of the method to select automatically, by short trainings without some classes.
    choose: tuple[str, ...] = ()
    projection_dim: int = Field(256, ge=1)
    inner_dim: int = Field(2048, ge=1)
    # Augmented views of each image whose features are cached; 1: only the image itself.
    views: int = Field(1, ge=1, le=256)
    # Additional views, each a mixture of two images, both turned and mirrored. They show classes
    # that do not exist, so terms that read labels leave them out.
    mixed_views: int = Field(0, ge=0, le=256)
    augmentation: Augmentation = Augmentation()
    # The share of the epochs after which BatchNorm statistics are frozen (FCT D.5: 40 of 80).
    freeze_batchnorm_at: float = Field(0.5, gt=0, le=1)
    # Keep the weights of the epoch with the least held-out distance; false: the last (as FCT).
    keep_best: bool = False
    # How often an epoch contains an image of a class that the old model was not trained on.
    unseen_copies: int = Field(1, ge=1, le=64)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not (self.reads_side or self.reads_embedding):
            raise ValueError(
                "expected reads_side: true or reads_embedding: true, because the upgrade must "
                "read something; got false for both"
            )
        if isinstance(self.old, StoredVectorFiles) and self.views + self.mixed_views > 1:
            raise ValueError(
                "the keys views and mixed_views: expected views: 1 and mixed_views: 0, because "
                "stored vectors have one view of each image"
            )
        if self.side == "maps" and isinstance(self.new, Path) and self.new_side is None:
            raise ValueError(
                "side: maps predicts new side-information: add the key new_side with the run "
                "folder of its encoder"
            )
        if self.unseen_copies > 1 and not isinstance(self.old, Path):
            raise ValueError(
                "the key unseen_copies needs the key old with a run folder, whose training "
                "classes are known"
            )
        return self


Config = EmbedderConfig | SideEncoderConfig | UpgradeConfig


_ADAPTER: TypeAdapter[Config] = TypeAdapter(Annotated[Config, Field(discriminator="kind")])
_KINDS: dict[str, type[BaseModel]] = {
    "embedder": EmbedderConfig,
    "side_encoder": SideEncoderConfig,
    "upgrade": UpgradeConfig,
}


def configs_folder() -> Path:
    """Return the folder of ready configurations, in a checkout or in an installation.

    It has one folder for each data set, with YAML files in it. It is not checked that it exists. In
    a checkout it is the folder configs at its top.
    """
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[2] / "configs"


# Errors of PyYAML, which converts dates and numbers with Python's own functions.
_NOT_YAML = (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError)


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a repeated key; YAML's own would use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = [key for key, times in keys.items() if times > 1 and key != "<<"]
        if twice:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"the key {twice[0]!r} occurs twice; remove one of them",
                node.start_mark,
            )
        return super().construct_mapping(node, deep)


def _yaml(text: str) -> object:
    return yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a configuration from a YAML file; it opens no other file.

    The models and images that it names need not exist. Weights of timm or open_clip set the key
    `backbone`, whatever it says.

    Args:
        path: the file, in UTF-8.
        overrides: `key=value` each, with the value in YAML; nested keys have dots. Later ones
            replace earlier ones and the file's. An empty value is null, and missing parent keys are
            made.

    Raises:
        ConfigurationError: the file does not exist, cannot be read, is no YAML mapping with unique
            keys, or a key or value is not valid; or an override has no `=`, no key, a value that is
            not YAML, or a key below one that has a value. The message lists every problem with keys
            and values.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"the configuration file {path} does not exist; ready ones are in {configs_folder()}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path}: this configuration cannot be read as YAML text ({error}); correct the file"
        ) from error
    try:
        values = _yaml(text)
    except _NOT_YAML as error:
        raise ConfigurationError(
            f"the configuration file {path} is not YAML: {error}; correct the file"
        ) from error
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{path}: expected a configuration of keys with values, such as `kind: embedder`, got "
            + ("an empty file" if values is None else "a list or a single value")
            + "; correct the file"
        )
    for override in overrides:
        _set(values, override)
    return parse_config(values, str(path))


def parse_config(values: dict[str, object], source: str) -> Config:
    """Validate keys and values of a configuration.

    No file is opened, and `values` is not changed. Weights of timm or open_clip set the key
    `backbone`, whatever it says.

    Args:
        values: the keys as in YAML; `kind` selects what else is allowed.
        source: where they come from, for error messages.

    Returns:
        The configuration, with defaults for keys that are absent.

    Raises:
        ConfigurationError: a key is missing, unknown or of a wrong value, or keys contradict each
            other. The message lists every problem, and for unknown keys the known ones.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigurationError(
            f"{source}: expected the key kind with one of {', '.join(_KINDS)}, got "
            f"{'none' if kind is None else repr(kind)}; correct the configuration"
        )
    try:
        return _ADAPTER.validate_python(values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"][1:])
            if problem["type"] == "extra_forbidden":
                known = ", ".join(_known_keys(_KINDS[str(kind)], problem["loc"][1:-1]))
                lines.append(f"unknown key {where!r}; expected one of {known}")
            else:
                message = problem["msg"].removeprefix("Value error, ")
                lines.append(f"{where}: {message}" if where else message)
        raise ConfigurationError(f"{source}: " + "; ".join(lines)) from error


def _known_keys(model: type[BaseModel], parents: tuple[int | str, ...]) -> list[str]:
    for parent in parents:
        field = model.model_fields.get(str(parent))
        inner = None if field is None else field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return sorted(model.model_fields)


def _set(values: dict[str, object], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigurationError(f"--set: expected KEY=VALUE, such as epochs=3, got {override!r}")
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(
                f"--set {override}: the key {parent!r} has a value and no keys below it; leave out "
                "what follows its dot"
            )
        values = inner
    try:
        values[last] = _yaml(text)
    except _NOT_YAML as error:
        raise ConfigurationError(
            f"--set {override}: the value is not YAML ({error}); put a text in quotes"
        ) from error
