"""Putting pretrained weights into an encoder and its head, by name and shape.

The last linear layer of a torchvision model is its classifier, in place of which stands the
embedding layer: it is left out unless its shape is the embedding layer's own. Of a classifier whose
classes are named, those that a training knows too keep their weights.
"""

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nobackfill.errors import ConfigurationError, few
from nobackfill.training.config import EmbedderConfig, SideEncoderConfig
from nobackfill.training.networks.backbones import linear_layers
from nobackfill.training.networks.embedder import ImageEncoder, bare_backbone
from nobackfill.training.networks.heads import Head
from nobackfill.training.networks.weights import Weights, is_file


def load_pretrained(
    encoder: ImageEncoder,
    head: Head | None,
    weights: Weights,
    config: EmbedderConfig | SideEncoderConfig,
    class_names: Sequence[str],
) -> None:
    """Load what fits, and say on stderr what is trained anew.

    Raises ConfigurationError naming each tensor that is missing, not expected, or of another shape.
    """
    network = bare_backbone(encoder, config)
    wanted = network.state_dict()
    prefix = _prefix(weights.tensors, wanted)
    found = {k.removeprefix(prefix): v for k, v in weights.tensors.items() if k.startswith(prefix)}
    last, _ = linear_layers(network)[-1]
    anew = _anew(found, wanted, last, classifier=not is_file(weights.name))
    if problems := _problems(found, wanted, anew, last):
        small_stem = config.image_size <= 64 and problems[0].startswith("conv1.weight")
        raise ConfigurationError(
            f"{weights.name} does not fit {config.backbone}: {few(problems)}"
            + (_STEM if small_stem else "")
        )
    with torch.no_grad():
        for key in wanted.keys() - anew:
            wanted[key].copy_(found[key])
        left = len(class_names)
        if head is not None and not any(key.startswith(f"{last}.") for key in anew):
            left -= _keep_classes(head, weights, class_names)
    fresh = sorted(anew)
    if head is not None and left:
        fresh.append(f"the classifier of {left} of {len(class_names)} classes")
    print(f"{weights.name}: loaded; trained anew: {', '.join(fresh) or 'nothing'}", file=sys.stderr)


_STEM = "; at image_size 64 and below resnets have a stem of 3 x 3, pretrained ones have 7 x 7"


def _prefix(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """What stands before the backbone's own names: of DataParallel, of a wrapper, of our runs."""
    first = next(iter(wanted))
    before = {key.removesuffix(first) for key in found if key.endswith(first)}
    prefixes = [p for p in before if not p or p.endswith(".")]
    fits = {p: sum(p + key in found for key in wanted) for p in sorted(prefixes)}
    return max(fits, key=lambda p: fits[p], default="")


def _anew(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], last: str, *, classifier: bool
) -> set[str]:
    """Tensors that stay as they were drawn: the embedding layer where the file has a classifier in
    its place, or one of another shape; GeM's exponent, and counters that old files lack.
    """
    layer = {key for key in wanted if key.startswith(f"{last}.")}
    differs = {key for key in layer if key not in found or found[key].shape != wanted[key].shape}
    rest = {
        key
        for key in wanted.keys() - found.keys()
        if key.endswith(("pool.p", ".num_batches_tracked"))
    }
    return (layer if classifier or differs else set()) | rest


def _problems(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], anew: set[str], last: str
) -> list[str]:
    problems = [
        f"{key}: expected shape {list(wanted[key].shape)}, got {list(found[key].shape)}"
        for key in wanted
        if key in found and key not in anew and found[key].shape != wanted[key].shape
    ]
    problems += [f"{key} is missing" for key in wanted if key not in found and key not in anew]
    # A classifier, a head and auxiliary classifiers are no part of an embedder.
    others = ("head.", "AuxLogits.", "aux1.", "aux2.", "optimizer.", f"{last}.")
    return problems + [
        f"{key} {list(found[key].shape)} is not expected"
        for key in found
        if key not in wanted and not key.startswith(others)
    ]


def _keep_classes(head: Head, weights: Weights, class_names: Sequence[str]) -> int:
    """Give the head the weights of those classes that both know; how many that are."""
    mine = {name: row for row, name in enumerate(class_names)}
    theirs = {name: row for row, name in enumerate(weights.class_names)}
    shared = [name for name in class_names if name in theirs]
    kept = 0
    for key, tensor in head.state_dict().items():
        stored = weights.tensors.get(f"head.{key}")
        # An angular head keeps its classes in columns.
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
