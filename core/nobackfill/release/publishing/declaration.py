"""What is declared about an ONNX file of others: pooling, prefix, tokenizer, scaling of pixels.

Declared in `NAME.json` beside `NAME.onnx`, or in the files that sentence-transformers, and, of
pixels, transformers, open_clip and timm export.
"""

import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

import onnx
from google.protobuf.message import DecodeError, Message
from onnx import TensorProto
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from nobackfill.digests import sha256_bytes, sha256_file
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.framing import Fit, Interpolation, Margin
from nobackfill.release.publishing.preprocessing import (
    Channels,
    Side,
    Size,
    Spread,
    read_preprocessing,
)

# Files beside an ONNX file that usually hold its larger weights: digested wherever they are.
_WEIGHTS = ("_data", ".data")
# The output of a graph that holds a model of sentence-transformers with all its modules.
_WHOLE = "sentence_embedding"
# Outputs whose tokens are pooled here.
_TOKENS = ("token_embeddings", "last_hidden_state")
_MODULES = "modules.json"
# Modules that may follow each module of sentence-transformers, if applied here.
_MODULES_AFTER = {
    "": ("Transformer",),
    "Transformer": ("Pooling", "Normalize"),
    "Pooling": ("Normalize",),
}
# tokenizer_config.json writes 10**30.
_NO_LIMIT = 1 << 30


