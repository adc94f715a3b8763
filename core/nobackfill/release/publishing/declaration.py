"""Read declarations about an ONNX model that others exported: pooling, prefix, tokenizer, pixels.

A declaration is `NAME.json` next to `NAME.onnx`. Without it, the files that sentence-transformers
exports are read; for pixels, the files of transformers, open_clip and timm.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar, cast

import onnx
from google.protobuf.message import DecodeError, Message
from onnx import TensorProto
from pydantic import BaseModel, ConfigDict, Field

from nobackfill.digests import sha256_bytes, sha256_file
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.framing import Fit, Interpolation, MarginRounding
from nobackfill.release.manifest import TextRole
from nobackfill.release.publishing.preprocessing import (
    Channels,
    ChannelSpread,
    Side,
    Size,
    read_preprocessing,
)
from nobackfill.release.publishing.sentence_head import Layer, LayerKind, PoolingMode, read_layer
from nobackfill.release.publishing.sentence_modules import MODULES, parse_model_file, read_modules

_TOKENIZER = "tokenizer.json"
# Suffixes of files that usually hold the larger weights of an ONNX file: always part of the digest.
_WEIGHTS = ("_data", ".data")
# Output of a graph that contains all modules of a sentence-transformers model.
_SENTENCE_OUTPUT = "sentence_embedding"
# Outputs with a vector for each token, which are pooled here.
_TOKENS = ("token_embeddings", "last_hidden_state")
# The module that averages vectors of a table, in place of a Transformer.
STATIC_MODULE = "StaticEmbedding"
_LAYERS = ("Dense", "LayerNorm", "Normalize")
# For each module of sentence-transformers, the modules that may follow it and are applied here.
_MODULES_AFTER = {
    "": ("Transformer", STATIC_MODULE),
    STATIC_MODULE: _LAYERS,
    "Transformer": ("Pooling", *_LAYERS),
    "Pooling": _LAYERS,
    **dict.fromkeys(_LAYERS, _LAYERS),
}
# Modes of pooling by their flags of before 5.4, in the order in which the vectors are joined.
_FLAGS: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Larger limits mean no limit: tokenizer_config.json has 10**30.
_NO_LIMIT = 1 << 30


class Declaration(BaseModel):
    """Facts about a model that its ONNX file does not contain.

    Attributes:
        tokenizer: Name of the tokenizer's file, next to the ONNX file or one folder above.
        prefix: Text that is put before each text.
        query_prefix: Text that is put before queries instead; None: the same as `prefix`.
        max_length: Tokens after which a text is truncated.
        pooling: How the vectors of tokens become one; several modes are joined; none: the graph
            does it.
        layers: Modules behind the pooling that the graph does not contain.
        lower_case: Whether texts are converted to lower case before the tokenizer's own steps.
        output: Name of the output to use; None: the first.
        normalise: Whether vectors are scaled to norm 1.
        size: Sides of the input in pixels, one number or (height, width), where the graph leaves
            them open.
        fit: As in nobackfill.framing.Frame.
        shortest: As in nobackfill.framing.Frame; None: the longer side of `size`.
        interpolation: As in nobackfill.framing.Frame.
        margin: As in nobackfill.framing.Frame.
        mean: Subtracted from value / 255 of each channel.
        std: Divides the difference.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    tokenizer: str = _TOKENIZER
    prefix: str = ""
    query_prefix: str | None = Field(None, exclude_if=lambda prefix: prefix is None)
    max_length: int = Field(256, ge=1)
    pooling: Literal["none"] | PoolingMode | tuple[PoolingMode, ...] = "mean"
    layers: tuple[Layer, ...] = Field((), exclude_if=lambda layers: not layers)
    lower_case: bool = Field(False, exclude_if=lambda lower: not lower)
    output: str | None = None
    normalise: bool = True
    size: Side | Size | None = None
    # Defaults are left out of the JSON: models from before these fields keep their fingerprint.
    fit: Fit = Field("stretch", exclude_if=lambda fit: fit == "stretch")
    shortest: Side | None = Field(None, exclude_if=lambda side: side is None)
    interpolation: Interpolation = Field("bilinear", exclude_if=lambda name: name == "bilinear")
    margin: MarginRounding = Field("nearest", exclude_if=lambda margin: margin == "nearest")
    mean: Channels = (0.485, 0.456, 0.406)
    std: ChannelSpread = (0.229, 0.224, 0.225)

    @property
    def prefix_of_queries(self) -> str:
        """Return the text that is put before queries."""
        return self.prefix if self.query_prefix is None else self.query_prefix

    @property
    def pooling_modes(self) -> tuple[PoolingMode, ...]:
        """Return the modes that are joined; none where the graph pools."""
        if self.pooling == "none":
            return ()
        return (self.pooling,) if isinstance(self.pooling, str) else self.pooling


