"""What is declared about an ONNX file of others: pooling, prefix, tokenizer, scaling of pixels.

Declared in `NAME.json` beside `NAME.onnx`, or in the files that sentence-transformers, and, of
pixels, transformers, open_clip and timm export.
"""

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nobackfill.digests import sha256_file
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.framing import Fit, Interpolation
from nobackfill.release.publishing.preprocessing import (
    Channels,
    Side,
    Size,
    Spread,
    read_preprocessing,
)

# Files beside an ONNX file that hold its larger weights.
_WEIGHTS = ("_data", ".data")


class Declaration(BaseModel):
    """What an ONNX file does not say of itself.

    Texts: `tokenizer` (a file beside), `prefix` put before each (`query_prefix` before those that
    ask, where it is another), `max_length` in tokens, `pooling` of the tokens' outputs. Images:
    `size` in pixels (or height and width) where the graph leaves it open; `fit`, `shortest` and
    `interpolation` as in nobackfill.framing.Frame, `shortest` by default the longer side of `size`;
    pixels are (value / 255 - mean) / std. `output`: its name, None for the first. `normalise`: to
    norm 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    tokenizer: str = "tokenizer.json"
    prefix: str = ""
    query_prefix: str | None = Field(None, exclude_if=lambda prefix: prefix is None)
    max_length: int = Field(256, ge=1)
    pooling: Literal["mean", "cls", "none"] = "mean"
    output: str | None = None
    normalise: bool = True
    size: Side | Size | None = None
    # Left out where they are what they were before they could be said: fingerprints stay.
    fit: Fit = Field("stretch", exclude_if=lambda fit: fit == "stretch")
    shortest: Side | None = Field(None, exclude_if=lambda side: side is None)
    interpolation: Interpolation = Field("bilinear", exclude_if=lambda name: name == "bilinear")
    mean: Channels = (0.485, 0.456, 0.406)
    std: Spread = (0.229, 0.224, 0.225)

    @property
    def asks_with(self) -> str:
        """What is put before texts that ask."""
        return self.prefix if self.query_prefix is None else self.query_prefix


def tokenizer_file(path: Path, declared: Declaration) -> Path:
    """The tokenizer of the ONNX file `path`: beside it, or above. Raises NotFoundError."""
    places = [folder / declared.tokenizer for folder in (path.parent, *path.parent.parents[:1])]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise NotFoundError(
            f"{places[0]}: no tokenizer; put the model's tokenizer.json beside its ONNX file"
        )
    return file


def fingerprint(path: Path, declared: Declaration, tokenizer: Path | None = None) -> str:
    """What names a model by all that makes its vectors: the ONNX file with its weights beside it,
    the tokenizer, and what is declared."""
    beside = (path.with_name(path.name + end) for end in _WEIGHTS)
    files = [path, *(one for one in beside if one.is_file())]
    if tokenizer is not None:
        files.append(tokenizer)
    parts = [sha256_file(one) for one in files]
    parts.append(json.dumps(declared.model_dump(), sort_keys=True))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def read_declaration(path: Path) -> Declaration:
    """What is declared about the ONNX file `path`, but for pixels. Raises InvalidInputError."""
    own = path.with_suffix(".json")
    try:
        if own.is_file():
            return Declaration.model_validate_json(own.read_bytes())
        for folder in (path.parent, path.parent.parent):
            if (folder / "modules.json").is_file():
                return _of_sentence_transformers(folder)
    except (ValidationError, ValueError, KeyError) as error:
        raise InvalidInputError(f"{own}: cannot be understood: {error}") from error
    return Declaration()


def read_pixels(path: Path, declared: Declaration) -> tuple[Declaration, Path | None]:
    """`declared` with what is declared of the pixels that the ONNX file `path` reads, and the file
    that does; None where none does. Raises InvalidInputError."""
    own = path.with_suffix(".json")
    if own.is_file():
        return declared, own
    if (found := read_preprocessing(path)) is None:
        return declared, None
    file, said = found
    return declared.model_copy(update=dict(said)), file


def _of_sentence_transformers(folder: Path) -> Declaration:
    """From modules.json and the folders that it names."""
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    pooling: Literal["mean", "cls", "none"] = "none"
    for module in modules:
        if module["type"].endswith(".Pooling"):
            said = json.loads((folder / module["path"] / "config.json").read_text("utf-8"))
            pooling = "cls" if said.get("pooling_mode_cls_token") else "mean"
            if not (said.get("pooling_mode_cls_token") or said.get("pooling_mode_mean_tokens")):
                raise ValueError("pooling other than mean and cls")
    sizes = folder / "sentence_bert_config.json"
    length = json.loads(sizes.read_text("utf-8"))["max_seq_length"] if sizes.is_file() else 256
    normalise = any(module["type"].endswith(".Normalize") for module in modules)
    return Declaration(pooling=pooling, max_length=length, normalise=normalise, **_prompts(folder))


def _prompts(folder: Path) -> dict[str, str]:
    """What stands before texts of each role, where the model's makers say so."""
    file = folder / "config_sentence_transformers.json"
    if not file.is_file():
        return {}
    said = json.loads(file.read_text("utf-8")).get("prompts") or {}
    document = said.get("document") or said.get("passage") or ""
    query = said.get("query")
    return {"prefix": document} | ({} if query is None else {"query_prefix": query})
