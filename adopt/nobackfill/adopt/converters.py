"""Publish maps between public models as converters, and use the converters of others.

A converter is a map as an ONNX graph in a publication, for users who have no pairs of vectors.
Everything is verified when it is read: the metadata by a root that the user gave once, the files by
the metadata, and the fingerprint of the vectors' model by the manifest.
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
from nobackfill.adopt.maps import (
    ADAPTER_OUTPUT,
    NEW_MODEL,
    OLD_MODEL,
    OLD_NORM_FACT,
    Map,
    is_unit,
    load_map,
)
from nobackfill.adopt.pairs import Pairs
from nobackfill.adopt.sources.source import Facts, check_same_model, first_fingerprint
from nobackfill.adopt.verdict import Verdict
from nobackfill.digests import sha256_bytes
from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    NotFoundError,
    PreconditionError,
    UnfitError,
    join_few,
)
from nobackfill.release.manifest import (
    Converter,
    ConverterEvidence,
    ModelCard,
    PublishedFile,
)
from nobackfill.release.publishing.declaration import hash_model_files, list_weight_files
from nobackfill.release.publishing.publish import publish_converter
from nobackfill.release.trust.trust import (
    Trust,
    converter_numbers,
    describe_published_converters,
    download_converter_file,
    download_converter_manifest,
    fetch_first_root,
    fetcher_for,
    format_root_fingerprint,
    refuse_withdrawn_converter,
)
from nobackfill.vectors import Vectors, check_vectors


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1)
    licence: str = Field(min_length=1)
    # As `embed --with` takes it; a path is relative to the card's folder.
    model: str
    model_name: str | None = None


class ConverterCard(BaseModel):
    """The description of a converter that its publisher writes: the JSON object of `--card FILE`.

    Attributes:
        old: Name, licence and file or address of the old model.
        new: The same for the new model.
        corpus: The corpus of the pairs.
        corpus_licence: Its licence.
    """

    model_config = ConfigDict(extra="forbid")
    old: _Model
    new: _Model
    corpus: str = Field(min_length=1)
    corpus_licence: str = Field(min_length=1)


def read_card(path: Path) -> ConverterCard:
    """Read the card of a converter; paths of models in it are relative to the card's folder.

    A name that ends in .onnx, and one of a folder, is a path. No model is opened. A byte order mark
    at the start of the file is skipped.

    Raises:
        NotFoundError: There is no such file, or it is a folder.
        InvalidInputError: The file cannot be read, or is no JSON object of this form; the error
            names the field.
        OSError: A path is too long, or this user may not search its folder.
    """
    if not path.is_file():
        raise NotFoundError(
            f"{path}: no such file; expected a JSON file for --card, as docs/adopt.md shows"
        )
    try:
        card = ConverterCard.model_validate_json(path.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise InvalidInputError(
            f"{path}: the file of --card cannot be read ({error.strerror}); check its permissions"
        ) from error
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise InvalidInputError(
            f"{path}: the file of --card is wrong at {place or 'its beginning'}: {wrong['msg']}; "
            'expected the keys {"old": {"name", "licence", "model"}, "new": {as of old}, "corpus", '
            '"corpus_licence"}'
        ) from error
    for one in (card.old, card.new):
        model_path = path.parent / one.model
        if one.model.endswith(".onnx") or (one.model and model_path.is_dir()):
            one.model = str(model_path)
    return card


def make_model_card(
    model: _Model, vectors: Vectors, made_by: str | None, error_name: str
) -> ModelCard:
    """Describe a model for the manifest of a converter.

    Opens the model, and checks that it computed the vectors.

    Args:
        model: The model's entry in the card.
        vectors: Its vectors, float32 [n, dim].
        made_by: Fingerprint of the model that computed them; None: not known.
        error_name: Name of the vectors in errors.

    Returns:
        `unit` is True if all the vectors have norm 1; `weights` is None for a model that is no ONNX
        file.

    Raises:
        IncompatibleSpaceError: Another model computed the vectors, or it is not known which one.
        NotFoundError: There is no such model file, module or function.
        InvalidInputError: The model cannot be used, or its files cannot be read.
        ConfigurationError: The address of an endpoint is not allowed, or an extra is not installed.
        BusyError, CannotWriteError: The model is a folder without an ONNX file; as `open_embedder`.
        OSError: A file of the model's weights cannot be read.
        Exception: Any other error of the code of a model `module:function`, which is run.
        pydantic.ValidationError: The vectors have more than 65,536 dimensions.
    """
    if made_by is None:
        raise IncompatibleSpaceError(
            f"{error_name}: the store of these vectors does not name the model that computed them; "
            "embed them with `nobackfill embed`, which records the model, or give --queries-old "
            "with a folder of `nobackfill embed`"
        )
    embedder = open_embedder(model.model, name=model.model_name)
    check_same_model(embedder.fingerprint, made_by, f"{model.model} and {error_name}")
    weights = (
        hash_model_files(list_weight_files(Path(model.model)))
        if model.model.endswith(".onnx")
        else None
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


def map_to_onnx(mapping: Map) -> bytes:
    """Build the ONNX graph of a map: `embedding` float32 [n, a] to `upgraded` float32 [n, b].

    Kind, facts and direction are not in it. A map that normalises divides a vector by its norm, or
    by 1e-12 if that is larger, so that a zero vector stays zero.

    Args:
        mapping: The map, with or without layers.

    Returns:
        The bytes of an ONNX file, the same ones for equal maps.
    """
    a, b = mapping.dims
    constants = {"weight": mapping.weight, "bias": mapping.bias}
    mapped = "mapped" if mapping.unit_norm else "upgraded"
    straight = "straight" if mapping.residual_layers else mapped
    nodes = [helper.make_node("Gemm", ["embedding", "weight", "bias"], [straight], transB=1)]
    hidden = "embedding"
    for number, (weight, bias) in enumerate(mapping.residual_layers):
        names = [f"weight_{number}", f"bias_{number}"]
        constants |= dict(zip(names, (weight, bias), strict=True))
        if number:
            nodes.append(helper.make_node("Relu", [hidden], [f"hidden_{number}"]))
            hidden = f"hidden_{number}"
        nodes.append(helper.make_node("Gemm", [hidden, *names], [f"layer_{number}"], transB=1))
        hidden = f"layer_{number}"
    if mapping.residual_layers:
        nodes.append(helper.make_node("Add", [straight, hidden], [mapped]))
    if mapping.unit_norm:
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


def map_to_upgrade_onnx(mapping: Map) -> bytes:
    """Build the ONNX graph of a map as `map_to_onnx` does, with its kind and facts as metadata.

    `export.py --upgrade` reads it. The output of a query adapter is called `adapted`, and
    `export.py --adapter` reads it. Facts replace a kind among them.
    """
    model = onnx.load_from_string(map_to_onnx(mapping))
    if mapping.direction == "new to old":
        model.graph.output[0].name = model.graph.node[-1].output[0] = ADAPTER_OUTPUT
    helper.set_model_props(model, {"kind": mapping.kind, **mapping.facts})
    data: bytes = model.SerializeToString()
    return data


def map_from_onnx(data: bytes, kind: str, facts: dict[str, str], error_name: str) -> Map:
    """Read a map from a graph that `map_to_onnx` wrote. The graph is compared, never run.

    Args:
        data: The bytes of an ONNX file, which may be hostile.
        kind: The kind of the map.
        facts: The facts of the map.
        error_name: Name of the file, for errors.

    Returns:
        The map, with its layers if there are any; it normalises if the graph does.

    Raises:
        UnfitError: The graph is any other, or holds NaN or infinity.
    """
    try:
        graph = onnx.load_from_string(data).graph
        constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
        weight, bias = constants["weight"], constants["bias"]
        checked = check_vectors(weight, weight.shape[1], error_name="weight")
        shift = check_vectors(bias[None], len(weight), error_name="bias")[0]
        layers: list[tuple[Vectors, Vectors]] = []
        while (name := f"weight_{len(layers)}") in constants:
            layer, moved = constants[name], constants[f"bias_{len(layers)}"][None]
            layers.append(
                (
                    check_vectors(layer, layer.shape[1], error_name=name),
                    check_vectors(moved, len(layer), error_name=f"bias of {name}")[0],
                )
            )
    except Exception as error:
        # Errors of protobuf, onnx and numpy at hostile bytes have no common base class.
        raise UnfitError(
            f"{error_name}: expected a map as `nobackfill converter publish` writes it, got "
            f"another file ({error}); ask the publisher of the converter to publish it again"
        ) from error
    found = Map(kind, checked, shift, "least" in constants, facts, tuple(layers))
    # Compared and not run: a stranger's graph may never end.
    if onnx.load_from_string(map_to_onnx(found)).graph != graph:
        raise UnfitError(
            f"{error_name}: expected the ONNX graph of a map as `nobackfill converter publish` "
            "writes it, got a graph with other nodes; ask the publisher of the converter to "
            "publish it again"
        )
    return found


DEFAULT_REPO = "model_repo"


@dataclass(frozen=True)
class VerifiedConverter:
    """A converter whose publication, manifest and file were verified.

    Attributes:
        manifest: Both models, the evidence and the digest of the file.
        mapping: The map; its facts name both models.
    """

    manifest: Converter
    mapping: Map

    @property
    def sentence(self) -> str:
        """Return both models, their licences and the measured quality in one line.

        An option without the deciding figure counts as 0.0 %.
        """
        one, evidence = self.manifest, self.manifest.evidence
        figures = {name: ways.get(evidence.judged_by, 0.0) for name, ways in evidence.ways.items()}
        shown = ", ".join(f"{name} {100 * value:.1f} %" for name, value in figures.items())
        return (
            f"converter {one.converter}: {one.old.name} ({one.old.licence}) to {one.new.name} "
            f"({one.new.licence}), fitted to {evidence.pairs} pairs of {evidence.corpus}; "
            f"{evidence.judged_by} on them: {shown}; its publisher's verdict: {evidence.way}"
        )


def converter_evidence(card: ConverterCard, verdict: Verdict) -> ConverterEvidence:
    """Describe the quality of a map for the manifest of a converter.

    Args:
        card: The names and licences.
        verdict: The verdict on pairs of the card's corpus, judged by pairs that were left out.

    Raises:
        pydantic.ValidationError: A figure is not between 0 and 1, or the verdict is of fewer than 2
            pairs.
    """
    return ConverterEvidence(
        corpus=card.corpus,
        corpus_licence=card.corpus_licence,
        pairs=verdict.pairs,
        search=verdict.search,
        judged_by=verdict.judged_by,
        way=verdict.way,
        ways={way.name: way.figures for way in verdict.ways},
        healing={name: tuple(c) for name, c in verdict.healing.curves_by_score.items()},
        raw={name: tuple(c) for name, c in verdict.healing.curves_by_distance.items()},
    )


def publish_map_as_converter(
    repo: Path,
    verdict: Verdict,
    pairs: Pairs,
    models: tuple[str | None, str | None],
    card: ConverterCard,
) -> Converter:
    """Sign the map of a verdict, and publish it as a converter under the next number.

    The first publish makes the signing keys in REPO.keys. A second call publishes another
    converter, also of the same map.

    Args:
        repo: The publication folder; it is created if it is missing.
        verdict: The verdict; its figures become the evidence.
        pairs: The pairs of the verdict.
        models: Fingerprints of the old and of the new model that the vectors' stores name; None:
            not known.
        card: Names and licences.

    Returns:
        The published manifest, with the number.

    Raises:
        PreconditionError: The new model is worse than the old one; nothing is published.
        IncompatibleSpaceError: The card names other models than computed the vectors.
        NotFoundError: There is no such model file, module or function.
        InvalidInputError: A model cannot be used.
        ConfigurationError: The address of an endpoint is not allowed, an extra is not installed, or
            a signing key is missing or invalid.
        BusyError: Another process publishes in this folder, or exports a model's folder for longer
            than an hour.
        CannotWriteError: The folder, or the cache of exported models, cannot be written.
        VerificationError: The folder's metadata is not valid.
        OSError: A file of a model's weights cannot be read.
        Exception: Any other error of the code of a model `module:function`, which is run.
        StopIteration: The verdict has no option "re-embed".
    """
    again = next(way for way in verdict.ways if way.name == "re-embed")
    if again.worse:
        raise PreconditionError(
            f"nothing was published, because {card.new.name} is worse than {card.old.name} on "
            f"{card.corpus} ({', '.join(again.worse)}), so users of {card.old.name} should keep "
            "that model"
        )
    old = make_model_card(card.old, pairs.old, models[0], "the old vectors")
    new = make_model_card(card.new, pairs.new, models[1], "the new vectors")
    if old.fingerprint == new.fingerprint:
        raise InvalidInputError(
            f"{card.old.name} and {card.new.name}: expected two different models, got one model "
            "under two names; its vectors need no converter"
        )
    evidence = converter_evidence(card, verdict)

    def described(number: int, file: PublishedFile) -> Converter:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return Converter(
            converter=number, kind=verdict.map.kind, file=file, old=old, new=new,
            evidence=evidence, created=created,
        )  # fmt: skip

    return publish_converter(repo, map_to_onnx(verdict.map), described)


def open_converter(
    release: str, *, root: Path | None = None, old: str | None = None, new: str | None = None
) -> VerifiedConverter:
    """Download and verify a published converter.

    The trusted root and the downloaded files are stored in this user's state folder
    ($XDG_STATE_HOME/nobackfill). Later calls need no root.

    Withdrawn converters are skipped without a number, unless no other fits. A file that was
    downloaded earlier is verified, not fetched again. The metadata is fetched at each call. Another
    process that updates the trusted root is waited for up to a minute. Two calls at once for one
    publication may disturb each other.

    Args:
        release: FOLDER or URL of a publication, with #N for converter N; or N alone for converter N
            in the folder `model_repo`. Without a number, the newest converter for the two models.
        root: File of the publication's first root metadata, 1.root.json; None: the one of an
            earlier call.
        old: Fingerprint of the old model; None accepts any.
        new: Fingerprint of the new model; None accepts any.

    Raises:
        InvalidInputError: `release` has another form.
        NotFoundError: There is no such publication, converter or root file.
        IncompatibleSpaceError: The converter is for other models, or its map has other dimensions
            than its models.
        PreconditionError: No root is trusted yet and none was given, or the converter was
            withdrawn.
        VerificationError: The metadata or a file is not signed by the root, or was changed.
        UnfitError: The file is no map. The manifest and the signed entry of the file differ.
        UnavailableError: The host does not answer.
        CannotWriteError: The state folder cannot be written.
        BusyError: Another process updates the trusted root.
        OSError: The root file or a downloaded file cannot be read.
    """
    place, number = _place(release)
    trust = _trusted(place, root)
    folder = _state(place)
    if number is not None:
        manifest = download_converter_manifest(trust, number, folder)
        refuse_withdrawn_converter(trust, number)
    else:
        manifest = _fitting(trust, folder, place, old, new)
    name = f"converter {manifest.converter}"
    check_same_model(manifest.old.fingerprint, old, f"{name} and the old vectors")
    check_same_model(manifest.new.fingerprint, new, f"{name} and the new vectors")
    facts = {
        OLD_MODEL: manifest.old.fingerprint,
        NEW_MODEL: manifest.new.fingerprint,
        "converter": manifest.file.sha256,
        "pairs": str(manifest.evidence.pairs),
    }
    if manifest.old.unit:
        facts[OLD_NORM_FACT] = "1"
    file = download_converter_file(trust, manifest, folder)
    mapping = map_from_onnx(file.read_bytes(), CONVERTER, facts, str(file))
    if mapping.dims != (manifest.old.dim, manifest.new.dim):
        raise IncompatibleSpaceError(
            f"{name}: expected a map from {manifest.old.dim} to {manifest.new.dim} dimensions, as "
            f"the converter's two models have, got one from {mapping.dims[0]} to "
            f"{mapping.dims[1]}; ask the converter's publisher to publish it again"
        )
    return VerifiedConverter(manifest, mapping)


def _fitting(trust: Trust, folder: Path, place: str, old: str | None, new: str | None) -> Converter:
    """Find the newest converter between two models, each None if it is not known."""
    seen, gone = [], list[PreconditionError]()
    for number in reversed(converter_numbers(trust)):
        manifest = download_converter_manifest(trust, number, folder)
        if manifest.old.fingerprint == (old or manifest.old.fingerprint) and (
            manifest.new.fingerprint == (new or manifest.new.fingerprint)
        ):
            try:
                refuse_withdrawn_converter(trust, number)
            except PreconditionError as error:
                gone.append(error)
                continue
            return manifest
        seen.append(f"{number}: {manifest.old.name} to {manifest.new.name}")
    if gone:
        raise gone[0]
    if not seen:
        raise NotFoundError(
            f"{place}: expected a publication with converters, found "
            f"{describe_published_converters(trust)}; "
            "name another publication, or fit a map to your own vectors by `nobackfill fit`"
        )
    raise IncompatibleSpaceError(
        f"{place}: expected a converter for the model {(old or new or '')[:12]}…, which computed "
        f"these vectors, found {join_few(seen)}; vectors of two models cannot be compared, even if "
        "their dimension is the same. Name another publication, or fit a map to your own vectors "
        "by `nobackfill fit`"
    )


def _place(release: str) -> tuple[str, int | None]:
    place, _, number = release.rpartition("#") if "#" in release else (release, "", "")
    if re.fullmatch(r"[0-9]+", place) and not number:
        place, number = DEFAULT_REPO, place
    if not place or (number and not re.fullmatch(r"[0-9]{1,7}", number)):
        raise InvalidInputError(
            f"{release}: expected a converter as FOLDER, URL, FOLDER#N, URL#N or N, where N is the "
            "converter's number; correct it"
        )
    remote = place.startswith(("http://", "https://"))
    # One address of a host is one trust, however it is written.
    whole = place.rstrip("/") if remote else str(Path(place).absolute())
    return whole, int(number) if number else None


def _trusted(place: str, root: Path | None) -> Trust:
    """Fetch and verify a publication's metadata by the given root, or by the stored one."""
    fetcher, url = fetcher_for(place)
    state = _state(place) / "trust"
    given = None
    if root is not None:
        if not root.is_file():
            raise NotFoundError(
                f"{root}: no such file; expected the publisher's 1.root.json for --root"
            )
        given = root.read_bytes()
    elif not (state / "trusted.json").exists():
        shown = format_root_fingerprint(fetch_first_root(fetcher, url))
        raise PreconditionError(
            f"{place}: no root metadata of this publication, which names its signing keys, is "
            "trusted yet. Get the file 1.root.json from its publisher over a channel that you "
            "trust, and name it once with --root FILE; the root in the publication itself has "
            f"the fingerprint {shown}"
        )
    trust = Trust(state, fetcher, url, given)
    trust.refresh()
    return trust