def find_tokenizer_file(path: Path, declaration: Declaration) -> Path:
    """Find the tokenizer of a model, next to its ONNX file or one folder above.

    Args:
        path: The ONNX file.
        declaration: Names the tokenizer; the name may have folders. A name that is absolute or
            leads out of these folders is followed.

    Returns:
        The file next to the ONNX file, if both places have one. Its content is not read.

    Raises:
        NotFoundError: No such file.
    """
    places = [folder / declaration.tokenizer for folder in (path.parent, *path.parent.parents[:1])]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise NotFoundError(
            f"{places[0]}: the model has no tokenizer there; put its tokenizer.json next to the "
            "ONNX file"
        )
    return file


def read_tokenizer(file: Path, declaration: Declaration) -> bytes:
    """Return the tokenizer of a model as the model reads texts.

    With `lower_case`, a normalizer that converts to lower case comes before its own, as in
    sentence-transformers.

    Args:
        file: The tokenizer.json.
        declaration: The declared facts.

    Returns:
        The bytes of the file unchanged, or with `lower_case` as new JSON. Without `lower_case` the
        content is not checked.

    Raises:
        OSError: The file cannot be read.
        InvalidInputError: With `lower_case`: the file is no JSON object, or has half a surrogate
            pair. Its keys are not checked.
        RecursionError: With `lower_case`: its JSON is nested hundreds of levels deep.
    """
    data = file.read_bytes()
    if not declaration.lower_case:
        return data
    try:
        tokenizer = json.loads(data)
        own = tokenizer.get("normalizer")
        steps = [{"type": "Lowercase"}] + ([] if own is None else [own])
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": steps}
        return json.dumps(tokenizer, ensure_ascii=False).encode()
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidInputError(
            f"{file}: cannot be read as a tokenizer.json ({error}); save the tokenizer again"
        ) from error


def list_weight_files(path: Path) -> list[Path]:
    """List an ONNX file and all files that hold weights of its tensors.

    Only the ONNX file is read.

    Args:
        path: The ONNX file.

    Returns:
        The ONNX file first, each file once. Files with the suffixes .data and _data next to it
        count even if no tensor names them. The others follow by their names in the graph.

    Raises:
        InvalidInputError: The ONNX file is missing, cannot be read or is no ONNX; or a file of
            weights is missing or outside of the folder.
        google.protobuf.json_format.ParseError: The file's name ends with .json, and it is no model
            in JSON; for .textproto, ParseError of google.protobuf.text_format.
    """
    candidates = (path.with_name(path.name + end) for end in _WEIGHTS)
    files = [path, *(one for one in candidates if one.is_file())]
    try:
        model = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise InvalidInputError(
            f"{path}: cannot be read as an ONNX model ({error}); export the model again"
        ) from error
    for place in sorted(set(_locations(model))):
        relative = PurePosixPath(os.path.normpath(place))
        if relative.is_absolute() or ".." in relative.parts:
            raise InvalidInputError(
                f"{path}: expected the model's file of weights in the folder of the ONNX file, "
                f"got {place!r}; export the model again with its weights next to the ONNX file"
            )
        if not (file := path.parent / relative).is_file():
            raise InvalidInputError(
                f"{path}: the model's file of weights {place!r} is not in its folder; copy it there"
            )
        if file not in files:
            files.append(file)
    return files


def _locations(part: Message) -> Iterator[str]:
    """Yield the file name of each tensor in a part of a model that stores its data outside."""
    if isinstance(part, TensorProto):
        if part.data_location == TensorProto.EXTERNAL:
            yield from (one.value for one in part.external_data if one.key == "location")
        return
    for field, value in part.ListFields():
        if field.message_type is not None:
            for child in value if isinstance(value, Sequence) else (value,):
                yield from _locations(child)


def hash_model_files(files: Sequence[Path]) -> str:
    """Return the SHA-256 of a file, or of the digests of several in this order, as 64 hex digits.

    For one file it is the digest of its content, so that it equals `sha256sum`.

    Args:
        files: At least one file.

    Raises:
        OSError: A file cannot be read.
    """
    digests = [sha256_file(file) for file in files]
    return digests[0] if len(digests) == 1 else sha256_bytes("\n".join(digests).encode())


