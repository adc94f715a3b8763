"""Models of timm and open_clip by name, with their weights and the pixels that their makers say.

`timm:NAME.TAG`, `open_clip:NAME/TAG`, as those packages name them; a tag of open_clip's may be a
file, and after `timm:` or `open_clip:` stands what they take besides: `local-dir:FOLDER`,
`hf-hub:NAME`. Both packages are installed by those who use them; files of theirs are safetensors,
or state dicts read with `weights_only`.
"""

import difflib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from nobackfill.errors import ConfigurationError, NotFoundError, UnavailableError
from nobackfill.release.publishing.preprocessing import Preprocessing, read_open_clip, read_timm
from nobackfill.training.config import OPEN_CLIP, TIMM

_LOCAL = "local-dir:"
_BY_PLACE = (_LOCAL, "hf-hub:")


@dataclass(frozen=True)
class PublicModel:
    """`network`: pixels float32 [n,3,H,W], normalised -> [n,dim]; in evaluation, without its
    classifier."""

    name: str
    network: nn.Module
    dim: int
    pixels: Preprocessing


def is_public(name: str) -> bool:
    """Whether a name of weights, or of a backbone, is one of these packages'."""
    return name.startswith((TIMM, OPEN_CLIP))


def open_public(name: str, *, weights: bool = True) -> PublicModel:
    """The model, its weights as they were published, or, without `weights`, drawn anew.

    Raises ConfigurationError where its package is missing, or does not know the name (naming near
    ones), or says pixels that we cannot make; NotFoundError, UnavailableError for its weights.
    """
    opened = _timm if name.startswith(TIMM) else _open_clip
    return opened(name, weights)


def _timm(name: str, weights: bool) -> PublicModel:
    with _package(name, "timm", "timm"):
        import timm
    wanted = name.removeprefix(TIMM)
    if not wanted.startswith(_BY_PLACE):
        architecture, _, tag = wanted.partition(".")
        if architecture not in timm.list_models():
            raise unknown(name, "timm", wanted, [*timm.list_models(), *timm.list_pretrained()])
        if tag and wanted not in (known := timm.list_pretrained(f"{architecture}.*")):
            raise unknown(name, "timm", wanted, known)
    network = _made(name, lambda: timm.create_model(wanted, pretrained=weights, num_classes=0))
    pixels = _read(name, lambda: read_timm(dict(timm.data.resolve_model_data_config(network))))
    return PublicModel(name, network.eval(), int(network.num_features), pixels)


def _open_clip(name: str, weights: bool) -> PublicModel:
    with _package(name, "open_clip", "open_clip_torch"):
        import open_clip
    wanted, tag = name.removeprefix(OPEN_CLIP), ""
    if not wanted.startswith(_BY_PLACE):
        wanted, _, tag = wanted.partition("/")
        if wanted not in open_clip.list_models():
            raise unknown(name, "open_clip", wanted, open_clip.list_models())
        known = open_clip.list_pretrained_tags_by_model(wanted)
        if not tag or (tag not in known and "/" not in tag and "." not in tag):
            tags = [f"{wanted}/{one}" for one in known]
            raise unknown(name, "open_clip", f"{wanted}/{tag}", tags)
    model = _made(
        name,
        lambda: open_clip.create_model(
            wanted, pretrained=tag or None, load_weights=weights, require_pretrained=weights,
            pretrained_text=False,
        ),
    )  # fmt: skip
    pixels = _read(name, lambda: read_open_clip(open_clip.get_model_preprocess_cfg(model)))
    dim = getattr(model.visual, "output_dim", None)
    if dim is None:
        raise ConfigurationError(f"{name}: its model of images does not say its dimension")
    return PublicModel(name, model.visual.eval(), int(dim), pixels)


@contextmanager
def _package(name: str, package: str, install: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"{name}: {package} is not installed here ({error}); pip install {install}"
        ) from error


def unknown(name: str, package: str, wanted: str, known: list[str]) -> ConfigurationError:
    """Of weights `name`: `package` does not know `wanted`; near ones are named."""
    near = difflib.get_close_matches(wanted, known, 5, 0.4) or known[:5]
    return ConfigurationError(
        f"{name}: {package} has no {wanted}; near: {', '.join(near) or 'none'}"
    )


def _made(name: str, make: Callable[[], Any]) -> Any:
    """A model of theirs; what they log of it is not for our users."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        return make()
    except Exception as error:
        # Their own classes, and RuntimeError around any of them; what huggingface_hub raises
        # without a network is an OSError, whatever stands in its way.
        if _LOCAL in name and isinstance(error, FileNotFoundError):
            raise NotFoundError(f"{name}: {_first_line(error)}") from error
        causes = (error, error.__cause__, error.__context__)
        if any(isinstance(one, OSError) for one in causes) or "download" in str(error).lower():
            raise _out_of_reach(name, error) from error
        raise ConfigurationError(f"{name}: cannot be built ({_first_line(error)})") from error
    finally:
        logging.disable(before)


def _out_of_reach(name: str, error: BaseException) -> UnavailableError:
    return UnavailableError(
        f"{name}: its weights cannot be had ({_first_line(error)}); where there is no network, "
        "bring them into the hub's cache (HF_HOME), or name a folder, local-dir:FOLDER, or "
        "open_clip's file, open_clip:NAME/FILE"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _read(name: str, read: Callable[[], Preprocessing]) -> Preprocessing:
    try:
        return read()
    except ValueError as error:
        raise ConfigurationError(
            f"{name}: reads pixels that we cannot make ({error}); export it as ONNX and publish "
            "that, with --onnx"
        ) from error
