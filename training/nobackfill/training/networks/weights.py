"""Read pretrained weights and load them into an encoder and its head, by name and shape.

Weights are torchvision's by name (downloaded and verified), timm's, open_clip's, or a local file. A
file is safetensors, or a state dict of `torch.save` read with `weights_only`, so that no pickled
code runs.

The last linear layer of a torchvision model is its classifier, which the embedding layer replaces.
It is not loaded unless its shape is that of the embedding layer. If a classifier's classes are
named, the classes that the training also has keep their weights.
"""

import json
import sys
import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nobackfill.digests import sha256_file
from nobackfill.durable import make_dir
from nobackfill.errors import (
    CannotWriteError,
    ConfigurationError,
    NotFoundError,
    UnavailableError,
    VerificationError,
    join_few,
)
from nobackfill.training.config import EmbedderConfig, SideEncoderConfig
from nobackfill.training.networks.backbones import linear_layers
from nobackfill.training.networks.embedder import ImageEncoder, bare_backbone
from nobackfill.training.networks.heads import Head
from nobackfill.training.networks.public_models import is_public, open_public

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum


FILES = (".safetensors", ".pt", ".pth", ".bin")
# Keys under which training programs store the state dict.
_INSIDE = ("state_dict", "model_state_dict", "model")


@dataclass(frozen=True)
class Weights:
    """Pretrained tensors.

    Attributes:
        name: the name in the configuration, or the file.
        tensors: on the CPU, by name.
        class_names: the classes of the classifier, in the order of its rows; empty if unknown.
    """

    name: str
    tensors: Mapping[str, Tensor]
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Normalisation:
    """Normalisation of pixels in 0..1: (x - mean) / std, for red, green and blue."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def is_weights_path(name: str) -> bool:
    """Return whether the value of the key `weights` is a path, and not a name of a package.

    A path contains a slash or ends with one of FILES. The file need not exist. Public names of timm
    and open_clip are no paths, even with a slash. An empty name is none.
    """
    return not is_public(name) and ("/" in name or Path(name).suffix in FILES)


def name_without_path(name: str) -> str:
    """Return the value of the key `weights` without paths of this machine, for a manifest.

    A file becomes its name without folders; other names stay. A folder of local-dir is left out, so
    that only `local-dir` stays. The file or folder need not exist.
    """
    if is_weights_path(name):
        return Path(name).name
    package, _, model_name = name.partition(":")
    if model_name.startswith("local-dir:"):
        return f"{package}:local-dir"
    model, _, tag = model_name.partition("/")
    if not model_name.startswith("hf-hub:") and is_weights_path(tag):
        return f"{package}:{model}/{Path(tag).name}"
    return name


def read_weights(name: str, backbone: str) -> Weights:
    """Read the tensors of a file, of torchvision's weights for the backbone, or of a public model.

    Weights of a package are downloaded if they are not cached. The tensors are on the CPU. Only a
    safetensors file can bring class names. Downloads block without a limit of time. Building a
    public model draws from torch's default generator.

    Args:
        name: the value of the key `weights`.
        backbone: the value of the key `backbone`; used only for names of torchvision.

    Raises:
        NotFoundError: the file, or the folder of local-dir, does not exist.
        VerificationError: the file is damaged, has another digest, or contains more than plain
            tensors.
        UnavailableError: the download failed.
        ConfigurationError: the name is unknown, its package is not installed, or a public model
            cannot be built or has an unsupported preprocessing.
        CannotWriteError: the cache cannot be written.
        OSError: the file exists, but cannot be opened.
    """
    if is_weights_path(name):
        return read_weights_file(Path(name))
    if is_public(name):
        tensors = open_public(name).network.state_dict()
        return Weights(name, {f"0.{key}": tensor for key, tensor in tensors.items()})
    return replace(
        read_weights_file(download_weights(torchvision_weights(name, backbone).url)), name=name
    )


def pixel_normalisation(name: str, backbone: str) -> Normalisation | None:
    """Return the normalisation of pixels that named weights expect.

    Weights are not downloaded, but the description of an hf-hub model is. A public model is built
    for it, which draws from torch's default generator.

    Args:
        name: the value of the key `weights`.
        backbone: the value of the key `backbone`.

    Returns:
        None for a file, which does not contain it.

    Raises:
        ConfigurationError: the name is unknown, its package is not installed, or a public model
            cannot be built or has an unsupported preprocessing.
        NotFoundError: the folder of local-dir does not exist.
        UnavailableError: the description of a public model cannot be downloaded.
    """
    if is_weights_path(name):
        return None
    if is_public(name):
        pixels = open_public(name, loads_weights=False).pixels
        return Normalisation(pixels.mean, pixels.std)
    transforms = torchvision_weights(name, backbone).transforms()
    return Normalisation(tuple(transforms.mean), tuple(transforms.std))


def download_weights(url: str) -> Path:
    """Download a file to torch's cache (`TORCH_HOME`), unless it is there, and verify it.

    The name must end in the first digits of the SHA-256, which are compared every time. A progress
    bar appears on stderr. An incomplete download is deleted; the call blocks without a limit of
    time.

    Returns:
        The file in the cache.

    Raises:
        UnavailableError: the download failed; no file was made.
        VerificationError: the file has another digest; a new download is deleted, a file of the
            cache stays.
        CannotWriteError: the cache cannot be written.
        OSError: the file in the cache cannot be opened.
    """
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(url).path).name
    expected = path.stem.rpartition("-")[2]
    if not path.is_file():
        make_dir(path.parent)
        try:
            torch.hub.download_url_to_file(url, str(path), expected)
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            raise UnavailableError(
                f"the weights {url} cannot be downloaded ({error}); without a network, copy the "
                f"file to {path}, or train with --weights FILE"
            ) from error
        except RuntimeError as error:
            raise VerificationError(
                f"the file from {url} is not the one that torchvision names ({error}) and was "
                "deleted; run the command again"
            ) from error
        except OSError as error:
            raise CannotWriteError(
                f"the downloaded weights cannot be written to {path} ({error}); free space, or set "
                "TORCH_HOME to another folder"
            ) from error
    digest = sha256_file(path)
    if not digest.startswith(expected):
        raise VerificationError(
            f"the weights {path} are damaged: expected a SHA-256 that begins with {expected}, got "
            f"{digest[:12]}; delete the file, and run the command again"
        )
    return path


def read_weights_file(path: Path) -> Weights:
    """Read a weights file: safetensors, or a state dict of torch.save. It runs no pickled code.

    The class names of a safetensors file are those in its metadata. A state dict may lie below the
    key state_dict, model_state_dict or model. All tensors are read to the CPU.

    Raises:
        NotFoundError: the file does not exist.
        VerificationError: it is damaged, empty, or contains more than plain tensors.
        OSError: it exists, but cannot be opened.
    """
    if not path.is_file():
        raise NotFoundError(
            f"the weights file {path} does not exist; correct --weights or the key weights"
        )
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path)
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (
        SafetensorError,
        UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
    ) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise VerificationError(
            f"the weights file {path}: expected safetensors, or a state dict of torch.save with "
            f"only tensors, but the file cannot be read as either ({reason}); save "
            "model.state_dict() alone"
        ) from error
    return Weights(str(path), _state_dict(saved, path))


def _safetensors(path: Path) -> Weights:
    with safe_open(path, framework="pt") as file:
        names = json.loads((file.metadata() or {}).get("class_names", "[]"))
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return Weights(str(path), tensors, tuple(map(str, names)))


def _state_dict(saved: object, path: Path) -> dict[str, Tensor]:
    for key in _INSIDE:
        if isinstance(saved, Mapping) and isinstance(saved.get(key), Mapping):
            saved = saved[key]
    tensors = saved if isinstance(saved, Mapping) else {}
    others = [key for key, value in tensors.items() if not isinstance(value, Tensor)]
    if not tensors or others:
        raise VerificationError(
            f"the weights file {path}: expected a state dict of tensors by name, got "
            f"{'no tensor for ' + join_few(map(str, others)) if others else 'no tensors'}; save "
            "model.state_dict() alone"
        )
    return {str(key): value for key, value in tensors.items()}


def torchvision_weights(name: str, backbone: str) -> "WeightsEnum":
    """Return torchvision's entry of pretrained weights, without downloading them.

    Names are compared exactly, with capitals.

    Args:
        name: such as DEFAULT, IMAGENET1K_V2 or ResNet50_Weights.IMAGENET1K_V2.
        backbone: the name of a torchvision model.

    Raises:
        ConfigurationError: torchvision has no such weights for the backbone; the message lists
            those it has.
    """
    import torchvision

    try:
        enum = torchvision.models.get_model_weights(backbone)
    except ValueError as error:
        raise ConfigurationError(
            f"weights: {name}: torchvision has no pretrained weights for the backbone {backbone}; "
            f"name a file ({', '.join(FILES)})"
        ) from error
    enum_name, _, member = name.rpartition(".")
    if enum_name not in ("", enum.__name__) or member not in enum.__members__:
        raise ConfigurationError(
            f"weights: torchvision has no weights {name!r} for {backbone}; expected "
            f"{', '.join(enum.__members__)}, or a file ({', '.join(FILES)})"
        )
    return enum[member]


def load_pretrained(
    encoder: ImageEncoder,
    head: Head | None,
    weights: Weights,
    config: EmbedderConfig | SideEncoderConfig,
    class_names: Sequence[str],
) -> None:
    """Load pretrained weights into a backbone and its head, in place.

    Some tensors may stay untrained; stderr lists them, or says "nothing". The embedding layer stays
    so if `weights` come from a package, or have another shape there. GeM's exponent and BatchNorm's
    counters stay so if `weights` lack them. If the embedding layer is loaded, the head gets the
    stored rows of the classes that both know by name. Tensors are converted to the dtype and device
    of the network.

    Args:
        encoder: the encoder, which is changed.
        head: the head, which is changed; None: load only the backbone.
        weights: the weights; a prefix before all names, such as `module.`, is ignored.
        config: the configuration, with the backbone and the size of images.
        class_names: the head's classes, in its order.

    Raises:
        ConfigurationError: any other tensor of the backbone is missing, superfluous or of another
            shape, or the backbone has no linear embedding layer. Nothing is changed then.
    """
    network = bare_backbone(encoder, config)
    target = network.state_dict()
    prefix = _prefix(weights.tensors, target)
    source = {k.removeprefix(prefix): v for k, v in weights.tensors.items() if k.startswith(prefix)}
    linear = linear_layers(network)
    if not linear:
        raise ConfigurationError(
            f"backbone {config.backbone} has no linear embedding layer, so pretrained weights do "
            "not fit; leave the key weights out"
        )
    last, _ = linear[-1]
    untrained = _untrained(source, target, last, classifier=not is_weights_path(weights.name))
    if problems := _problems(source, target, untrained, last):
        small_stem = config.image_size <= 64 and problems[0].startswith("conv1.weight")
        raise ConfigurationError(
            f"the weights {weights.name} do not fit the backbone {config.backbone}: "
            f"{join_few(problems)}" + (_STEM if small_stem else "; use weights of that backbone")
        )
    with torch.no_grad():
        for key in target.keys() - untrained:
            target[key].copy_(source[key])
        new_classes = len(class_names)
        if head is not None and not any(key.startswith(f"{last}.") for key in untrained):
            new_classes -= _load_classes(head, weights, class_names)
    names = sorted(untrained)
    if head is not None and new_classes:
        names.append(f"the classifier of {new_classes} of {len(class_names)} classes")
    print(
        f"{weights.name}: loaded; not pretrained: {', '.join(names) or 'nothing'}", file=sys.stderr
    )


_STEM = (
    "; at image_size 64 and below the resnets of nobackfill begin with a convolution of 3 x 3, "
    "pretrained ones with 7 x 7: train with image_size above 64"
)


def _prefix(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> str:
    """Return the prefix of the backbone's names: DataParallel's, a wrapper's, or our runs'."""
    first = next(iter(target))
    before = {key.removesuffix(first) for key in source if key.endswith(first)}
    prefixes = [p for p in before if not p or p.endswith(".")]
    fits = {p: sum(p + key in source for key in target) for p in sorted(prefixes)}
    return max(fits, key=lambda p: fits[p], default="")


def _untrained(
    source: Mapping[str, Tensor], target: Mapping[str, Tensor], last: str, *, classifier: bool
) -> set[str]:
    """Return the tensors that are not loaded.

    These are the embedding layer if the file has a classifier or another shape there, GeM's
    exponent, and counters that old files lack."""
    layer = {key for key in target if key.startswith(f"{last}.")}
    differs = {key for key in layer if key not in source or source[key].shape != target[key].shape}
    optional = {
        key
        for key in target.keys() - source.keys()
        if key.endswith(("pool.p", ".num_batches_tracked"))
    }
    return (layer if classifier or differs else set()) | optional


def _problems(
    source: Mapping[str, Tensor], target: Mapping[str, Tensor], untrained: set[str], last: str
) -> list[str]:
    loaded = [key for key in target if key not in untrained]
    problems = [
        f"{key}: expected shape {list(target[key].shape)}, got {list(source[key].shape)}"
        for key in loaded
        if key in source and source[key].shape != target[key].shape
    ]
    problems += [f"{key} is missing" for key in loaded if key not in source]
    # Classifiers, heads and auxiliary classifiers are not part of an embedder.
    others = ("head.", "AuxLogits.", "aux1.", "aux2.", "optimizer.", f"{last}.")
    return problems + [
        f"{key} {list(source[key].shape)} is not expected"
        for key in source
        if key not in target and not key.startswith(others)
    ]


def _load_classes(head: Head, weights: Weights, class_names: Sequence[str]) -> int:
    """Load the head's weights of the classes that both know; return their number."""
    head_rows = {name: row for row, name in enumerate(class_names)}
    file_rows = {name: row for row, name in enumerate(weights.class_names)}
    shared = [name for name in class_names if name in file_rows]
    count = 0
    for key, tensor in head.state_dict().items():
        stored = weights.tensors.get(f"head.{key}")
        # An angular head stores its classes in columns.
        in_columns = key.endswith("loss.W")
        if stored is None or stored.ndim != tensor.ndim:
            continue
        target, source = (tensor.t(), stored.t()) if in_columns else (tensor, stored)
        if target.shape[1:] != source.shape[1:] or len(source) != len(file_rows):
            continue
        for name in shared:
            target[head_rows[name]] = source[file_rows[name]]
        count = len(shared)
    return count
