"""Converters between public models: published by a user with pairs, used by one without.

A converter is a map as an ONNX graph, in a publication. Everything is verified when it is read: the
metadata by a root that the user gave once, the files by the metadata, the fingerprint of the
vectors' model by the manifest.
"""

import os
import re
from codecs import BOM_UTF8
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nobackfill.adopt.crossfit import CONVERTER
from nobackfill.adopt.embedding.embedder import open_embedder
from nobackfill.adopt.maps import NEW_MODEL, OLD_MODEL, Map, is_unit, load_map
from nobackfill.adopt.pairs import Pairs
from nobackfill.adopt.sources.source import Facts, fingerprint_of, same_model
from nobackfill.adopt.verdict import Verdict
from nobackfill.digests import sha256_bytes
from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    NotFoundError,
    PreconditionError,
    UnfitError,
)
from nobackfill.release.manifest import (
    Converter,
    ConverterEvidence,
    ModelCard,
    PublishedFile,
)
from nobackfill.release.publishing.declaration import hash_model_files, weight_files
from nobackfill.release.publishing.publish import publish_converter
from nobackfill.release.trust.trust import (
    Trust,
    converter_file,
    converter_numbers,
    fetcher_for,
    fingerprint,
    first_root,
    known_converters,
    read_converter,
    refuse_withdrawn,
)
from nobackfill.vectors import Vectors, check_vectors


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1)
    licence: str = Field(min_length=1)
    # As `embed --with` takes it; a file's path is taken from the card's folder.
    model: str
    model_name: str | None = None


class Card(BaseModel):
    """Both models, the corpus and their licences: the JSON object of `--card FILE`."""

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


def model_card(model: _Model, vectors: Vectors, made_by: str | None, where: str) -> ModelCard:
    """The model itself is opened, and must be the one that made the vectors.

    Raises IncompatibleSpaceError, also where nobody knows who did, and what opening it raises.
    """
    if made_by is None:
        raise IncompatibleSpaceError(
            f"{where}: nothing says which model made them (the space of a release does not); embed "
            "them with `nobackfill embed`, or give --queries-old, whose model is known"
        )
    embedder = open_embedder(model.model, name=model.model_name)
    same_model(embedder.fingerprint, made_by, f"{model.model} and {where}")
    weights = (
        hash_model_files(weight_files(Path(model.model))) if model.model.endswith(".onnx") else None
    )
    declared = getattr(embedder, "declared", {})
    return ModelCard(
        name=model.name,
        licence=model.licence,
        fingerprint=embedder.fingerprint,
        dim=vectors.shape[1],
        unit=is_unit(vectors),
        weights=weights,
        declared={name: str(value) for name, value in declared.items() if value is not None},
    )


_OPSET = 17
# The least norm that `normalised` divides by: a row of zeros stays as it is.
_LEAST_NORM = 1e-12