def fingerprint_model(
    weights: Sequence[Path], declaration: Declaration, tokenizer: Path | None = None
) -> str:
    """Return a SHA-256 in hex that names a model by everything that determines its vectors.

    The order of the files counts; their names do not. A field of the declaration counts unless it
    has a default that is left out of the JSON. All files are read at each call.

    Args:
        weights: The model's files, see `list_weight_files`.
        declaration: The declared facts.
        tokenizer: The file of its tokenizer, None without one.

    Raises:
        OSError: A file cannot be read.
    """
    files = [*weights, *(() if tokenizer is None else (tokenizer,))]
    parts = [sha256_file(one) for one in files]
    parts.append(json.dumps(declaration.model_dump(), sort_keys=True))
    return sha256_bytes("\n".join(parts).encode())


def describe_assumptions(path: Path, declaration: Declaration) -> str:
    """Describe, for a person, the assumptions about a text model without a declaration.

    A file that declares it is NAME.json, or modules.json in the folder or one above; its content is
    not read.

    Args:
        path: The ONNX file.
        declaration: The declaration in use.

    Returns:
        Empty if a file next to the model declares how it makes vectors.
    """
    if _declaring_file(path) is not None:
        return ""
    vector = "the graph's own vector"
    if declaration.pooling != "none":
        vector = f"the {' and '.join(declaration.pooling_modes)} of its tokens' vectors"
    return (
        f"{path}: no file next to the model declares how texts become vectors. Assumed: at most "
        f"{declaration.max_length} tokens of a text, {vector}, scaled to norm 1. If the model was "
        f"trained otherwise, declare that in {path.with_suffix('.json').name}"
    )


def _declaring_file(path: Path) -> Path | None:
    own = path.with_suffix(".json")
    places = (own, path.parent / MODULES, path.parent.parent / MODULES)
    return next((place for place in places if place.is_file()), None)


def read_text_declaration(
    path: Path, output_names: Sequence[str], role: TextRole = "document"
) -> Declaration:
    """Read the declaration of an ONNX file that embeds texts.

    A graph with an output `sentence_embedding` contains the whole model: that output is used,
    without pooling. If it is the first output, a NAME.json and the defaults keep their `pooling`,
    which counts only for outputs of three axes. NAME.json wins over modules.json in the folder, and
    this over modules.json one folder above. Without any, defaults are returned. A declared `output`
    is used instead, with the declared pooling.

    Args:
        path: The ONNX file; only files next to it and one folder above are read.
        output_names: Names of the graph's outputs, at least one.
        role: The role of the texts. It decides which route of a Router is declared; a prefix for
            each role is always declared.

    Raises:
        InvalidInputError: A file cannot be read, is no JSON of this kind, has unknown keys
            (NAME.json only), or declares something that is not applied here.
        NotFoundError: The tokenizer is missing, where modules.json declares lower case.
    """
    file = _declaring_file(path)
    if file is None:
        declaration = Declaration()
    elif file.name == MODULES:
        declaration = _of_sentence_transformers(path, file, output_names, role)
    else:
        declaration = parse_model_file(file, Declaration)
    if declaration.output is None and _SENTENCE_OUTPUT in output_names[1:]:
        declaration = declaration.model_copy(update={"output": _SENTENCE_OUTPUT, "pooling": "none"})
    return declaration


def read_image_declaration(path: Path) -> tuple[Declaration, Path | None]:
    """Read the declaration of an ONNX file that embeds images.

    Unknown keys of NAME.json are refused.

    Args:
        path: The ONNX file.

    Returns:
        The declaration, and the file that holds it; defaults and None where there is none.
        NAME.json wins over other files.

    Raises:
        InvalidInputError: A file cannot be read, is no JSON of its kind, or declares something that
            is not applied here.
    """
    own = path.with_suffix(".json")
    if own.is_file():
        return parse_model_file(own, Declaration), own
    if (found := read_preprocessing(path)) is None:
        return Declaration(), None
    file, preprocessing = found
    return Declaration().model_copy(update=dict(preprocessing)), file


_Model = TypeVar("_Model", bound=BaseModel)


def _parse_if_present(file: Path, kind: type[_Model]) -> _Model:
    return parse_model_file(file, kind) if file.is_file() else kind()


class _PoolingConfig(BaseModel):
    """The config.json of a Pooling module: `pooling_mode` since 5.4, before that a flag for each
    mode."""

    model_config = ConfigDict(extra="allow")
    pooling_mode: str | list[str] | None = None
    include_prompt: bool = True

    def modes(self) -> tuple[str, ...]:
        if self.pooling_mode is not None:
            modes = self.pooling_mode
            return (modes,) if isinstance(modes, str) else tuple(modes)
        flags = {flag for flag, on in (self.model_extra or {}).items() if on}
        known = tuple(mode for flag, mode in _FLAGS.items() if flag in flags)
        unknown = {flag for flag in flags if flag.startswith("pooling_mode_")} - set(_FLAGS)
        return (*known, *sorted(unknown)) or ("mean",)


