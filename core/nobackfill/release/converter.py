"""The manifest `converter-N.json`: a signed map between the spaces of two models that others made.

Neither model is in the publication: a fingerprint names each, and vectors of another one are
refused, as the same dimension is not the same space. The map is `converter-N.onnx`, input
`embedding` float32 [n, old.dim], output `upgraded` float32 [n, new.dim].
"""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from nobackfill.errors import UnfitError, few
from nobackfill.release.encoders import PublishedFile, Sha256, Strict

_MANIFEST = re.compile(r"converter-([1-9][0-9]{0,6})\.json")
_Share = Annotated[float, Field(ge=0, le=1)]


class ModelCard(Strict):
    """One of the two models. `fingerprint` is the digest of all that makes its vectors: weights,
    tokenizer, pooling, prefix, length; `weights` and `declared` say it in parts, where they are
    known. `unit`: its vectors have norm 1."""

    name: str = Field(min_length=1)
    licence: str = Field(min_length=1)
    fingerprint: Sha256
    dim: int = Field(ge=1, le=65536)
    unit: bool
    weights: Sha256 | None = None
    declared: dict[str, str] = Field(default_factory=dict)


class ConverterEvidence(Strict):
    """What was measured on pairs that the map was fitted without. `ways`: figures of each way to go
    on by its name, `stay` among them; `way` is the recommended one. `healing`: each figure
    by name with 0, 10 … 100 % of the items embedded again, ranked by calibrated scores; `raw`: the
    same, by distance."""

    corpus: str = Field(min_length=1)
    corpus_licence: str = Field(min_length=1)
    pairs: int = Field(ge=2)
    search: str
    judged_by: str
    way: str
    ways: dict[str, dict[str, _Share]]
    healing: dict[str, tuple[_Share, ...]]
    raw: dict[str, tuple[_Share, ...]]


class Converter(Strict):
    """Converter N. Raises pydantic.ValidationError; files are read by `parse_converter`."""

    format: Literal[1] = 1
    converter: int = Field(ge=1, le=1_000_000)
    kind: str
    file: PublishedFile
    old: ModelCard
    new: ModelCard
    evidence: ConverterEvidence
    created: str

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.file.path != converter_path(self.converter):
            raise ValueError(f"expected {converter_path(self.converter)}, got {self.file.path}")
        if self.old.fingerprint == self.new.fingerprint:
            raise ValueError("expected two models, got one fingerprint twice")
        return self


def converter_path(number: int) -> str:
    """The ONNX file of converter N."""
    return f"converter-{number}.onnx"


def converter_manifest_path(number: int) -> str:
    """The manifest of converter N."""
    return f"converter-{number}.json"


def number_of_converter(path: str) -> int | None:
    """N of `converter-N.json`, None for every other path."""
    named = _MANIFEST.fullmatch(path)
    return int(named[1]) if named is not None else None


def parse_converter(text: str | bytes, number: int) -> Converter:
    """Read a manifest. Raises UnfitError in one line."""
    try:
        found = Converter.model_validate_json(text)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problems)
        raise UnfitError(
            f"converter {number}: its manifest cannot be used ({few(wrong)}); it may need a newer "
            "nobackfill"
        ) from error
    if found.converter != number:
        raise UnfitError(f"converter {number}: its manifest says it is {found.converter}")
    return found