def graph_of(mapping: Map) -> bytes:
    """`embedding` float32 [n, a] -> `upgraded` float32 [n, b], of norm 1 with `unit`."""
    a, b = mapping.dims
    constants = {"weight": mapping.weight, "bias": mapping.bias}
    mapped = "mapped" if mapping.unit else "upgraded"
    straight = "straight" if mapping.layers else mapped
    nodes = [helper.make_node("Gemm", ["embedding", "weight", "bias"], [straight], transB=1)]
    hidden = "embedding"
    for number, (weight, bias) in enumerate(mapping.layers):
        names = [f"weight_{number}", f"bias_{number}"]
        constants |= dict(zip(names, (weight, bias), strict=True))
        if number:
            nodes.append(helper.make_node("Relu", [hidden], [f"hidden_{number}"]))
            hidden = f"hidden_{number}"
        nodes.append(helper.make_node("Gemm", [hidden, *names], [f"layer_{number}"], transB=1))
        hidden = f"layer_{number}"
    if mapping.layers:
        nodes.append(helper.make_node("Add", [straight, hidden], [mapped]))
    if mapping.unit:
        constants["least"] = np.array(_LEAST_NORM, np.float32)
        nodes += [
            helper.make_node("ReduceL2", ["mapped"], ["length"], axes=[1], keepdims=1),
            helper.make_node("Max", ["length", "least"], ["norm"]),
            helper.make_node("Div", ["mapped", "norm"], ["upgraded"]),
        ]
    graph = helper.make_graph(
        nodes,
        "converter",
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["n", a])],
        [helper.make_tensor_value_info("upgraded", TensorProto.FLOAT, ["n", b])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opset = [helper.make_opsetid("", _OPSET)]
    data: bytes = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    return data


def upgrade_of(mapping: Map) -> bytes:
    """The same with the map's kind and facts beside the graph: for `export.py --upgrade`."""
    model = onnx.load_from_string(graph_of(mapping))
    helper.set_model_props(model, {"kind": mapping.kind, **mapping.facts})
    data: bytes = model.SerializeToString()
    return data


def map_of(data: bytes, kind: str, facts: dict[str, str]) -> Map:
    """The map of such a graph. Raises UnfitError for any other, also one that computes another
    thing than its constants say."""
    try:
        graph = onnx.load_from_string(data).graph
        constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
        weight, bias = constants["weight"], constants["bias"]
        checked = check_vectors(weight, weight.shape[1], what="weight")
        shift = check_vectors(bias[None], len(weight), what="bias")[0]
    except Exception as error:
        # Errors of protobuf, onnx and numpy at hostile bytes have no common base class.
        raise UnfitError(
            f"expected a linear map as `converter publish` writes it ({error})"
        ) from error
    found = Map(kind, checked, shift, "least" in constants, facts)
    # Compared and not run: a stranger's graph may never end.
    if onnx.load_from_string(graph_of(found)).graph != graph:
        raise UnfitError("expected a graph that gives what its weight and bias say; it does not")
    return found


DEFAULT_REPO = "model_repo"


@dataclass(frozen=True)
class VerifiedConverter:
    """A verified converter, and its map."""

    manifest: Converter
    mapping: Map

    @property
    def sentence(self) -> str:
        """Both models, their licences and the measured quality, in one line."""
        one, said = self.manifest, self.manifest.evidence
        figures = {name: ways.get(said.judged_by, 0.0) for name, ways in said.ways.items()}
        shown = ", ".join(f"{name} {100 * value:.1f}" for name, value in figures.items())
        return (
            f"converter {one.converter}: {one.old.name} ({one.old.licence}) to {one.new.name} "
            f"({one.new.licence}), {said.pairs} pairs of {said.corpus}; {said.judged_by} there, %: "
            f"{shown}; its verdict: {said.way}"
        )


def publish(
    repo: Path, verdict: Verdict, pairs: Pairs, models: tuple[str | None, str | None], card: Card
) -> Converter:
    """Sign and publish the map of a verdict. `models`: fingerprints that the vectors carry.

    Raises PreconditionError where the new model is worse than the old one, IncompatibleSpaceError
    where the card names other models than made the vectors, and what publishing raises.
    """
    again = next(way for way in verdict.ways if way.name == "re-embed")
    if again.worse:
        raise PreconditionError(
            f"not published: {card.new.name} is worse than {card.old.name} on {card.corpus} "
            f"({', '.join(again.worse)}); nobody is helped by a map there"
        )
    old = model_card(card.old, pairs.old, models[0], "the old vectors")
    new = model_card(card.new, pairs.new, models[1], "the new vectors")
    evidence = ConverterEvidence(
        corpus=card.corpus,
        corpus_licence=card.corpus_licence,
        pairs=verdict.pairs,
        search=verdict.search,
        judged_by=verdict.judged_by,
        way=verdict.way,
        ways={way.name: way.figures for way in verdict.ways},
        healing={name: tuple(c) for name, c in verdict.healing.calibrated.items()},
        raw={name: tuple(c) for name, c in verdict.healing.raw.items()},
    )

    def described(number: int, file: PublishedFile) -> Converter:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return Converter(
            converter=number, kind=verdict.map.kind, file=file, old=old, new=new,
            evidence=evidence, created=created,
        )  # fmt: skip

    return publish_converter(repo, graph_of(verdict.map), described)


def open_converter(
    release: str, *, root: Path | None = None, old: str | None = None, new: str | None = None
) -> VerifiedConverter:
    """`release`: FOLDER or URL of a publication, with #N for one of its converters, or N alone in
    `model_repo`. Without a number: the newest from the model `old` (and into `new`) by fingerprint.

    Raises NotFoundError, VerificationError, UnfitError, UnavailableError, IncompatibleSpaceError
    where it was made for other models, PreconditionError where no root is trusted yet, and for one
    that was withdrawn.
    """
    place, number = _place(release)
    trust = _trusted(place, root)
    folder = _state(place)
    if number is not None:
        manifest = read_converter(trust, number, folder)
        refuse_withdrawn(trust, number)
    else:
        manifest = _fitting(trust, folder, place, old, new)
    name = f"converter {manifest.converter}"
    same_model(manifest.old.fingerprint, old, f"{name} and the old vectors")
    same_model(manifest.new.fingerprint, new, f"{name} and the new vectors")
    facts = {
        OLD_MODEL: manifest.old.fingerprint,
        NEW_MODEL: manifest.new.fingerprint,
        "converter": manifest.file.sha256,
        "pairs": str(manifest.evidence.pairs),
    }
    file = converter_file(trust, manifest, folder)
    mapping = map_of(file.read_bytes(), CONVERTER, facts)
    if mapping.dims != (manifest.old.dim, manifest.new.dim):
        raise IncompatibleSpaceError(
            f"{name}: its map has dimensions {mapping.dims}, its models "
            f"{(manifest.old.dim, manifest.new.dim)}"
        )
    return VerifiedConverter(manifest, mapping)


def _fitting(trust: Trust, folder: Path, place: str, old: str | None, new: str | None) -> Converter:
    """The newest whose models are these, as far as they are known."""
    seen, gone = [], list[PreconditionError]()
    for number in reversed(converter_numbers(trust)):
        manifest = read_converter(trust, number, folder)
        if manifest.old.fingerprint == (old or manifest.old.fingerprint) and (
            manifest.new.fingerprint == (new or manifest.new.fingerprint)
        ):
            try:
                refuse_withdrawn(trust, number)
            except PreconditionError as error:
                gone.append(error)
                continue
            return manifest
        seen.append(f"{number}: {manifest.old.name} to {manifest.new.name}")
    if gone:
        raise gone[0]
    if not seen:
        raise NotFoundError(
            f"{place}: no converter is published there, only {known_converters(trust)}"
        )
    raise IncompatibleSpaceError(
        f"{place}: no converter is for the model that made these vectors ({(old or new or '')[:12]}"
        f"…), only {'; '.join(seen)}; the same dimension is not the same space"
    )


def _place(release: str) -> tuple[str, int | None]:
    place, _, number = release.rpartition("#") if "#" in release else (release, "", "")
    if re.fullmatch(r"[0-9]+", place) and not number:
        place, number = DEFAULT_REPO, place
    if not place or (number and not re.fullmatch(r"[0-9]{1,7}", number)):
        raise InvalidInputError(f"{release}: expected FOLDER, URL, or one of them with #N")
    remote = place.startswith(("http://", "https://"))
    # One address of a host is one trust, however it is written.
    whole = place.rstrip("/") if remote else str(Path(place).absolute())
    return whole, int(number) if number else None


def _trusted(place: str, root: Path | None) -> Trust:
    """The verified view of what is there today; a root is given once, then remembered."""
    fetcher, url = fetcher_for(place)
    state = _state(place) / "trust"
    given = None
    if root is not None:
        if not root.is_file():
            raise NotFoundError(f"{root}: no such file; --root expects the publisher's 1.root.json")
        given = root.read_bytes()
    elif not (state / "trusted.json").exists():
        shown = fingerprint(first_root(fetcher, url))
        raise PreconditionError(
            f"{place}: nothing is trusted of it yet; give --root 1.root.json once, as you got it "
            f"from its publisher by another way (there the one with the fingerprint {shown} lies)"
        )
    trust = Trust(state, fetcher, url, given)
    trust.refresh()
    return trust


def _state(place: str) -> Path:
    """Return the folder of a place's trusted root and cached files, for this user."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "nobackfill" / sha256_bytes(place.encode())[:16]


def mapping_for(
    facts: Facts, file: Path | None, release: str | None, root: Path | None, model: str | None
) -> tuple[Map, list[str]]:
    """The map, and what a person is told of it. `model`: the old one, as its user names it.

    Raises InvalidInputError; IncompatibleSpaceError where it was made for another model's vectors,
    or nobody says whose these are and the map is another's; and as open_converter.
    """
    if (file is None) == (release is None):
        raise InvalidInputError("expected --map FILE or --release N|FOLDER|URL, or --rollback")
    claimed = None if model is None else open_embedder(model).fingerprint
    same_model(facts.model, claimed, f"{facts.name} and --model")
    if file is not None:
        loaded = load_map(file)
        for known in (facts.model, claimed):
            same_model(known, loaded.facts.get(OLD_MODEL), f"{facts.name} and {file}")
        return loaded, []
    assert release is not None
    made_by = fingerprint_of(facts.model, claimed)
    if made_by is None:
        raise IncompatibleSpaceError(
            f"{facts.name}: nothing says which model made these vectors (the space of a release "
            "does not); name it with --model, as `embed --with` takes it: the same dimension is "
            "not the same space"
        )
    opened = open_converter(release, root=root, old=made_by)
    return opened.mapping, [opened.sentence]