class Declaration(BaseModel):
    """What an ONNX file does not say of itself.

    Texts: `tokenizer` (a file beside), `prefix` put before each (`query_prefix` before those that
    ask, where it is another), `max_length` in tokens, `pooling` of the tokens' outputs. Images:
    `size` in pixels (or height and width) where the graph leaves it open; `fit`, `shortest`,
    `interpolation` and `margin` as in nobackfill.framing.Frame, `shortest` by default the longer
    side of `size`; pixels are (value / 255 - mean) / std. `output`: its name, None for the first.
    `normalise`: to norm 1.
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
    margin: Margin = Field("nearest", exclude_if=lambda margin: margin == "nearest")
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


def weight_files(path: Path) -> list[Path]:
    """The ONNX file `path`, and every other file that its tensors name as the place of their data.

    Raises InvalidInputError for a place outside of its folder, a file that is missing, and for what
    is no ONNX.
    """
    beside = (path.with_name(path.name + end) for end in _WEIGHTS)
    files = [path, *(one for one in beside if one.is_file())]
    try:
        model = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise InvalidInputError(f"{path}: cannot be read as ONNX ({error})") from error
    for place in sorted(set(_locations(model))):
        inside = PurePosixPath(os.path.normpath(place))
        if inside.is_absolute() or ".." in inside.parts:
            raise InvalidInputError(
                f"{path}: expected weights in its own folder, got {place!r}; export it again with "
                "its data beside it"
            )
        if not (file := path.parent / inside).is_file():
            raise InvalidInputError(f"{path}: its weights {place!r} are not in its folder")
        if file not in files:
            files.append(file)
    return files


def _locations(part: Message) -> Iterator[str]:
    """Of each tensor in `part` of a model, wherever it stands, that has its data elsewhere."""
    if isinstance(part, TensorProto):
        if part.data_location == TensorProto.EXTERNAL:
            yield from (one.value for one in part.external_data if one.key == "location")
        return
    for field, value in part.ListFields():
        if field.message_type is not None:
            for below in value if isinstance(value, Sequence) else (value,):
                yield from _locations(below)


def digest(files: Sequence[Path]) -> str:
    """Hex SHA-256 of a file, or of what several hold."""
    digests = [sha256_file(file) for file in files]
    return digests[0] if len(digests) == 1 else sha256_bytes("\n".join(digests).encode())


def fingerprint(
    weights: Sequence[Path], declared: Declaration, tokenizer: Path | None = None
) -> str:
    """Name a model by everything that determines its vectors: its weight_files, the tokenizer, and
    what is declared."""
    files = [*weights, *(() if tokenizer is None else (tokenizer,))]
    parts = [sha256_file(one) for one in files]
    parts.append(json.dumps(declared.model_dump(), sort_keys=True))
    return sha256_bytes("\n".join(parts).encode())


def guess(path: Path, declared: Declaration) -> str:
    """Sentence for a person if nothing beside the ONNX file `path` says how it makes
    vectors of texts; empty where something does."""
    if _declaring_file(path) is not None:
        return ""
    vector = "the graph's own vector"
    if declared.pooling != "none":
        vector = f"the {declared.pooling} of its tokens' vectors"
    return (
        f"{path}: no file beside the model says how texts become vectors. Assumed: at most "
        f"{declared.max_length} tokens of a text, {vector}, scaled to norm 1. If the makers did "
        f"otherwise, write that into {path.with_suffix('.json').name}"
    )


def _declaring_file(path: Path) -> Path | None:
    own = path.with_suffix(".json")
    places = (own, path.parent / _MODULES, path.parent.parent / _MODULES)
    return next((place for place in places if place.is_file()), None)


def read_declaration(path: Path, outputs: Sequence[str]) -> Declaration:
    """Read the declaration of the ONNX file `path`, which reads texts; `outputs`: names of its
    graph's.

    A graph with an output `sentence_embedding` holds the whole model: that output is used, and no
    token is pooled. Raises InvalidInputError for what is declared and not applied here.
    """
    file = _declaring_file(path)
    if file is None:
        declared = Declaration()
    elif file.name == _MODULES:
        declared = _of_sentence_transformers(path, file, outputs)
    else:
        declared = _parsed(file, Declaration)
    if declared.output is None and _WHOLE in outputs[1:]:
        declared = declared.model_copy(update={"output": _WHOLE, "pooling": "none"})
    return declared


def read_pixels(path: Path) -> tuple[Declaration, Path | None]:
    """Read the declaration of the ONNX file `path`, which reads images, and its file; None
    where none does. Raises InvalidInputError."""
    own = path.with_suffix(".json")
    if own.is_file():
        return _parsed(own, Declaration), own
    if (found := read_preprocessing(path)) is None:
        return Declaration(), None
    file, said = found
    return Declaration().model_copy(update=dict(said)), file


_Parsed = TypeVar("_Parsed", bound=BaseModel)


def _parsed_if_there(file: Path, kind: type[_Parsed]) -> _Parsed:
    return _parsed(file, kind) if file.is_file() else kind()


def _parsed(file: Path, kind: type[_Parsed]) -> _Parsed:
    """Raises InvalidInputError that names `file`."""
    try:
        return kind.model_validate_json(file.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise InvalidInputError(f"{file}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise InvalidInputError(f"{file}: cannot be understood: {error}") from error


class _Module(BaseModel):
    path: str
    type: str


class _Modules(RootModel[Annotated[list[_Module], Field(min_length=1)]]):
    """modules.json."""


class _PoolingConfig(BaseModel):
    """config.json of a Pooling module: `pooling_mode` since 5.4, before that a flag a mode."""

    model_config = ConfigDict(extra="allow")
    pooling_mode: str | list[str] | None = None
    include_prompt: bool = True

    def modes(self) -> list[str]:
        if self.pooling_mode is not None:
            return [self.pooling_mode] if isinstance(self.pooling_mode, str) else self.pooling_mode
        flags = {
            name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
            for name, on in (self.model_extra or {}).items()
            if name.startswith("pooling_mode_") and on
        }
        return sorted(flags) or ["mean"]


class _Modality(BaseModel):
    method_output_name: str = "last_hidden_state"


class _TransformerConfig(BaseModel):
    """sentence_bert_config.json: what the Transformer module does with texts."""

    max_seq_length: int | None = Field(None, ge=1)
    do_lower_case: bool = False
    transformer_task: str = "feature-extraction"
    modality_config: dict[str, _Modality] = {}
    # Each changes what the model reads.
    processing_kwargs: dict[str, object] | None = None
    processor_kwargs: dict[str, object] | None = None
    tokenizer_args: dict[str, object] | None = None
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: dict[str, object] | None = None

    def unknown(self, *, whole: bool) -> list[str]:
        """List settings that nothing here applies; `whole`: the graph makes the vectors."""
        names = (
            "processing_kwargs", "processor_kwargs", "tokenizer_args", "query_length",
            "document_length", "query_expansion",
        )  # fmt: skip
        found = [name for name in names if getattr(self, name)]
        made = self.modality_config.get("text", _Modality()).method_output_name
        if not whole and made != "last_hidden_state":
            found.append(f"method_output_name {made}")
        if not whole and self.transformer_task != "feature-extraction":
            found.append(f"transformer_task {self.transformer_task}")
        return found


class _TokenizerConfig(BaseModel):
    """tokenizer_config.json. `model_max_length` may be 10**30, which means no limit."""

    model_max_length: float | None = None
    truncation_side: str = "right"


class _ModelConfig(BaseModel):
    """config.json of transformers. XLNet's -1 means no limit."""

    max_position_embeddings: int | None = None


