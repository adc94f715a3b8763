"""Public models of timm and open_clip, with their weights and preprocessing.

Names are `timm:NAME.TAG` and `open_clip:NAME/TAG`, as in those packages. A tag of open_clip may be
a file. `local-dir:FOLDER` and `hf-hub:NAME` also work after either prefix. Users install the
packages themselves. Weight files are safetensors, or state dicts read with `weights_only`.
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
    """A public model in eval mode, without its classifier.

    `network` maps normalised pixels float32 [n,3,H,W] to [n,dim]."""

    name: str
    network: nn.Module
    dim: int
    pixels: Preprocessing


def is_public(name: str) -> bool:
    """Return whether a name of weights or of a backbone has the prefix of timm or open_clip.

    It is not checked that the model exists.
    """
    return name.startswith((TIMM, OPEN_CLIP))


def open_public(name: str, *, loads_weights: bool = True) -> PublicModel:
    """Open a public model of images; its package downloads weights that are not cached.

    Random weights come from torch's default generator. Downloads go to the package's own cache and
    block without a limit of time. While the model is built, log messages of the whole process up to
    ERROR are dropped.

    Args:
        name: timm:NAME.TAG or open_clip:NAME/TAG; a name for which `is_public` holds.
        loads_weights: load the published weights; False: random ones. The description of an hf-hub
            model is downloaded even then.

    Raises:
        ConfigurationError: the package is missing, the name is unknown (similar ones are listed),
            or open_clip is named without a tag; or the model cannot be built, or its dimension or
            preprocessing is not supported.
        NotFoundError: the folder of local-dir, or a file in it, does not exist.
        UnavailableError: the weights or the description cannot be downloaded.
    """
    open_model = _timm if name.startswith(TIMM) else _open_clip
    return open_model(name, loads_weights)


def _timm(name: str, weights: bool) -> PublicModel:
    with _package(name, "timm", "timm"):
        import timm
    model_name = name.removeprefix(TIMM)
    if not model_name.startswith(_BY_PLACE):
        architecture, _, tag = model_name.partition(".")
        if architecture not in timm.list_models():
            raise unknown_model_error(
                name, "timm", model_name, [*timm.list_models(), *timm.list_pretrained()]
            )
        if tag and model_name not in (names := timm.list_pretrained(f"{architecture}.*")):
            raise unknown_model_error(name, "timm", model_name, names)
    network = _build(name, lambda: timm.create_model(model_name, pretrained=weights, num_classes=0))
    pixels = _read(name, lambda: read_timm(dict(timm.data.resolve_model_data_config(network))))
    return PublicModel(name, network.eval(), int(network.num_features), pixels)


def _open_clip(name: str, weights: bool) -> PublicModel:
    with _package(name, "open_clip", "open_clip_torch"):
        import open_clip
    model_name, tag = name.removeprefix(OPEN_CLIP), ""
    if not model_name.startswith(_BY_PLACE):
        model_name, _, tag = model_name.partition("/")
        if model_name not in open_clip.list_models():
            raise unknown_model_error(name, "open_clip", model_name, open_clip.list_models())
        names = open_clip.list_pretrained_tags_by_model(model_name)
        if not tag or (tag not in names and "/" not in tag and "." not in tag):
            tags = [f"{model_name}/{one}" for one in names]
            raise unknown_model_error(name, "open_clip", f"{model_name}/{tag}", tags)
    model = _build(
        name,
        lambda: open_clip.create_model(
            model_name, pretrained=tag or None, load_weights=weights, require_pretrained=weights,
            pretrained_text=False,
        ),
    )  # fmt: skip
    pixels = _read(name, lambda: read_open_clip(open_clip.get_model_preprocess_cfg(model)))
    dim = getattr(model.visual, "output_dim", None)
    if dim is None:
        raise ConfigurationError(
            f"{name}: the dimension of this model's image vectors is unknown to open_clip; export "
            "the model to ONNX and publish it with --onnx FILE"
        )
    return PublicModel(name, model.visual.eval(), int(dim), pixels)


@contextmanager
def _package(name: str, package: str, install: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"{name}: this model needs the package {package}, which is not installed ({error}); "
            f"run: pip install {install}"
        ) from error


def unknown_model_error(
    name: str, package: str, model_name: str, names: list[str]
) -> ConfigurationError:
    """Make, but do not raise, the error of an unknown model name, which lists similar names.

    Args:
        name: the name as the user wrote it.
        package: the package without this model.
        model_name: the part of the name that is unknown.
        names: the package's names; up to five similar ones are listed, else the first five; empty:
            none.
    """
    near = difflib.get_close_matches(model_name, names, 5, 0.4) or names[:5]
    return ConfigurationError(
        f"{name}: the package {package} has no model {model_name}; similar names: "
        f"{', '.join(near) or 'none'}"
    )


def _build(name: str, make: Callable[[], Any]) -> Any:
    """Build a model, without the package's log messages."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        return make()
    except Exception as error:
        # Packages raise their own classes, or wrap them in RuntimeError. Without a network,
        # huggingface_hub raises an OSError.
        if _LOCAL in name and isinstance(error, FileNotFoundError):
            raise NotFoundError(
                f"{name}: the files of this model cannot be read ({_first_line(error)}); correct "
                "the folder or file"
            ) from error
        causes = (error, error.__cause__, error.__context__)
        if any(isinstance(one, OSError) for one in causes) or "download" in str(error).lower():
            raise _out_of_reach(name, error) from error
        raise ConfigurationError(
            f"{name}: its package cannot build this model ({_first_line(error)}); use another model"
        ) from error
    finally:
        logging.disable(before)


def _out_of_reach(name: str, error: BaseException) -> UnavailableError:
    return UnavailableError(
        f"the weights of {name} cannot be downloaded ({_first_line(error)}); without a network, "
        "copy them to the cache of huggingface_hub (HF_HOME), or name a folder, "
        "timm:local-dir:FOLDER, or a file, open_clip:NAME/FILE"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _read(name: str, read: Callable[[], Preprocessing]) -> Preprocessing:
    try:
        return read()
    except ValueError as error:
        raise ConfigurationError(
            f"{name}: the preprocessing of this model is not supported ({error}); export the model "
            "to ONNX with its preprocessing, and publish it with --onnx FILE"
        ) from error
