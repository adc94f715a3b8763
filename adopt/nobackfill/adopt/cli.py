"""The command `nobackfill`: inspect, sample, embed, fit and carry for vectors that live elsewhere.

Each command imports what it needs when it runs, so `--help` stays quick.
"""

import difflib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from nobackfill.errors import InvalidInputError, NobackfillError, NotFoundError
from nobackfill.framing import Fit, Interpolation
from nobackfill.terminal import visible
from nobackfill.version_option import Version

if TYPE_CHECKING:
    from nobackfill.adopt.carrying import VectorMaker
    from nobackfill.adopt.maps import Map
    from nobackfill.adopt.sources.source import Source, Target

FitOption = Annotated[
    Fit | None,
    typer.Option(
        "--fit",
        help="How a picture becomes square: stretch it, crop its middle, or pad it with black.",
        show_default="as the model's files say, else stretch",
    ),
]
Size = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,
        help="Side of the model's input in pixels, if the ONNX graph does not fix it.",
        show_default="as the model's files say",
    ),
]
Shortest = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,
        help="With --fit crop: pixels of the shorter side before the crop.",
        show_default="as the model's files say, else the longer side of --size",
    ),
]
Interpolating = Annotated[
    Interpolation | None,
    typer.Option(
        "--interpolation",
        help="How pictures are scaled.",
        show_default="as the model's files say, else bilinear",
    ),
]
Mean = Annotated[
    tuple[float, float, float] | None,
    typer.Option(
        help="Mean to subtract from each channel of pixels of 0 to 1.",
        show_default="as the model's files say, else 0.485 0.456 0.406",
    ),
]
Std = Annotated[
    tuple[float, float, float] | None,
    typer.Option(
        help="Standard deviation to divide each channel by.",
        show_default="as the model's files say, else 0.229 0.224 0.225",
    ),
]


def given_options(**options: object) -> dict[str, object]:
    """Leave out the options that were not given."""
    return {name: value for name, value in options.items() if value is not None}


_EPILOG = """
All steps for a table of PostgreSQL, LanceDB or SQLite; it asks before it writes:

\b
nobackfill migrate 'postgresql:///shop#documents' --new new.onnx --column body

Step by step, for any store. Here the texts are in the column `body`:

\b
S='postgresql:///shop#documents'
nobackfill inspect $S
nobackfill sample $S -n 2000 --out sample.txt
nobackfill embed $S --column body --only sample.txt --with new.onnx --out new/
nobackfill fit --old $S --new new/ --out map.npz --report verdict.html
nobackfill carry $S --map map.npz --to embedding_new

If somebody has published a map of the two models, you need no pairs:

\b
nobackfill carry $S --release https://HOST/maps --root 1.root.json --to embedding_new

SOURCE is FILE.parquet or a folder of them, a folder of numpy files (ids.npy and one array),
postgresql://USER@HOST/DATABASE#TABLE with pgvector (put passwords in ~/.pgpass or PGPASSWORD),
qdrant:https://HOST:PORT#COLLECTION (its key in NOBACKFILL_QDRANT_KEY) or qdrant:FOLDER#COLLECTION,
milvus:https://HOST:PORT#COLLECTION (NOBACKFILL_MILVUS_TOKEN) or milvus:FILE.db#COLLECTION,
chroma:https://HOST:PORT#COLLECTION (NOBACKFILL_CHROMA_TOKEN), lancedb:FOLDER#TABLE,
sqlite:FILE#TABLE with sqlite-vec.

Exit codes: 0 done, or nothing to do, 2 wrong usage, 65 refused data or failed verification, 66 not
found, 69 a server does not answer, 73 cannot write or exists already, 75 busy: run it again,
77 not permitted, 78 an extra is missing or the configuration is wrong.
"""