class _Prompts(BaseModel):
    """config_sentence_transformers.json."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None


class _Normalizer(BaseModel):
    type: str
    lowercase: bool = False
    normalizers: list["_Normalizer"] = []


class _Tokenizer(BaseModel):
    """tokenizer.json."""

    normalizer: _Normalizer | None = None


def _of_sentence_transformers(path: Path, file: Path, outputs: Sequence[str]) -> Declaration:
    """Read what modules.json and its files declare for the graph `path`. Raises
    InvalidInputError for modules, modes and settings that are not applied here."""
    modules = _parsed(file, _Modules).root
    whole, own = _WHOLE in outputs, path.with_suffix(".json")
    export = f"export the whole model, so that its graph has an output {_WHOLE!r}"
    names = [module.type.rpartition(".")[2] for module in modules]
    pooling: Literal["mean", "cls", "none"] = "none"
    prompt_pooled = True
    for number, (name, module) in enumerate(zip(names, modules, strict=True)):
        known = name in _MODULES_AFTER.get(names[number - 1] if number else "", ())
        if not whole and not (known and module.type.startswith("sentence_transformers.")):
            raise _not_applied(file, f"module {module.path or number} ({module.type})", export)
        if name == "Pooling":
            place = file.parent / module.path / "config.json"
            config = _parsed(place, _PoolingConfig)
            modes, prompt_pooled = config.modes(), config.include_prompt
            if not whole and modes not in (["cls"], ["mean"]):
                raise _not_applied(place, f"pooling of {' with '.join(modes)}", export)
            pooling = "cls" if "cls" in modes else "mean" if "mean" in modes else "none"
    said: dict[str, Any] = {"pooling": pooling, "normalise": "Normalize" in names}
    if tokens := [name for name in _TOKENS if name in outputs and not whole]:
        # Left out where it is the first: fingerprints stay.
        said |= {} if outputs[0] in tokens else {"output": tokens[0]}
    transformer = file.parent / modules[0].path
    said["max_length"] = _max_length(transformer, path, whole=whole)
    return Declaration(**said, **_prefixes(file.parent, own, said, pooled=prompt_pooled))


def _not_applied(file: Path, what: str, instead: str) -> InvalidInputError:
    return InvalidInputError(f"{file}: {what} is not applied here; {instead}")


def _max_length(folder: Path, path: Path, *, whole: bool) -> int:
    """At how many tokens the model in `folder` cuts texts, as sentence-transformers takes it."""
    own = path.with_suffix(".json").name
    declare = f"declare all that makes its vectors in {own} beside the ONNX file"
    places = [place for place in sorted(folder.glob("sentence_*_config.json")) if place.is_file()]
    config = _parsed(places[0], _TransformerConfig) if places else _TransformerConfig()
    if unknown := config.unknown(whole=whole):
        raise _not_applied(places[0], ", ".join(unknown), declare)
    if config.do_lower_case and not _lowercases(tokenizer_file(path, Declaration())):
        raise _not_applied(
            places[0], "do_lower_case", "put a normalizer Lowercase into the model's tokenizer.json"
        )
    file = folder / "tokenizer_config.json"
    tokenizer = _parsed_if_there(file, _TokenizerConfig)
    if tokenizer.truncation_side != "right":
        raise _not_applied(file, f"truncation_side {tokenizer.truncation_side}", declare)
    if config.max_seq_length is not None:
        return config.max_seq_length
    positions = _parsed_if_there(folder / "config.json", _ModelConfig).max_position_embeddings
    limits = [one for one in (tokenizer.model_max_length, positions) if one is not None and one > 0]
    if min(limits, default=_NO_LIMIT) >= _NO_LIMIT:
        raise InvalidInputError(
            f"{folder}: nothing says at how many tokens the model cuts texts; write "
            '{"max_seq_length": 512}, or its own number, into sentence_bert_config.json'
        )
    return int(min(limits))


def _lowercases(tokenizer: Path) -> bool:
    """Whether a tokenizer.json reads capitals as small letters."""
    normalizer = _parsed(tokenizer, _Tokenizer).normalizer
    steps = [] if normalizer is None else [normalizer, *normalizer.normalizers]
    return any(one.type == "Lowercase" or one.lowercase for one in steps)


def _prefixes(folder: Path, own: Path, said: dict[str, Any], *, pooled: bool) -> dict[str, str]:
    """Prompts before the texts of each role, where the model's makers say so; `pooled`: its tokens
    are pooled with the text's."""
    file = folder / "config_sentence_transformers.json"
    config = _parsed_if_there(file, _Prompts)
    prompts = config.prompts or {}
    document = prompts.get("document") or prompts.get("passage") or prompts.get("corpus") or ""
    query = prompts.get("query")
    if not pooled and (document or query):
        raise _not_applied(
            file,
            "a prompt whose tokens are not pooled (include_prompt false)",
            "export the model with a pooling that includes it",
        )
    default = prompts.get(config.default_prompt_name or "") or document
    if default != document:
        wanted = json.dumps(said | {"prefix": default})
        raise _not_applied(
            file,
            f"default_prompt_name {config.default_prompt_name}, which encode() alone follows,",
            f"write {wanted}, or another prefix, into {own}",
        )
    return {"prefix": document} | ({} if query is None else {"query_prefix": query})
