"""The map by which `nobackfill carry` carries: a file of `fit`, or a published converter."""

from pathlib import Path

from nobackfill.adopt.converters import open_converter
from nobackfill.adopt.embedding.opening import open_embedder
from nobackfill.adopt.maps import OLD_MODEL, Map, load_map
from nobackfill.adopt.sources.source import Facts, fingerprint_of, same_model
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError


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