app = typer.Typer(
    help="Move stored vectors to another model without computing them again, or learn why to stay.",
    epilog=_EPILOG,
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="Where the vectors are.")]
Key = Annotated[
    str | None,
    typer.Option(help="Column of unique keys.", show_default="the primary key, or `id`"),
]
Vector = Annotated[
    str | None, typer.Option(help="Column of old vectors.", show_default="the only one")
]
Root = Annotated[
    Path | None,
    typer.Option(
        help="The publisher's 1.root.json.", show_default="the one given before, remembered"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
# Options that `fit` and the commands of `converter` share.
Old = Annotated[str, typer.Option(help="SOURCE of the old vectors.")]
New = Annotated[str, typer.Option(help="The same items' vectors by the new model.")]
MapFile = Annotated[Path, typer.Option(help="File for the map.")]
OnnxFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the map for `export.py --upgrade`.")
]
JoiningFile = Annotated[
    Path | None,
    typer.Option(help="File to write: the rank fusion that searches need for `both` and `lazily`."),
]
ReportFile = Annotated[Path | None, typer.Option(help="HTML page of the verdict.")]
QueriesOld = Annotated[
    str | None,
    typer.Option(help="SOURCE of query vectors by the old model; the id is the item to find."),
]
QueriesNew = Annotated[
    str | None, typer.Option(help="SOURCE of the same queries by the new model.")
]
ItemsGone = Annotated[
    bool,
    typer.Option("--items-gone", help="The items no longer exist: never advise to re-embed them."),
]
Also = Annotated[
    str | None,
    typer.Option(
        "--also",
        metavar="MODULE:FUNCTION",
        help="Function that trains one more candidate map; takes minutes.",
    ),
]


@app.callback()
def options(version: Version = False) -> None:
    """Options before a command."""


@app.command()
def inspect(
    source: SourceArgument, key: Key = None, vector: Vector = None, as_json: Json = False
) -> None:
    """Show what a store holds: count, dimension, norms, defects.

    Defects are duplicates, rows with NaN or infinity, and drift from the first rows to the last.
    """
    from nobackfill.adopt import pairs
    from nobackfill.adopt.sources.opening import open_source

    found = pairs.inspect(open_source(source, key=key, vector=vector))
    _answer(as_json, asdict(found), found.sentences)


@app.command()
def sample(
    source: SourceArgument,
    count: Annotated[
        int, typer.Option("-n", min=1, help="Number of items; all if there are fewer.")
    ] = 2000,
    out: Annotated[
        Path | None, typer.Option(help="File of ids, one a line.", show_default="stdout")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed; the same seed draws the same items.")
    ] = 0,
    key: Key = None,
    vector: Vector = None,
) -> None:
    """Choose items to re-embed for `fit`, spread over the space."""
    from nobackfill.adopt import pairs
    from nobackfill.adopt.pairs import read_all
    from nobackfill.adopt.sources.opening import open_items
    from nobackfill.durable import write_file

    rows = read_all(open_items(source, source, key=key, vector=vector))
    if not len(rows):
        raise InvalidInputError(f"{source}: expected items with vectors, found none")
    ids = pairs.sample(rows, min(count, len(rows)), seed)
    text = pairs.encode_ids(ids, source)
    if out is None:
        print(text, end="")
    else:
        write_file(out, text.encode())
        print(visible(f"{len(ids)} of {len(rows)} ids in {out}"))
    # Not on stdout with the ids, which may go into a pipe.
    print(pairs.coverage(rows, ids, seed).sentence, file=sys.stdout if out else sys.stderr)


@app.command()
def embed(
    items: Annotated[
        str, typer.Argument(help="A folder of images, FILE.jsonl, or a SOURCE with --column.")
    ],
    model: Annotated[
        str, typer.Option("--with", help="FILE.onnx, module:function, or an https:// endpoint.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the vectors; it continues an earlier run.")],
    column: Annotated[str, typer.Option(help="Column, or JSON field, of the texts.")] = "text",
    only: Annotated[
        Path | None, typer.Option(help="File of ids, from `sample`.", show_default="all items")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="The model's name at an endpoint.")] = None,
    patience: Annotated[
        float, typer.Option(help="Seconds to wait for an endpoint that is busy.")
    ] = 120.0,
    batch: Annotated[int, typer.Option(min=1, help="Items that the model embeds at a time.")] = 32,
    queries: Annotated[
        bool,
        typer.Option(
            "--queries", help="The texts are queries: some models embed these in another way."
        ),
    ] = False,
    query_encoder: Annotated[
        str | None,
        typer.Option(
            help="Model of the queries, if it is another one.", show_default="that of --with"
        ),
    ] = None,
    query_model_name: Annotated[
        str | None,
        typer.Option(
            help="The name of --query-encoder at an endpoint.", show_default="that of --model-name"
        ),
    ] = None,
    fit: FitOption = None,
    size: Size = None,
    shortest: Shortest = None,
    interpolation: Interpolating = None,
    mean: Mean = None,
    std: Std = None,
    key: Key = None,
) -> None:
    """Embed items by a model.

    After a failure or Ctrl-C, run it again: it embeds only the missing items.

    Items that the model refuses are named and skipped, and the command ends with exit code 65.

    The preprocessing of pictures for FILE.onnx is read from FILE.json in the same folder, or from
    the files that transformers, open_clip or timm exported there, and printed. --fit and the
    options after it override it.
    """
    from nobackfill.adopt.embedding.embedder import QueryEmbedder, open_embedder, reading_of
    from nobackfill.adopt.embedding.vector_folder import embed_into, read_items
    from nobackfill.adopt.pairs import read_ids

    pixels = given_options(
        fit=fit, size=size, shortest=shortest, interpolation=interpolation, mean=mean, std=std
    )
    wanted = None if only is None else read_ids(only)
    found = read_items(items, column=column, key=key, only=wanted)
    if wanted is not None and (lost := sorted(wanted - set(found.ids))):
        _tell(f"{len(lost)} ids have no item, the first: {lost[0]}")
    if found.others:
        _tell(f"left out, hidden or no pictures by their names: {found.others}")
    embedder = open_embedder(
        model, name=model_name, patience=patience, queries=queries, pixels=pixels
    )
    if told := reading_of(embedder):
        _tell(told)
    if query_encoder is not None:
        called = query_model_name or model_name
        encoder = open_embedder(query_encoder, name=called, patience=patience, queries=True)
        embedder = QueryEmbedder(embedder, encoder)
    refusals = dict[str, str]()
    try:
        made = embed_into(
            out,
            found,
            embedder,
            batch=batch,
            progress=_progress(len(found.ids)),
            refuse=refusals.__setitem__,
        )
    finally:
        for name, why in refusals.items():
            _tell(f"{name}: {why}")
    count = f"{len(refusals)} refused, " if refusals else ""
    print(visible(f"{made} embedded, {count}{len(found.ids) - len(refusals)} in {out}"))
    if refusals:
        raise typer.Exit(InvalidInputError.exit_code)


