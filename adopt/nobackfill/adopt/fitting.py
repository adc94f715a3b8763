"""The work of `nobackfill fit`: pairs and queries read, a verdict made, files written."""

import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.converters import (
    Card,
    VerifiedConverter,
    open_converter,
    publish,
    read_card,
    upgrade_of,
)
from nobackfill.adopt.joining import save_joining
from nobackfill.adopt.judgement import Queries
from nobackfill.adopt.maps import Map, open_trainer, save_map
from nobackfill.adopt.page import duration, render
from nobackfill.adopt.pairs import WINDOW, Matched, Pairs, match
from nobackfill.adopt.sources.arrays import ArraySource
from nobackfill.adopt.sources.opening import not_read_as, open_items, open_source
from nobackfill.adopt.sources.source import (
    DOCUMENTS,
    EmbeddedSource,
    Source,
    Target,
    fingerprint_of,
    same_model,
)
from nobackfill.adopt.verdict import Cost, Verdict, decide
from nobackfill.durable import write_file
from nobackfill.errors import CannotWriteError, InvalidInputError, few

# Windows of a store that are read to tell what carrying takes.
MEASURED = 3
# Seconds that PostgreSQL takes to read, write and check an item, over those to read it.
POSTGRESQL = 5.0
# Of a map's facts: the way that was best when it was fitted.
VERDICT = "verdict"
# What is known of the old and of the new one.
_Models = tuple[str | None, str | None]


@dataclass(frozen=True)
class FitAnswer:
    """For a machine, and for a person."""

    answer: dict[str, object]
    lines: list[str]


@dataclass(frozen=True)
class FitFiles:
    """What is written, as far as it is wanted: the map, the same for a release, the joining, the
    page, a publication with the card of what is published; and what is read: a converter, and its
    publisher's root."""

    out: Path
    onnx: Path | None = None
    joining: Path | None = None
    report: Path | None = None
    publication: Path | None = None
    card: Path | None = None
    converter: str | None = None
    root: Path | None = None


def fit_and_judge(
    old: str,
    new: str,
    files: FitFiles,
    queries_old: str | None,
    queries_new: str | None,
    items_there: bool,
    *,
    also: str | None = None,
    key: str | None,
    vector: str | None,
) -> FitAnswer:
    """Raises InvalidInputError for pairs and queries that do not fit, and what sources raise."""
    _check(files, also)
    trainer = None if also is None else open_trainer(also)
    card = None if files.card is None else read_card(files.card)
    stored = open_items(old, "--old", key=key, vector=vector)
    made = open_items(new, "--new")
    matched = match(stored, made)
    pairs = matched.pairs
    if np.array_equal(pairs.old, pairs.new):
        raise InvalidInputError(
            "--new: expected the items' vectors by the new model, got those of --old themselves"
        )
    queries = None
    old_model, new_model = stored.facts().model, made.facts().model
    asked_model = old_seconds = new_seconds = None
    if (queries_old is None) != (queries_new is None):
        raise InvalidInputError("expected --queries-old and --queries-new together: both models'")
    if queries_old is not None and queries_new is not None:
        asked_old, asked_new = open_source(queries_old), open_source(queries_new)
        same_model(new_model, asked_new.facts().model, "--new and --queries-new")
        asked_model = asked_old.facts().model
        same_model(old_model, asked_model, "--old and --queries-old")
        for option, asked in (("--queries-old", asked_old), ("--queries-new", asked_new)):
            otherwise = "their model reads queries otherwise, and these were read as items"
            not_read_as(asked, DOCUMENTS, f"{option}: {otherwise}; embed them with --queries")
        queries = known_items(pairs, asked_old, asked_new)
        old_seconds, new_seconds = _seconds(asked_old), _seconds(asked_new)
    models = old_model or asked_model, new_model
    # Converters are of models by their fingerprints, which a release's space is not.
    public = fingerprint_of(old_model, asked_model), fingerprint_of(new_model)
    prior = _converter(files, public)
    carrying = _carry_seconds(old, stored, pairs)
    cost = Cost(stored.count(), old_seconds, _seconds(made), carrying, new_seconds)
    verdict = decide(
        pairs,
        cost,
        queries,
        items_there=items_there,
        prior=prior.mapping if prior else None,
        also=trainer,
    )
    verdict = replace(verdict, notes=[*_sides(stored, made, matched), *verdict.notes])
    lines = ([] if prior is None else [prior.sentence]) + _lines(verdict)
    lines += _written(files, verdict, pairs, models, public, card)
    steps = _steps(verdict.way, files)
    lines += steps
    if lost := matched.without_old:
        lines.append(f"passed over: {len(lost)} items have no old vector ({few(lost)})")
    answer = asdict(verdict) | {"chosen": verdict.chosen.kind, "weight": verdict.joining.weight}
    del answer["joining"]
    answer |= {"map": str(files.out), "without_old": matched.without_old, "steps": steps}
    return FitAnswer(answer, lines)