class _Modality(BaseModel):
    method_output_name: str = "last_hidden_state"


class _TransformerConfig(BaseModel):
    """The content of sentence_bert_config.json: how the Transformer module reads texts."""

    max_seq_length: int | None = Field(None, ge=1)
    do_lower_case: bool = False
    transformer_task: str = "feature-extraction"
    modality_config: dict[str, _Modality] = {}
    # Each of these changes what the model reads.
    processing_kwargs: dict[str, object] | None = None
    processor_kwargs: dict[str, object] | None = None
    tokenizer_args: dict[str, object] | None = None
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: dict[str, object] | None = None

    def unknown(self, *, complete: bool) -> list[str]:
        """List the settings that are not applied here.

        Args:
            complete: Whether the graph makes the vectors itself.
        """
        names = (
            "processing_kwargs", "processor_kwargs", "tokenizer_args", "query_length",
            "document_length", "query_expansion",
        )  # fmt: skip
        unknown = [name for name in names if getattr(self, name)]
        output = self.modality_config.get("text", _Modality()).method_output_name
        if not complete and output != "last_hidden_state":
            unknown.append(f"method_output_name {output}")
        if not complete and self.transformer_task != "feature-extraction":
            unknown.append(f"transformer_task {self.transformer_task}")
        return unknown


class _TokenizerConfig(BaseModel):
    """The content of tokenizer_config.json; a `model_max_length` of 10**30 means no limit."""

    model_max_length: float | None = None
    truncation_side: str = "right"


class _ModelConfig(BaseModel):
    """The config.json of transformers; -1 means no limit (XLNet)."""

    max_position_embeddings: int | None = None


