"""Run `nobackfill fit`: read pairs and queries, decide, and write the files."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.converters import (
    ConverterCard,
    VerifiedConverter,
    map_to_upgrade_onnx,
    open_converter,
    publish_map_as_converter,
    read_card,
)
from nobackfill.adopt.joining import save_rank_fusion
from nobackfill.adopt.judgement import Queries
from nobackfill.adopt.maps import (
    OLD_NORM_FACT,
    Map,
    adapter_example,
    is_unit,
    open_trainer,
    save_map,
)
from nobackfill.adopt.page import format_duration, format_figure_percent, render_verdict
from nobackfill.adopt.pairs import WINDOW_ITEMS, MatchResult, Pairs, match_by_id
from nobackfill.adopt.sources.opening import (
    open_item_vectors,
    open_source,
    refuse_vectors_with_role,
)
from nobackfill.adopt.sources.source import (
    DOCUMENTS,
    CostEstimator,
    EmbeddedSource,
    MigrationCosts,
    MigrationTrial,
    Source,
    Target,
    check_same_model,
    first_fingerprint,
)
from nobackfill.adopt.verdict import ADAPTER_OPTION, Cost, Verdict, decide
from nobackfill.durable import write_file
from nobackfill.errors import CannotWriteError, InvalidInputError, join_few

# Smallest number of queries for a verdict.
LEAST_QUERIES = 20
# Name of the new vectors in a scratch store; no table of the user has a column of this name.
_SCRATCH_NAME = "trial_of_nobackfill"
# The fact of a map that names the recommended option of its verdict.
VERDICT_FACT = "verdict"
# The old model and the new one; None: not known.
_Models = tuple[str | None, str | None]


@dataclass(frozen=True)
class FitAnswer:
    """The result of a fit: `json_answer` for --json, `terminal_lines` for a terminal."""

    json_answer: dict[str, object]
    terminal_lines: list[str]


@dataclass(frozen=True)
class FitFiles:
    """Files that a fit writes or reads; None leaves a file out.

    Attributes:
        map_file: Written: the map.
        onnx_file: Written: the map as an ONNX upgrade for a release.
        rank_fusion_file: Written: the rank fusion for `nobackfill.serve`.
        verdict_page: Written: the HTML page of the verdict.
        publication_folder: Written: the publication folder of the new converter; needs `card_file`.
        card_file: Read: names and licences for the new converter.
        converter_address: Read: a published converter between the two models.
        trusted_root: Read: the root metadata of the converter's publisher.
        query_adapter_file: Written: the query adapter.
    """

    map_file: Path
    onnx_file: Path | None = None
    rank_fusion_file: Path | None = None
    verdict_page: Path | None = None
    publication_folder: Path | None = None
    card_file: Path | None = None
    converter_address: str | None = None
    trusted_root: Path | None = None
    query_adapter_file: Path | None = None


def fit_and_judge(
    old: str,
    new: str,
    files: FitFiles,
    queries_old: str | None,
    queries_new: str | None,
    items_available: bool,
    *,
    old_model_available: bool = True,
    trainer_name: str | None = None,
    key: str | None,
    vector: str | None,
    where: str | None = None,
) -> FitAnswer:
    """Fit maps between two models, decide how to change the model, and write the files.

    The stores are only read; the old one is read whole. Files are written after the verdict, one
    after the other; those before an error stay.

    It may take minutes and much memory: pairs, queries and maps are held at once. To estimate times
    some stores migrate items in a temporary folder.

    The trusted root and the files of a converter go into this user's state folder. The first
    publication makes signing keys in FOLDER.keys.

    Args:
        old: Address of the store with the old vectors.
        new: Address of the new model's vectors of some of these items, with the same ids. Items
            that the old store lacks are skipped and named.
        files: The files to write. A publication without a card is not written.
        queries_old: Address of test queries by the old model, each with the id of the item to find;
            None: judge by agreement with the new model.
        queries_new: Address of the same queries by the new model; both or neither.
        items_available: Whether the items can still be embedded.
        old_model_available: Whether the old model can still embed queries.
        trainer_name: MODULE:FUNCTION of a trainer of one more candidate map; None: none.
        key: Key column of the old store; None for its primary key or `id`.
        vector: Vector column of the old store; None for the only one.
        where: Condition of the old store's rows; None for all.

    Returns:
        The verdict for people and for machines.

    Raises:
        InvalidInputError: There are fewer than 20 pairs, or fewer than 20 queries whose item is
            among them; dimensions differ; only one of both addresses of queries is given; or items
            and queries are mixed up. Vectors hold NaN, an id occurs twice, both addresses give the
            same vectors, or the trainer's layers do not fit. The adapter's file name ends neither
            in .npz nor in .onnx.
        IncompatibleSpaceError: Vectors are of another model than expected.
        NotFoundError: There is no such store, card, converter or trainer.
        PreconditionError: The map was to be published, and the new model is worse than the old. No
            root is trusted yet and none was given, or the converter was withdrawn.
        CannotWriteError: A file cannot be written, or its folder does not exist.
        UnavailableError: A store's server does not answer.
        NotPermittedError: A server refuses the user.
        ConfigurationError: An address would send vectors unencrypted, or an extra is not installed.
        VerificationError: The converter or the publication has no valid signature.
        BusyError: Another process publishes in the publication folder. Others hold a store, or its
            server has too many requests.
        UnfitError: The converter is no linear map.
        OSError: A file of a published model cannot be read, or a temporary folder cannot be
            written.
        Exception: Any other error of the code of a trainer, or of a card's model `module:function`.
        numpy.linalg.LinAlgError: The equations cannot be solved.
    """
    _check_files(files)
    trainer = None if trainer_name is None else open_trainer(trainer_name)
    card = None if files.card_file is None else read_card(files.card_file)
    old_source = open_item_vectors(old, "--old", key=key, vector=vector, where=where)
    new_source = open_item_vectors(new, "--new")
    query_sources: tuple[Source, Source] | None = None
    old_model, new_model = old_source.facts().model, new_source.facts().model
    query_model = old_seconds = new_seconds = None
    if (queries_old is None) != (queries_new is None):
        raise InvalidInputError(
            "expected --queries-old and --queries-new together, got one of them; give both or "
            "neither"
        )
    if queries_old is not None and queries_new is not None:
        old_queries, new_queries = open_source(queries_old), open_source(queries_new)
        query_sources = old_queries, new_queries
        check_same_model(new_model, new_queries.facts().model, "--new and --queries-new")
        query_model = old_queries.facts().model
        check_same_model(old_model, query_model, "--old and --queries-old")
        for option, source in (("--queries-old", old_queries), ("--queries-new", new_queries)):
            problem = (
                "the model embeds queries and items differently, and these vectors were embedded "
                "as items"
            )
            advice = "embed the queries again with `nobackfill embed --queries`"
            refuse_vectors_with_role(source, DOCUMENTS, f"{option}: {problem}; {advice}")
        old_seconds, new_seconds = _seconds(old_queries), _seconds(new_queries)
    models = old_model or query_model, new_model
    # Converters name models by fingerprints; the space of a release is none.
    fingerprints = first_fingerprint(old_model, query_model), first_fingerprint(new_model)
    converter = _converter(files, fingerprints)
    # All inputs are open: from here on the old store is read, which may take minutes.
    matched = match_by_id(old_source, new_source)
    pairs = matched.pairs
    if np.array_equal(pairs.old, pairs.new) and new_model in (None, old_model):
        raise InvalidInputError(
            "--new: expected vectors by the new model, got the vectors of --old; give the folder "
            "that `nobackfill embed` wrote with the new model"
        )
    queries = None if query_sources is None else read_known_item_queries(pairs, *query_sources)
    count = old_source.count()
    costs = _estimate_costs(old_source, pairs, count)
    cost = Cost(
        count,
        old_seconds,
        _seconds(new_source),
        costs.item_seconds,
        new_seconds,
        # `migrate` and `carry --vectors` reuse the sample's vectors.
        len(pairs),
        costs.index_seconds or 0.0,
    )
    verdict = decide(
        pairs,
        cost,
        queries,
        items_available=items_available,
        old_model_available=old_model_available,
        converter=converter.mapping if converter else None,
        trainer=trainer,
        source=old_source,
    )
    verdict = replace(
        verdict,
        notes=[
            *_side_notes(old_source, new_source, matched),
            *verdict.notes,
            _cost_note(costs),
        ],
    )
    lines = ([] if converter is None else [converter.sentence]) + _lines(verdict)
    lines += _write_files(files, verdict, pairs, models, fingerprints, card)
    steps = _steps(verdict.way, files)
    lines += steps
    if skipped := matched.ids_without_old:
        ids = join_few(skipped)
        lines.append(f"skipped: {len(skipped)} items of --new have no old vector ({ids})")
    answer = asdict(verdict)
    del answer["map"], answer["joining"]
    answer["healing"] = {
        "calibrated": verdict.healing.curves_by_score,
        "raw": verdict.healing.curves_by_distance,
    }
    answer["adapter"] = None if files.query_adapter_file is None else str(files.query_adapter_file)
    answer |= {"chosen": verdict.map.kind, "weight": verdict.joining.new_weight}
    answer |= {"map": str(files.map_file), "without_old": matched.ids_without_old, "steps": steps}
    return FitAnswer(answer, lines)


def _check_files(files: FitFiles) -> None:
    """Refuse a file without a folder, and an adapter of an unknown format, before the fit takes
    minutes.

    Raises:
        CannotWriteError: A file's folder does not exist.
        InvalidInputError: The adapter's name ends neither in .npz nor in .onnx.
    """
    if files.query_adapter_file is not None and files.query_adapter_file.suffix not in (
        ".npz",
        ".onnx",
    ):
        raise InvalidInputError(
            f"--adapter {files.query_adapter_file}: expected FILE.npz for searches by "
            "nobackfill.serve, or FILE.onnx for a release; end the name of the file in .npz or "
            ".onnx"
        )
    for path in (
        files.map_file,
        files.onnx_file,
        files.rank_fusion_file,
        files.query_adapter_file,
        files.verdict_page,
    ):
        if path is not None and not path.parent.is_dir():
            raise CannotWriteError(
                f"{path}: cannot be written, because there is no folder {path.parent}; create it"
            )


def _side_notes(old: Source, new: Source, matched: MatchResult) -> list[str]:
    """Say which side is which, and warn if the two seem to be the wrong way round."""
    notes: list[str] = []
    for side, source, vectors in (("old", old, matched.pairs.old), ("new", new, matched.pairs.new)):
        facts = source.facts()
        model = f"model {facts.model[:12]}" if facts.model else "a model that it does not name"
        notes.append(f"{side}: {facts.name}, {vectors.shape[1]} dims, {model}")
    unmatched = len(matched.ids_without_old)
    if unmatched and old.count() <= len(matched.pairs):
        notes.append(
            f"--new has {unmatched} items that --old lacks, although --old is usually the larger "
            "side; exchange the two options if they are the wrong way round"
        )
    return notes


def _converter(files: FitFiles, models: _Models) -> VerifiedConverter | None:
    if files.converter_address is None:
        return None
    return open_converter(
        files.converter_address, root=files.trusted_root, old=models[0], new=models[1]
    )


def _write_files(
    files: FitFiles,
    verdict: Verdict,
    pairs: Pairs,
    models: _Models,
    fingerprints: _Models,
    card: ConverterCard | None,
) -> list[str]:
    """Write the files that are not None; return a line for each."""
    mapping = verdict.map.with_model_names(*models)
    facts = mapping.facts | {VERDICT_FACT: verdict.way}
    if is_unit(pairs.old):
        facts[OLD_NORM_FACT] = "1"
    save_map(files.map_file, replace(mapping, facts=facts))
    lines = [f"map: {files.map_file} ({verdict.map.kind})"]
    if files.onnx_file is not None:
        write_file(files.onnx_file, map_to_upgrade_onnx(mapping))
        lines.append(f"upgrade: {files.onnx_file}, for export.py --upgrade")
    if files.rank_fusion_file is not None:
        save_rank_fusion(files.rank_fusion_file, verdict.joining)
        lines.append(f"rank fusion: {files.rank_fusion_file}, for searches by nobackfill.serve")
    if files.query_adapter_file is not None:
        adapter = verdict.adapter.with_model_names(*models)
        if _is_for_releases(files.query_adapter_file):
            write_file(files.query_adapter_file, map_to_upgrade_onnx(adapter))
        else:
            save_map(files.query_adapter_file, adapter)
        lines.append(f"query adapter: {files.query_adapter_file} ({adapter.kind})")
    if files.verdict_page is not None:
        write_file(files.verdict_page, render_verdict(verdict).encode())
        lines.append(f"report: {files.verdict_page}")
    if files.publication_folder is not None and card is not None:
        manifest = publish_map_as_converter(
            files.publication_folder, verdict, pairs, fingerprints, card
        )
        lines.append(
            f"published: converter {manifest.converter} in {files.publication_folder}; give its "
            "users "
            f"{files.publication_folder / '1.root.json'} on another channel than the publication "
            "itself"
        )
    return lines


def _is_for_releases(adapter: Path) -> bool:
    """Tell whether a query adapter is written as the graph that a release carries."""
    return adapter.suffix == ".onnx"


def _steps(way: str, files: FitFiles) -> list[str]:
    """List the next steps of the recommended option; none for "stay", "switch" and "re-embed"."""
    if way in ("stay", "switch", "re-embed"):
        return []
    if way == ADAPTER_OPTION:
        if files.query_adapter_file is None:
            return ["next: run this command again with --adapter adapter.npz"]
        if _is_for_releases(files.query_adapter_file):
            return [
                "next: publish the new model by export.py with --adapter "
                f"{files.query_adapter_file}"
            ]
        return [f"next: {adapter_example(files.query_adapter_file)}"]
    steps = [f"next: nobackfill carry SOURCE --map {files.map_file} --to NAME"]
    if way == "map":
        return steps
    if files.rank_fusion_file is None:
        steps = ["next: run this command again with --joining joining.npz", *steps]
    natives, joining = "natives.db", files.rank_fusion_file or "joining.npz"
    items = ", items=ITEMS" if way == "lazily" else ""
    return [
        *steps,
        "then: build the index by the statement that `carry` prints, and do not flip",
        f"then: search by Dual.open(source, Path({str(files.map_file)!r}), Path({str(joining)!r}), "
        f"Path({natives!r}), new_model, carried='NAME'{items}) of nobackfill.serve",
    ]


def read_known_item_queries(pairs: Pairs, old: Source, new: Source) -> Queries:
    """Read test queries, each with the id of the item that it should find.

    Args:
        pairs: The items; queries for other items are ignored.
        old: The queries by the old model; an id is that of the item to find, so it occurs once.
        new: The queries by the new model, with the same ids.

    Returns:
        At least 20 queries, with the row of each item among the pairs, in the order of `old`. A
        query that one side lacks is left out.

    Raises:
        InvalidInputError: Dimensions differ from those of the pairs, an id occurs twice, a vector
            is unusable, or fewer than 20 queries have their item among the pairs.
        UnavailableError: The server of a source does not answer.
        NotPermittedError: The server refuses the user, or may hide rows from this role.
        NotFoundError: The table or the collection of a source was deleted meanwhile.
        IncompatibleSpaceError: Files of one folder record different models.
        BusyError: Others hold a store, or its server has too many requests.
        ConfigurationError: The process was forked after a source was opened (LanceDB).
    """
    queries = match_by_id(old, new).pairs
    dims = (queries.old.shape[1], queries.new.shape[1])
    item_dims = (pairs.old.shape[1], pairs.new.shape[1])
    if dims != item_dims:
        raise InvalidInputError(
            f"--queries-old, --queries-new: expected vectors of {item_dims[0]} and {item_dims[1]} "
            f"dims, as the items have, got {dims[0]} and {dims[1]}; embed the queries with the old "
            "model and with the new one"
        )
    places = {name: row for row, name in enumerate(pairs.ids)}
    known = [row for row, name in enumerate(queries.ids) if name in places]
    if len(known) < LEAST_QUERIES:
        raise InvalidInputError(
            f"expected at least {LEAST_QUERIES} queries whose right item has a new vector, found "
            f"{len(known)} of {len(queries.ids)}; append the ids of their items to the file of "
            "`nobackfill sample`, and run `nobackfill embed` again"
        )
    rows = np.array([places[queries.ids[row]] for row in known], np.int64)
    return Queries(
        queries.old[known], queries.new[known], rows, are_gallery_items=False, metric=pairs.metric
    )


def _seconds(source: Source) -> float | None:
    return source.seconds_per_item() if isinstance(source, EmbeddedSource) else None


def _estimate_costs(source: Source, pairs: Pairs, item_count: int) -> MigrationCosts:
    """Let the store estimate what a migration takes; without an answer nothing is known."""
    if not isinstance(source, CostEstimator):
        return MigrationCosts()
    a, b = pairs.old.shape[1], pairs.new.shape[1]
    mapping = Map("affine", np.ones((b, a), np.float32), np.ones(b, np.float32), unit_norm=True)
    window = np.resize(pairs.old, (WINDOW_ITEMS, a))
    started = time.perf_counter()
    mapping(window)
    map_seconds = (time.perf_counter() - started) / WINDOW_ITEMS

    def carry_seconds(scratch: Source) -> float:
        started = time.perf_counter()
        carry(scratch, Target(_SCRATCH_NAME, b, mapping.digest), mapping)
        return (time.perf_counter() - started) / max(1, scratch.count())

    trial = MigrationTrial(pairs.old, pairs.new, item_count, map_seconds, carry_seconds)
    return source.estimate_costs(trial)


def _cost_note(costs: MigrationCosts) -> str:
    """State what the times of a verdict assume, and which steps they leave out."""
    note = "times assume that the models and the store stay as busy as they were when measured"
    if costs.item_seconds is None:
        return note + '; "in all" leaves out writing to the store and its index'
    if costs.index_seconds is None:
        return note + '; "in all" leaves out building the index'
    if costs.index_seconds:
        duration = format_duration(costs.index_seconds)
        note += f"; building the index ({duration}) is estimated from a small one"
    return note


def _lines(verdict: Verdict) -> list[str]:
    """Format the verdict as a table, followed by its notes."""
    names = list(verdict.ways[0].figures)
    head = "".join(f"{name:>14s}" for name in names)
    lines = [
        f"verdict: {verdict.way}: {verdict.words}",
        f"it holds for {verdict.search}, judged by {verdict.judged_by}",
        f"{'way':14s}{head}{'a query':>14s}{'in all':>14s}",
    ]
    for way in verdict.ways:
        figures = "".join(f"{format_figure_percent(way, name):>14s}" for name in names)
        cost = f"{format_duration(way.query_seconds):>14s}{format_duration(way.all_seconds):>14s}"
        worse = f"  worse than staying in {', '.join(way.worse)}" if way.worse else ""
        lines.append(f"{way.name:14s}{figures}{cost}{worse}")
    return lines + verdict.notes