def _state(place: str) -> Path:
    """Return the folder of a place's trusted root and cached files, for this user."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "nobackfill" / sha256_bytes(place.encode())[:16]


def open_map_for_store(
    facts: Facts, file: Path | None, release: str | None, root: Path | None, model: str | None
) -> tuple[Map, list[str]]:
    """Open the map that a user names, and check that it is for the vectors of a store.

    A file whose facts name no model passes for every store.

    Args:
        facts: The facts of the store.
        file: File of a map; None if `release` is given.
        release: A published converter, as `open_converter` takes it; None if `file` is given.
        root: As in `open_converter`.
        model: The old model, as `open_embedder` takes it; None: the one that the store names.

    Returns:
        The map, and sentences to print: for a converter its models and quality, for a file none.

    Raises:
        InvalidInputError: Both or neither of `file` and `release` are given, or the file is no map.
            `release` has another form, or the model cannot be used.
        NotFoundError: There is no such file, model or converter.
        IncompatibleSpaceError: The map is for another model's vectors; or a converter is used, and
            neither the store nor `model` tells which model computed the vectors. The store names
            another model than `model`.
        PreconditionError: No root is trusted yet and none was given, or the converter was
            withdrawn.
        VerificationError: The converter is not signed by the root, or was changed.
        UnfitError: The converter is no linear map. The manifest and the signed entry of its file
            differ.
        UnavailableError: The publication's host does not answer.
        ConfigurationError: The address of an endpoint is not allowed, or an extra is not installed.
        CannotWriteError: The state folder, or the cache of exported models, cannot be written.
        BusyError: Another process updates the trusted root, or exports the folder of `model`.
        OSError: A file of `model` cannot be read.
        Exception: Any other error of the code of a model `module:function`, which is run.
    """
    if (file is None) == (release is None):
        raise InvalidInputError(
            "expected one source of the new vectors (--map FILE, --release CONVERTER, --with MODEL "
            "or --vectors FOLDER), or --rollback to remove them; got none of these, or both --map "
            "and --release. Give exactly one"
        )
    claimed = None if model is None else open_embedder(model).fingerprint
    check_same_model(facts.model, claimed, f"{facts.name} and --model")
    if file is not None:
        loaded = load_map(file)
        for known in (facts.model, claimed):
            check_same_model(known, loaded.facts.get(OLD_MODEL), f"{facts.name} and {file}")
        return loaded, []
    assert release is not None
    made_by = first_fingerprint(facts.model, claimed)
    if made_by is None:
        raise IncompatibleSpaceError(
            f"{facts.name}: the store does not name the model that computed its vectors, so it is "
            "unknown whether the map is for them; name the model with --model, as for `nobackfill "
            "embed --with`"
        )
    opened = open_converter(release, root=root, old=made_by)
    return opened.mapping, [opened.sentence]