class _Prompts(BaseModel):
    """The content of config_sentence_transformers.json."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None


class _Normalizer(BaseModel):
    type: str
    lowercase: bool = False
    normalizers: list["_Normalizer"] = []


class _Tokenizer(BaseModel):
    """The content of tokenizer.json."""

    normalizer: _Normalizer | None = None


def read_static_declaration(folder: Path, role: TextRole) -> Declaration:
    """Read the declaration of a folder whose first module is a StaticEmbedding.

    Its tokens are averaged, and its tokenizer.json truncates: neither is declared.

    Args:
        folder: The folder with modules.json.
        role: The role of the texts, which decides the route of a Router.

    Raises:
        InvalidInputError: A file cannot be read or has unexpected content, or declares something
            that is not applied here.
    """
    path = folder / "model.onnx"
    return _of_sentence_transformers(path, folder / MODULES, (_SENTENCE_OUTPUT,), role, static=True)


def _of_sentence_transformers(
    path: Path, file: Path, outputs: Sequence[str], role: TextRole, *, static: bool = False
) -> Declaration:
    """Read what modules.json and the files that it names declare.

    Args:
        path: The ONNX file.
        file: modules.json.
        outputs: Names of the graph's outputs.
        role: The role of the texts.
        static: Whether the first module is a StaticEmbedding, and no graph stands for it.

    Raises InvalidInputError for modules, modes and settings that are not applied here.
    """
    modules = read_modules(file.parent, role)
    complete, own = _SENTENCE_OUTPUT in outputs and not static, path.with_suffix(".json")
    export = f"export the whole model, so that its graph has an output {_SENTENCE_OUTPUT!r}"
    names = [module.kind for module in modules]
    pooling: Any = "none"
    layers: list[Layer] = []
    prompt_pooled = True
    for number, (name, module) in enumerate(zip(names, modules, strict=True)):
        follows = name in _MODULES_AFTER.get(names[number - 1] if number else "", ())
        known = follows and module.is_of_library and (name == STATIC_MODULE) <= static
        if not complete and not known:
            raise _not_applied(file, f"module {module.path or number} ({module.type})", export)
        if name == "Pooling":
            place = file.parent / module.path / "config.json"
            config = parse_model_file(place, _PoolingConfig)
            modes, prompt_pooled = config.modes(), config.include_prompt
            if not complete and not set(modes) <= set(_FLAGS.values()):
                raise _not_applied(place, f"pooling of {' with '.join(modes)}", export)
            pooling = modes[0] if len(modes) == 1 else modes
            if complete:
                # The graph pools; fingerprints stay as they were.
                pooling = "cls" if "cls" in modes else "mean" if "mean" in modes else "none"
        elif name in _LAYERS and not complete:
            layers.append(read_layer(cast(LayerKind, name), file.parent / module.path))
    normalise = names[-1] == "Normalize" or (complete and "Normalize" in names)
    if normalise and layers:
        layers.pop()
    fields: dict[str, Any] = {"pooling": pooling, "normalise": normalise}
    fields |= {"layers": tuple(layers)} if layers else {}
    if tokens := [name for name in _TOKENS if name in outputs and not complete]:
        # The first output is left out: fingerprints stay as they were.
        fields |= {} if outputs[0] in tokens else {"output": tokens[0]}
    first = modules[0].path
    if first and (file.parent / first / _TOKENIZER).is_file():
        fields["tokenizer"] = f"{first}/{_TOKENIZER}"
    if not static:
        tokenizer = fields.get("tokenizer", _TOKENIZER)
        folder = file.parent / first
        fields["max_length"], lower_case = _reading(folder, path, tokenizer, complete=complete)
        fields |= {"lower_case": True} if lower_case else {}
    prefixes = _prefixes(file.parent, None if static else own, fields, pooled=prompt_pooled)
    return Declaration(**fields, **prefixes)


def _not_applied(file: Path, what: str, instead: str) -> InvalidInputError:
    return InvalidInputError(f"{file}: nobackfill does not apply {what}; {instead}")


def _reading(folder: Path, path: Path, tokenizer_name: str, *, complete: bool) -> tuple[int, bool]:
    """Return after how many tokens sentence-transformers truncates texts for this model, and
    whether it converts them to lower case although the tokenizer does not."""
    own = path.with_suffix(".json").name
    declare = f"declare all that makes its vectors in {own} next to the ONNX file"
    places = [place for place in sorted(folder.glob("sentence_*_config.json")) if place.is_file()]
    config = parse_model_file(places[0], _TransformerConfig) if places else _TransformerConfig()
    if unknown := config.unknown(complete=complete):
        raise _not_applied(places[0], ", ".join(unknown), declare)
    lower_case = config.do_lower_case and not _lowercases(
        find_tokenizer_file(path, Declaration(tokenizer=tokenizer_name))
    )
    file = folder / "tokenizer_config.json"
    tokenizer = _parse_if_present(file, _TokenizerConfig)
    if tokenizer.truncation_side != "right":
        raise _not_applied(file, f"truncation_side {tokenizer.truncation_side}", declare)
    if config.max_seq_length is not None:
        return config.max_seq_length, lower_case
    positions = _parse_if_present(folder / "config.json", _ModelConfig).max_position_embeddings
    limits = [one for one in (tokenizer.model_max_length, positions) if one is not None and one > 0]
    if min(limits, default=_NO_LIMIT) >= _NO_LIMIT:
        raise InvalidInputError(
            f"{folder}: no file declares after how many tokens the model truncates texts; write "
            '{"max_seq_length": 512}, or the number of this model, into sentence_bert_config.json'
        )
    return int(min(limits)), lower_case


def _lowercases(tokenizer: Path) -> bool:
    """Tell whether a tokenizer.json converts texts to lower case."""
    normalizer = parse_model_file(tokenizer, _Tokenizer).normalizer
    steps = [] if normalizer is None else [normalizer, *normalizer.normalizers]
    return any(one.type == "Lowercase" or one.lowercase for one in steps)


def _prefixes(
    folder: Path, own: Path | None, fields: dict[str, Any], *, pooled: bool
) -> dict[str, str]:
    """Return the prompts for documents and queries that the model's files declare.

    Args:
        folder: The model's folder.
        own: The model's declaration, for the message; None where it can have none.
        fields: The other fields of the declaration, for the message.
        pooled: Whether tokens of prompts are pooled with those of the text.
    """
    file = folder / "config_sentence_transformers.json"
    config = _parse_if_present(file, _Prompts)
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
        if own is None:
            raise _not_applied(
                file,
                f"default_prompt_name {config.default_prompt_name}, which encode() alone follows,",
                'name that prompt "document" there, or write "default_prompt_name": null',
            )
        if "layers" in fields:
            raise _not_applied(
                file,
                f"default_prompt_name {config.default_prompt_name} with modules behind the pooling",
                f"export the whole model, so that its graph has an output {_SENTENCE_OUTPUT!r}",
            )
        declaration = json.dumps(fields | {"prefix": default})
        raise _not_applied(
            file,
            f"default_prompt_name {config.default_prompt_name}, which encode() alone follows,",
            f"write {declaration}, or another prefix, into {own}",
        )
    return {"prefix": document} | ({} if query is None else {"query_prefix": query})
