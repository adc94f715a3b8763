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
    """Tensors by name. `name` is that of the configuration; `class_names` are those of the
    classifier, empty if unknown."""

    name: str
    tensors: Mapping[str, Tensor]
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Normalisation:
    """Normalisation of pixels in 0..1: (x - mean) / std, for red, green and blue."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def is_file(name: str) -> bool:
    """Return whether `weights: name` is a path, and not a name of a package."""
    return not is_public(name) and ("/" in name or Path(name).suffix in FILES)


def public_name(name: str) -> str:
    """Return `name` without paths of this machine, for a manifest."""
    if is_file(name):
        return Path(name).name
    package, _, rest = name.partition(":")
    if rest.startswith("local-dir:"):
        return f"{package}:local-dir"
    model, _, tag = rest.partition("/")
    if not rest.startswith("hf-hub:") and is_file(tag):
        return f"{package}:{model}/{Path(tag).name}"
    return name


def read_weights(name: str, backbone: str) -> Weights:
    """Read the tensors of a file, of torchvision's weights for the backbone, or of a public model.

    Args:
        name: the value of the key `weights`.
        backbone: the value of the key `backbone`.

    Raises:
        NotFoundError: the file does not exist.
        VerificationError: damaged, another digest, or more than plain tensors.
        UnavailableError: the download failed.
        ConfigurationError: the name is unknown.
    """
    if is_file(name):
        return read_file(Path(name))
    if is_public(name):
        tensors = open_public(name).network.state_dict()
        return Weights(name, {f"0.{key}": tensor for key, tensor in tensors.items()})
    return replace(read_file(download(of_torchvision(name, backbone).url)), name=name)


def normalisation(name: str, backbone: str) -> Normalisation | None:
    """Return the normalisation that named weights expect; None for a file, which does not say.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if is_file(name):
        return None
    if is_public(name):
        pixels = open_public(name, weights=False).pixels
        return Normalisation(pixels.mean, pixels.std)
    transforms = of_torchvision(name, backbone).transforms()
    return Normalisation(tuple(transforms.mean), tuple(transforms.std))


def download(url: str) -> Path:
    """Download a file to torch's cache (`TORCH_HOME`), unless it is there, and verify it.

    The name must end in the first digits of the SHA-256, which are compared every time.

    Raises:
        UnavailableError: the download failed.
        VerificationError: the file has another digest.
        CannotWriteError: the cache cannot be written.
    """
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(url).path).name
    expected = path.stem.rpartition("-")[2]
    if not path.is_file():
        make_dir(path.parent)
        try:
            torch.hub.download_url_to_file(url, str(path), expected)
        except urllib.error.URLError as error:
            raise UnavailableError(
                f"{url}: cannot be downloaded ({error}); without a network, copy the file to "
                f"{path}, or name one with weights: FILE"
            ) from error
        except RuntimeError as error:
            raise VerificationError(
                f"{url}: the downloaded file is not the one that torchvision names ({error}); it "
                "was deleted"
            ) from error
        except OSError as error:
            raise CannotWriteError(f"{path}: cannot be written ({error})") from error
    stored = sha256_file(path)
    if not stored.startswith(expected):
        raise VerificationError(
            f"{path}: expected a SHA-256 that begins with {expected}, got {stored[:12]}; delete it"
        )
    return path