@app.command()
def fit(
    old: Old,
    new: New,
    out: MapFile = Path("map.npz"),
    onnx: OnnxFile = None,
    joining: JoiningFile = None,
    report: ReportFile = None,
    queries_old: QueriesOld = None,
    queries_new: QueriesNew = None,
    items_gone: ItemsGone = False,
    trainer: Also = None,
    key: Key = None,
    vector: Vector = None,
    as_json: Json = False,
) -> None:
    """Decide how to migrate, and write the map for `carry`.

    It fits maps, compares five ways to go on, one of which is to stay, and names the best one.
    """
    from nobackfill.adopt.fitting import FitFiles, fit_and_judge

    files = FitFiles(out, onnx, joining, report)
    found = fit_and_judge(
        old,
        new,
        files,
        queries_old,
        queries_new,
        not items_gone,
        trainer_name=trainer,
        key=key,
        vector=vector,
    )
    _answer(as_json, found.answer, found.lines)


converter_commands = typer.Typer(
    help="Share maps between public models: publish, improve, withdraw.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.add_typer(converter_commands, name="converter")


@converter_commands.command()
def publish(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The publication folder.")],
    old: Old,
    new: New,
    card: Annotated[Path, typer.Option(help="JSON file: both models, licences, corpus.")],
    start: Annotated[
        str | None,
        typer.Option("--from", help="A published converter to improve; as `carry --release`."),
    ] = None,
    root: Root = None,
    out: MapFile = Path("map.npz"),
    onnx: OnnxFile = None,
    joining: JoiningFile = None,
    report: ReportFile = None,
    queries_old: QueriesOld = None,
    queries_new: QueriesNew = None,
    items_gone: ItemsGone = False,
    key: Key = None,
    vector: Vector = None,
    as_json: Json = False,
) -> None:
    """Publish the map between two public models for users who have no pairs.

    The map is fitted and judged as by `nobackfill fit`, then signed. Nothing is published where the
    new model is worse than the old one.
    """
    from nobackfill.adopt.fitting import FitFiles, fit_and_judge

    files = FitFiles(out, onnx, joining, report, folder, card, start, root)
    found = fit_and_judge(
        old, new, files, queries_old, queries_new, not items_gone, key=key, vector=vector
    )
    _answer(as_json, found.answer, found.lines)


@converter_commands.command()
def improve(
    converter: Annotated[
        str,
        typer.Argument(metavar="CONVERTER", help="N, FOLDER or URL, both with #N for one of them."),
    ],
    old: Old,
    new: New,
    root: Root = None,
    out: MapFile = Path("map.npz"),
    onnx: OnnxFile = None,
    joining: JoiningFile = None,
    report: ReportFile = None,
    queries_old: QueriesOld = None,
    queries_new: QueriesNew = None,
    items_gone: ItemsGone = False,
    trainer: Also = None,
    key: Key = None,
    vector: Vector = None,
    as_json: Json = False,
) -> None:
    """Improve a published map by pairs of your own.

    It is `nobackfill fit` with two more candidates: the converter as it is, and corrected by your
    pairs.
    """
    from nobackfill.adopt.fitting import FitFiles, fit_and_judge

    files = FitFiles(out, onnx, joining, report, converter=converter, root=root)
    found = fit_and_judge(
        old,
        new,
        files,
        queries_old,
        queries_new,
        not items_gone,
        trainer_name=trainer,
        key=key,
        vector=vector,
    )
    _answer(as_json, found.answer, found.lines)


@converter_commands.command()
def withdraw(
    number: Annotated[int, typer.Argument(help="Number of the converter.")],
    reason: Annotated[str, typer.Option(help="Reason that users of this map are shown.")],
    model_repo: Annotated[Path, typer.Option(help="The publication folder.")] = Path("model_repo"),
    targets_key: Annotated[
        Path | None,
        typer.Option(help="The targets key.", show_default="MODEL_REPO.keys/targets.pem"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and report only.")] = False,
    as_json: Json = False,
) -> None:
    """Withdraw a published map, so that nobody can use it any more."""
    from nobackfill.release.publishing import renew
    from nobackfill.release.publishing.metadata import Keys

    keys = Keys.of(model_repo, None if targets_key is None else {"targets": targets_key})
    news = renew.withdraw(model_repo, number, reason, keys, dry_run, converter=True)
    answer = {"converter": number, "reason": reason, "news": news, "written": news and not dry_run}
    if news:
        line = f"converter {number} {'would be' if dry_run else 'is'} withdrawn: {reason}"
    else:
        line = f"converter {number} is withdrawn already, for the same reason"
    _answer(as_json, answer, [line])


@app.command()
def carry(
    source: SourceArgument,
    to: Annotated[str, typer.Option(help="Name of the new vectors; PostgreSQL: also table:NAME.")],
    mapping: Annotated[
        Path | None, typer.Option("--map", help="The map that `nobackfill fit` wrote.")
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(help="Or a published map: N, FOLDER or URL; #N after these chooses one."),
    ] = None,
    root: Root = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The old model, as `embed --with`.", show_default="the one that the store names"
        ),
    ] = None,
    new_model: Annotated[
        str | None,
        typer.Option(
            "--with",
            help="Or re-embed every item: the new model, as `embed --with`. Needs --column or "
            "--items.",
        ),
    ] = None,
    new_model_name: Annotated[
        str | None, typer.Option("--model-name", help="The new model's name at an endpoint.")
    ] = None,
    vectors: Annotated[
        Path | None,
        typer.Option(help="Or use the vectors that `embed` wrote, of items that did not change."),
    ] = None,
    natives: Annotated[
        Path | None, typer.Option(help="Use the vectors that lazy re-embedding keeps, too.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="Column of the texts that are re-embedded.")
    ] = None,
    items: Annotated[
        str | None,
        typer.Option(help="Or a folder of images, or FILE.jsonl, with the ids of the store."),
    ] = None,
    flip: Annotated[
        bool,
        typer.Option(
            "--flip",
            help="PostgreSQL: build the index, lock the table, carry the rest, and flip. LanceDB, "
            "SQLite: carry the rest and flip. Qdrant: writers put both vectors; carry the rest.",
        ),
    ] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Remove what was carried under this name.")
    ] = False,
    key: Key = None,
    vector: Vector = None,
    as_json: Json = False,
) -> None:
    """Write new vectors into the store of the old ones.

    No old vector changes. After an interruption, run it again to continue. Others may write to the
    store meanwhile. In PostgreSQL, a new column updates every row, which fires the table's UPDATE
    triggers; table:NAME updates none.
    """
    from nobackfill.adopt.converters import mapping_for
    from nobackfill.adopt.embedding.native_vectors import open_contents, open_native_vectors
    from nobackfill.adopt.fitting import VERDICT
    from nobackfill.adopt.maps import NEW_MODEL
    from nobackfill.adopt.sources.opening import open_items
    from nobackfill.adopt.sources.source import Target

    opened = open_items(source, source, key=key, vector=vector)
    if rollback:
        removed = opened.rollback(to)
        line = f"{to}: removed" if removed else f"{to}: nothing that was carried has this name"
        _answer(as_json, {"removed": removed}, [line])
        return
    facts = opened.facts()
    if new_model is not None or vectors is not None:
        if mapping is not None or release is not None:
            raise InvalidInputError("expected a map, or --with and --vectors, not both")
        contents = open_contents(opened, column, items)
        if natives is not None and not natives.is_file():
            raise NotFoundError(
                f"--natives {natives}: no such file; expected the file that Dual of "
                "nobackfill.serve writes"
            )
        native = open_native_vectors(
            opened,
            contents,
            model=new_model,
            model_name=new_model_name,
            folder=vectors,
            natives=natives,
        )
        _carry_and_answer(opened, native.target(to), native, [], flip=flip, as_json=as_json)
        return
    loaded, said = mapping_for(facts, mapping, release, root, model)
    if (way := loaded.facts.get(VERDICT, "map")) != "map":
        then = "a map alone was not the best way"
        if way in ("both", "lazily"):
            then = f"build the index, leave the flip, and search by Dual with carried={to!r}"
        said = [*said, f"the verdict of {mapping} was {way}: {then}"]
    made = loaded.facts.get(NEW_MODEL)
    target = Target(to, loaded.dims[1], loaded.digest, made)
    _carry_and_answer(opened, target, loaded, said, flip=flip, as_json=as_json)


def _carry_and_answer(
    source: "Source",
    target: "Target",
    maker: "Map | VectorMaker",
    notes: list[str],
    *,
    flip: bool,
    as_json: bool,
) -> None:
    """Write the new vectors and print what was done; `notes`: sentences that come first."""
    from nobackfill.adopt.carrying import carry as write_vectors
    from nobackfill.adopt.sources.source import WarningSource

    if isinstance(source, WarningSource):
        # With --flip they are an error.
        obstacles = [] if flip else source.obstacles(target)
        for warning in [*source.warnings(target.name), *obstacles]:
            print(visible(f"nobackfill: warning: {warning}"), file=sys.stderr, flush=True)
    done = write_vectors(source, target, maker, progress=_progress(source.count()), flip=flip)
    lines = [*notes, f"{done.written} written, {done.total} carried and checked"]
    lines += [
        "flipped" if flip or not done.steps else "to flip:",
        *(f"  {step}" for step in done.steps),
    ]
    _answer(as_json, {**asdict(done), "notes": notes}, lines)


class _MigrateGroup(TyperGroup):
    """Reads `migrate SOURCE …` as `migrate start SOURCE …`, and refuses a misspelt command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            word = args[0]
            if not word.startswith("-") and not self._is_source(word):
                near = difflib.get_close_matches(word, self.commands, 1)
                ctx.fail(
                    f"{word!r} is no command of migrate and no SOURCE. Expected a SOURCE, such as "
                    "'postgresql:///shop#documents', or one of the commands "
                    f"{', '.join(self.commands)}."
                    + (f" Did you mean `nobackfill migrate {near[0]}`?" if near else "")
                )
            args = ["start", *args]
        return super().parse_args(ctx, args)

    @staticmethod
    def _is_source(word: str) -> bool:
        return any(sign in word for sign in ":/.#") or Path(word).exists()


migrate_commands = typer.Typer(
    cls=_MigrateGroup,
    help="Do all steps in PostgreSQL, LanceDB or SQLite, or say why not.\n\n"
    "`migrate SOURCE` is `migrate start SOURCE`; its options: `nobackfill migrate start --help`.",
    epilog="""Example:

\b
nobackfill migrate 'postgresql:///shop#documents' --new new.onnx --column body
nobackfill migrate status
nobackfill migrate finish""",
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.add_typer(migrate_commands, name="migrate")
Work = Annotated[
    Path, typer.Option(help="Folder with the state of the migration; one folder per migration.")
]
_WORK = Path("nobackfill-migration")


@migrate_commands.command()
def start(
    source: SourceArgument,
    new: Annotated[
        str, typer.Option(help="The new model: FILE.onnx, module:function or an https:// endpoint.")
    ],
    column: Annotated[
        str | None, typer.Option(help="Column of the texts that the models embed.")
    ] = None,
    items: Annotated[
        str | None,
        typer.Option(
            help="In place of --column: a folder of images, or FILE.jsonl. File names or the field "
            "`id` are the table's keys."
        ),
    ] = None,
    old: Annotated[
        str | None, typer.Option(help="The old model, as --new; --queries needs it.")
    ] = None,
    queries: Annotated[
        str | None,
        typer.Option(help="FILE.jsonl of test queries: `text`, and `id` of the item to find."),
    ] = None,
    items_gone: ItemsGone = False,
    new_name: Annotated[str | None, typer.Option(help="The new model's name at an endpoint.")] = (
        None
    ),
    old_name: Annotated[str | None, typer.Option(help="The old model's name at an endpoint.")] = (
        None
    ),
    count: Annotated[
        int | None,
        typer.Option(
            "-n", min=20, help="Items to embed for the verdict.", show_default="2000, or as before"
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price-per-1000", min=0.0, help="Price of 1,000 items, for the costs in the verdict."
        ),
    ] = None,
    natives: Annotated[
        Path | None,
        typer.Option(
            help="Verdicts both and lazily: file in which Dual of nobackfill.serve stores native "
            "vectors. Its vectors are reused, and items that searches want come first.",
            show_default="natives.db in --work",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write without asking.")] = False,
    work: Work = _WORK,
    key: Key = None,
    vector: Vector = None,
) -> None:
    """Decide whether to re-embed; then do it and flip, or stay.

    It asks before it writes. If it is killed, run the same command again: it continues. The old
    vectors stay until `migrate finish`, and `migrate back` restores them.
    """
    from nobackfill.adopt.migrating import Migration, MigrationPlan
    from nobackfill.adopt.sources.source import name_before

    if (queries is None) != (old is None):
        raise InvalidInputError(
            "expected --queries and --old together, because both models embed the queries; give "
            "both or neither"
        )
    plan = MigrationPlan(
        source, new, key, vector, column=column, items=items, items_gone=items_gone, old=old,
        queries=queries, new_name=new_name, old_name=old_name, count=count, price=price,
        natives=None if natives is None else str(natives),
    )  # fmt: skip
    migration = Migration(work)
    for line in migration.decide(plan, _tell):
        print(visible(line))
    way = migration.plan().way
    if way == "stay":
        migration.write(_tell)
        print("nothing was written: stay with the old model")
        return
    if not yes:
        if not sys.stdin.isatty():
            print(f"nothing was written; run it again with --yes to execute this verdict: {way}")
            return
        if not typer.confirm(f"execute this verdict now: {way}?"):
            print("nothing was written; run it again when you are ready")
            return
    result = migration.write(_tell)
    after = migration.plan()
    if way == "switch":
        print("no vector was written: the new model serves the stored vectors; switch your queries")
        return
    print(f"{result.total} rows have a new vector, {result.written} of them written by this run")
    if after.state == "flipped":
        new_vectors = after.to.removesuffix("_new")
        old_vectors = name_before(new_vectors)
        print(f"flipped: {new_vectors} holds the new vectors, {old_vectors} the old ones")
        print("next: switch your queries to the new model; then `nobackfill migrate finish` drops")
        print("the old vectors. Until then `nobackfill migrate back` restores them")
    if after.state == "mapped":
        print(
            f"nothing flips, because the items are gone: search by both models with Dual of "
            f"nobackfill.serve, carried='{after.to}'. `nobackfill migrate back` removes this column"
        )
        return
    for step in result.steps:
        print(visible(f"  {step}"))


@migrate_commands.command()
def status(work: Work = _WORK, as_json: Json = False) -> None:
    """Show the state of a migration, and how many rows have a new vector."""
    from nobackfill.adopt.migrating import Migration

    progress = Migration(work).status()
    plan = progress.plan
    line = f"{plan.source}: {plan.state}"
    if plan.way:
        line += f", verdict {plan.way}"
    if progress.total:
        line += f", {progress.rows} of {progress.total} rows have a new vector"
    answer = {
        "state": plan.state,
        "way": plan.way,
        "rows": progress.rows,
        "total": progress.total,
    }
    _answer(as_json, answer, [line])


@migrate_commands.command()
def pause(work: Work = _WORK) -> None:
    """Stop the running migration after the rows that it is embedding or writing."""
    from nobackfill.adopt.migrating import Migration

    Migration(work).pause()
    print(
        "the migration stops after its present rows; run the same `nobackfill migrate` again to "
        "continue"
    )


@migrate_commands.command()
def back(
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", help="Go on although rows that were written since the flip lose their vector."
        ),
    ] = False,
    work: Work = _WORK,
) -> None:
    """Undo a migration, before its flip or after it: the table has its old vectors again."""
    from nobackfill.adopt.migrating import Migration

    lost = Migration(work).back(lose=yes)
    print("taken back: the table has its old vectors")
    if lost:
        print(f"{lost} rows have no vector any more; embed them with the old model")


@migrate_commands.command()
def finish(work: Work = _WORK) -> None:
    """Drop the old vectors after the flip; `back` cannot undo it."""
    from nobackfill.adopt.migrating import Migration

    Migration(work).finish()
    print("finished: the old vectors are dropped")


def _tell(line: str) -> None:
    print(visible(line), file=sys.stderr)


def _progress(total: int) -> Callable[[int], None]:
    """Return a function that shows a count on stderr, if that is a terminal."""

    def show(count: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if count >= total else "\r"
            print(f"{count} of {total}", end=end, file=sys.stderr, flush=True)

    return show


def _answer(as_json: bool, answer: Mapping[str, object], lines: list[str]) -> None:
    print(json.dumps(answer) if as_json else "\n".join(map(visible, lines)))


def main() -> None:
    """Run a command; exit codes as in nobackfill.errors."""
    try:
        app()
    except NobackfillError as error:
        print(visible(f"nobackfill: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