def _check(files: FitFiles, also: str | None) -> None:
    """What needs no vectors, before it takes minutes."""
    for path in (files.out, files.onnx, files.joining, files.report):
        if path is not None and not path.parent.is_dir():
            raise CannotWriteError(f"{path}: cannot be written, there is no folder {path.parent}")


def _sides(old: Source, new: Source, matched: Matched) -> list[str]:
    """Which side is which, as nothing else tells where a store names no model; and what looks as if
    they were the wrong way round."""
    said: list[str] = []
    for side, source, vectors in (("old", old, matched.pairs.old), ("new", new, matched.pairs.new)):
        facts = source.facts()
        model = f"model {facts.model[:12]}" if facts.model else "a model that it does not name"
        said.append(f"{side}: {facts.name}, {vectors.shape[1]} dims, {model}")
    alone = len(matched.without_old)
    if alone and old.count() <= len(matched.pairs):
        said.append(
            f"--new has {alone} items more than --old, which is the gallery as a rule: are the two "
            "the wrong way round?"
        )
    return said


def _converter(files: FitFiles, models: _Models) -> VerifiedConverter | None:
    if files.converter is None:
        return None
    return open_converter(files.converter, root=files.root, old=models[0], new=models[1])


def _written(
    files: FitFiles,
    verdict: Verdict,
    pairs: Pairs,
    models: _Models,
    public: _Models,
    card: Card | None,
) -> list[str]:
    """Write what is wanted; a line for each."""
    mapping = verdict.chosen.of_models(*models)
    save_map(files.out, replace(mapping, facts=mapping.facts | {VERDICT: verdict.way}))
    lines = [f"map: {files.out} ({verdict.chosen.kind})"]
    if files.onnx is not None:
        write_file(files.onnx, upgrade_of(mapping))
        lines.append(f"upgrade: {files.onnx}, for export.py --upgrade")
    if files.joining is not None:
        save_joining(files.joining, verdict.joining)
        lines.append(f"joining: {files.joining}, for nobackfill.serve")
    if files.report is not None:
        write_file(files.report, render(verdict).encode())
        lines.append(f"report: {files.report}")
    if files.publication is not None and card is not None:
        made = publish(files.publication, verdict, pairs, public, card)
        lines.append(
            f"published: converter {made.converter} in {files.publication}; who uses it needs "
            f"{files.publication / '1.root.json'} by another way than the publication itself"
        )
    return lines


