"""What a publisher says of a converter: both models, whose they are, and what it was fitted on."""

from codecs import BOM_UTF8
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nobackfill.adopt.embedding.opening import open_embedder
from nobackfill.adopt.maps import is_unit
from nobackfill.adopt.sources.source import same_model
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError, NotFoundError
from nobackfill.release.converter import ModelCard
from nobackfill.release.publishing.declaration import digest, weight_files
from nobackfill.vectors import Vectors


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1)
    licence: str = Field(min_length=1)
    # As `embed --with` takes it; a file's path is taken from the card's folder.
    model: str
    model_name: str | None = None


class Card(BaseModel):
    """`--card FILE`: a JSON object."""

    model_config = ConfigDict(extra="forbid")
    old: _Model
    new: _Model
    corpus: str = Field(min_length=1)
    corpus_licence: str = Field(min_length=1)


def read_card(path: Path) -> Card:
    """Raises NotFoundError, InvalidInputError that names what is missing."""
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file; --card expects a JSON file")
    try:
        card = Card.model_validate_json(path.read_bytes().removeprefix(BOM_UTF8))
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise InvalidInputError(
            f'{path}: {place}: {wrong["msg"]}; expected {{"old": {{"name", "licence", "model"}}, '
            '"new": …, "corpus", "corpus_licence"}}'
        ) from error
    for one in (card.old, card.new):
        if one.model.endswith(".onnx"):
            one.model = str(path.parent / one.model)
    return card


def model_card(said: _Model, vectors: Vectors, made_by: str | None, where: str) -> ModelCard:
    """The model itself is opened, and must be the one that made the vectors.

    Raises IncompatibleSpaceError, also where nobody knows who did, and what opening it raises.
    """
    if made_by is None:
        raise IncompatibleSpaceError(
            f"{where}: nothing says which model made them (the space of a release does not); embed "
            "them with `nobackfill embed`, or give --queries-old, whose model is known"
        )
    embedder = open_embedder(said.model, name=said.model_name)
    same_model(embedder.fingerprint, made_by, f"{said.model} and {where}")
    weights = digest(weight_files(Path(said.model))) if said.model.endswith(".onnx") else None
    declared = getattr(embedder, "declared", {})
    return ModelCard(
        name=said.name,
        licence=said.licence,
        fingerprint=embedder.fingerprint,
        dim=vectors.shape[1],
        unit=is_unit(vectors),
        weights=weights,
        declared={name: str(value) for name, value in declared.items() if value is not None},
    )
