"""Converters between public models: published by who has pairs, used by who has none.

What is read is verified first: the metadata by a root that the user gave once, the files by the
metadata, the fingerprint of the vectors' model by the manifest.
"""

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from nobackfill.adopt.cards import Card, model_card
from nobackfill.adopt.correction import CONVERTER
from nobackfill.adopt.maps import NEW_MODEL, OLD_MODEL, Map
from nobackfill.adopt.pairs import Pairs
from nobackfill.adopt.sources.source import same_model
from nobackfill.adopt.transform import graph_of, map_of
from nobackfill.adopt.verdict import Verdict
from nobackfill.digests import sha256_bytes
from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    NotFoundError,
    PreconditionError,
)
from nobackfill.release.converter import Converter, ConverterEvidence
from nobackfill.release.manifest import PublishedFile
from nobackfill.release.publishing.converters import publish_converter
from nobackfill.release.trust.converters import (
    converter_file,
    converter_numbers,
    known,
    read_converter,
    refuse_withdrawn,
)
from nobackfill.release.trust.fetchers import fetcher_for
from nobackfill.release.trust.trust import Trust, fingerprint, first_root

DEFAULT_REPO = "model_repo"


@dataclass(frozen=True)
class Opened:
    """A verified converter, and its map."""

    manifest: Converter
    mapping: Map

    @property
    def sentence(self) -> str:
        """Whose it is and what it was measured to keep, in one line."""
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
            converter=number, kind=verdict.chosen.kind, file=file, old=old, new=new,
            evidence=evidence, created=created,
        )  # fmt: skip

    return publish_converter(repo, graph_of(verdict.chosen), described)


def open_converter(
    release: str, *, root: Path | None = None, old: str | None = None, new: str | None = None
) -> Opened:
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
    return Opened(manifest, mapping)


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
        raise NotFoundError(f"{place}: no converter is published there, only {known(trust)}")
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
    """What this user trusts of a place, and has fetched of it."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "nobackfill" / sha256_bytes(place.encode())[:16]