def _steps(way: str, files: FitFiles) -> list[str]:
    """How to go the recommended way, as far as `carry` and `nobackfill.serve` go it."""
    if way in ("stay", "re-embed"):
        return []
    steps = [f"next: nobackfill carry SOURCE --map {files.out} --to NAME"]
    if way == "map":
        return steps
    if files.joining is None:
        steps = ["next: run this command again with --joining joining.npz", *steps]
    natives, joining = "natives.db", files.joining or "joining.npz"
    items = ", items=ITEMS" if way == "lazily" else ""
    return [
        *steps,
        "then: build the index that `carry` prints, and leave the flip out",
        f"then: search by Dual.open(source, Path({str(files.out)!r}), Path({str(joining)!r}), "
        f"Path({natives!r}), new_model, carried='NAME'{items}) of nobackfill.serve",
    ]


def known_items(pairs: Pairs, old: Source, new: Source) -> Queries:
    """Queries by both models, paired by id: that of the item to find.

    Raises InvalidInputError where dimensions are not the pairs', or too few have their item there.
    """
    asked = match(old, new).pairs
    dims = (asked.old.shape[1], asked.new.shape[1])
    expected = (pairs.old.shape[1], pairs.new.shape[1])
    if dims != expected:
        raise InvalidInputError(
            f"queries: expected dimensions {expected} as the items have, got {dims}; were "
            "--queries-old and --queries-new embedded by the two models?"
        )
    places = {name: row for row, name in enumerate(pairs.ids)}
    kept = [row for row, name in enumerate(asked.ids) if name in places]
    if len(kept) < 20:
        raise InvalidInputError(
            f"expected at least 20 queries whose item is among the pairs, found {len(kept)}"
        )
    rows = np.array([places[asked.ids[row]] for row in kept], np.int64)
    return Queries(asked.old[kept], asked.new[kept], rows, own=False, metric=pairs.metric)


def _seconds(source: Source) -> float | None:
    return source.seconds_per_item() if isinstance(source, EmbeddedSource) else None


def _carry_seconds(address: str, source: Source, pairs: Pairs) -> float | None:
    """Seconds to carry one item: read, map, write and check. None where a store's writing is not
    calibrated. Reading is measured on windows of the store itself, writing on files of the pairs,
    and for PostgreSQL told from reading."""
    a, b = pairs.old.shape[1], pairs.new.shape[1]
    mapping = Map("affine", np.ones((b, a), np.float32), np.ones(b, np.float32), unit=True)
    window = np.resize(pairs.old, (WINDOW, a))
    started = time.perf_counter()
    rows = sum(len(source.read(one)) for one in islice(source.windows(WINDOW), MEASURED))
    reading = (time.perf_counter() - started) / max(1, rows)
    if address.startswith(("postgresql://", "postgres://")):
        started = time.perf_counter()
        mapping(window)
        return POSTGRESQL * reading + (time.perf_counter() - started) / WINDOW
    if ":" in address.partition("/")[0]:
        return None
    with TemporaryDirectory(prefix="nobackfill-fit-") as folder:
        np.save(Path(folder, "ids.npy"), np.arange(WINDOW))
        np.save(Path(folder, "old.npy"), window)
        started = time.perf_counter()
        carry(ArraySource(Path(folder)), Target("new", b, mapping.digest), mapping)
        # Read to be carried, and again to be checked.
        return 2 * reading + (time.perf_counter() - started) / WINDOW


def _lines(verdict: Verdict) -> list[str]:
    names = list(verdict.ways[0].figures)
    head = "".join(f"{name:>14s}" for name in names)
    lines = [
        f"verdict: {verdict.way}: {verdict.words}",
        f"it holds for {verdict.search}, by {verdict.judged_by}",
        f"{'way':10s}{head}{'a query':>14s}{'in all':>14s}",
    ]
    for way in verdict.ways:
        figures = "".join(f"{100 * way.figures[name]:13.1f}%" for name in names)
        cost = f"{duration(way.query_seconds):>14s}{duration(way.all_seconds):>14s}"
        worse = f"  worse than staying in {', '.join(way.worse)}" if way.worse else ""
        lines.append(f"{way.name:10s}{figures}{cost}{worse}")
    return lines + verdict.notes