def read_file(path: Path) -> Weights:
    """Read a weights file.

    Raises:
        NotFoundError: the file does not exist.
        VerificationError: it is damaged, or contains more than plain tensors.
    """
    if not path.is_file():
        raise NotFoundError(f"no weights {path}; check the key weights")
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
        raise VerificationError(
            f"{path}: expected safetensors, or a state dict of torch.save with nothing but tensors "
            f"({str(error).splitlines()[0][:200] if str(error) else error!r})"
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
    strangers = [key for key, value in tensors.items() if not isinstance(value, Tensor)]
    if not tensors or strangers:
        raise VerificationError(
            f"{path}: expected a state dict of tensors by name, got "
            f"{join_few(map(str, strangers)) or type(saved).__name__}"
        )
    return {str(key): value for key, value in tensors.items()}


def of_torchvision(name: str, backbone: str) -> "WeightsEnum":
    """Return torchvision's weights of a backbone: `DEFAULT`, `IMAGENET1K_V2` or
    `ResNet50_Weights.IMAGENET1K_V2`. Raises ConfigurationError for another name."""
    import torchvision

    try:
        known = torchvision.models.get_model_weights(backbone)
    except ValueError as error:
        raise ConfigurationError(
            f"weights: {name}: torchvision has none for the backbone {backbone}; name a file "
            f"({', '.join(FILES)})"
        ) from error
    of, _, member = name.rpartition(".")
    if of not in ("", known.__name__) or member not in known.__members__:
        raise ConfigurationError(
            f"weights: torchvision has no {name} for {backbone}; known: "
            f"{', '.join(known.__members__)}, or a file ({', '.join(FILES)})"
        )
    return known[member]


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
    stored rows of the classes that both know by name.

    Args:
        encoder: the encoder, which is changed.
        head: the head, which is changed; None: load only the backbone.
        weights: the weights.
        config: the configuration, with the backbone and the size of images.
        class_names: the head's classes, in its order.

    Raises:
        ConfigurationError: any other tensor of the backbone is missing, superfluous or of another
            shape.
    """
    network = bare_backbone(encoder, config)
    expected = network.state_dict()
    prefix = _prefix(weights.tensors, expected)
    stored = {k.removeprefix(prefix): v for k, v in weights.tensors.items() if k.startswith(prefix)}
    linear = linear_layers(network)
    if not linear:
        raise ConfigurationError(
            f"backbone {config.backbone} has no linear embedding layer, so pretrained weights do "
            "not fit; leave weights out"
        )
    last, _ = linear[-1]
    anew = _anew(stored, expected, last, classifier=not is_file(weights.name))
    if problems := _problems(stored, expected, anew, last):
        small_stem = config.image_size <= 64 and problems[0].startswith("conv1.weight")
        raise ConfigurationError(
            f"{weights.name} does not fit {config.backbone}: {join_few(problems)}"
            + (_STEM if small_stem else "")
        )
    with torch.no_grad():
        for key in expected.keys() - anew:
            expected[key].copy_(stored[key])
        left = len(class_names)
        if head is not None and not any(key.startswith(f"{last}.") for key in anew):
            left -= _keep_classes(head, weights, class_names)
    fresh = sorted(anew)
    if head is not None and left:
        fresh.append(f"the classifier of {left} of {len(class_names)} classes")
    print(
        f"{weights.name}: loaded; not pretrained: {', '.join(fresh) or 'nothing'}", file=sys.stderr
    )


_STEM = "; at image_size 64 and below resnets have a stem of 3 x 3, pretrained ones have 7 x 7"


def _prefix(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return the prefix of the backbone's names: DataParallel's, a wrapper's, or our runs'."""
    first = next(iter(expected))
    before = {key.removesuffix(first) for key in stored if key.endswith(first)}
    prefixes = [p for p in before if not p or p.endswith(".")]
    fits = {p: sum(p + key in stored for key in expected) for p in sorted(prefixes)}
    return max(fits, key=lambda p: fits[p], default="")


def _anew(
    stored: Mapping[str, Tensor], expected: Mapping[str, Tensor], last: str, *, classifier: bool
) -> set[str]:
    """Return the tensors that are not loaded.

    These are the embedding layer if the file has a classifier or another shape there, GeM's
    exponent, and counters that old files lack."""
    layer = {key for key in expected if key.startswith(f"{last}.")}
    differs = {
        key for key in layer if key not in stored or stored[key].shape != expected[key].shape
    }
    rest = {
        key
        for key in expected.keys() - stored.keys()
        if key.endswith(("pool.p", ".num_batches_tracked"))
    }
    return (layer if classifier or differs else set()) | rest


def _problems(
    stored: Mapping[str, Tensor], expected: Mapping[str, Tensor], anew: set[str], last: str
) -> list[str]:
    problems = [
        f"{key}: expected shape {list(expected[key].shape)}, got {list(stored[key].shape)}"
        for key in expected
        if key in stored and key not in anew and stored[key].shape != expected[key].shape
    ]
    problems += [f"{key} is missing" for key in expected if key not in stored and key not in anew]
    # Classifiers, heads and auxiliary classifiers are not part of an embedder.
    others = ("head.", "AuxLogits.", "aux1.", "aux2.", "optimizer.", f"{last}.")
    return problems + [
        f"{key} {list(stored[key].shape)} is not expected"
        for key in stored
        if key not in expected and not key.startswith(others)
    ]


def _keep_classes(head: Head, weights: Weights, class_names: Sequence[str]) -> int:
    """Load the head's weights of the classes that both know; return their number."""
    mine = {name: row for row, name in enumerate(class_names)}
    theirs = {name: row for row, name in enumerate(weights.class_names)}
    shared = [name for name in class_names if name in theirs]
    kept = 0
    for key, tensor in head.state_dict().items():
        stored = weights.tensors.get(f"head.{key}")
        # An angular head stores its classes in columns.
        across = key.endswith("loss.W")
        if stored is None or stored.ndim != tensor.ndim:
            continue
        to, source = (tensor.t(), stored.t()) if across else (tensor, stored)
        if to.shape[1:] != source.shape[1:] or len(source) != len(theirs):
            continue
        for name in shared:
            to[mine[name]] = source[theirs[name]]
        kept = len(shared)
    return kept
