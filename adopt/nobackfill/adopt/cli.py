"""The command `nobackfill`: inspect, sample, embed, fit and migrate vectors in a user's own store.

Each command imports what it needs when it runs, so `--help` stays quick.
"""

import difflib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from nobackfill.errors import InvalidInputError, NobackfillError, NotFoundError, error_from_os
from nobackfill.framing import Fit, Interpolation
from nobackfill.terminal import escape_control
from nobackfill.version_option import Version

if TYPE_CHECKING:
    from nobackfill.adopt.carrying import VectorComputer
    from nobackfill.adopt.maps import Map
    from nobackfill.adopt.migrating import Migration, MigrationPlan
    from nobackfill.adopt.sources.source import Source, Target

FitOption = Annotated[
    Fit | None,
    typer.Option(
        "--fit",
        help="For an ONNX model of images: how a picture gets the shape of the model's input: "
        "stretch it, crop its middle, or pad it with black.",
        show_default="as the files in the model's folder declare, else stretch",
    ),
]
Size = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,
        help="For an ONNX model of images whose graph leaves the size of its input open: the side "
        "of the square input, in pixels.",
        show_default="as the files in the model's folder declare",
    ),
]
Shortest = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,
        help="With --fit crop: length in pixels to which a picture's shorter side is scaled before "
        "its middle is cut out.",
        show_default="as the files in the model's folder declare, else the longer side of the "
        "model's input",
    ),
]
Interpolating = Annotated[
    Interpolation | None,
    typer.Option(
        "--interpolation",
        help="For an ONNX model of images: the filter by which pictures are scaled.",
        show_default="as the files in the model's folder declare, else bilinear",
    ),
]
Mean = Annotated[
    tuple[float, float, float] | None,
    typer.Option(
        help="For an ONNX model of images: three numbers to subtract from the red, green and blue "
        "of every pixel, which lie between 0 and 1.",
        show_default="as the files in the model's folder declare, else 0.485 0.456 0.406",
    ),
]
Std = Annotated[
    tuple[float, float, float] | None,
    typer.Option(
        help="For an ONNX model of images: three numbers by which red, green and blue are divided "
        "after --mean is subtracted.",
        show_default="as the files in the model's folder declare, else 0.229 0.224 0.225",
    ),
]


def given_options(**options: object) -> dict[str, object]:
    """Return the options whose value is not None, by name; a value of None was not given."""
    return {name: value for name, value in options.items() if value is not None}


_EPILOG = """
All steps in PostgreSQL, Qdrant, Milvus, Chroma, LanceDB or SQLite; it asks before it writes:

\b
nobackfill migrate 'postgresql:///shop#documents' --new new.onnx --column body

Step by step, for any store. The verdict of `fit` advises how to change the model; the map that it
writes computes new vectors from old ones. Here the texts are in the column `body`:

\b
S='postgresql:///shop#documents'
nobackfill inspect $S
nobackfill sample $S -n 2000 --out sample.txt
nobackfill embed $S --column body --only sample.txt --with new.onnx --out new/
nobackfill fit --old $S --new new/ --out map.npz --report verdict.html
nobackfill carry $S --map map.npz --to embedding_new

If somebody has published a map of the two models, you need not embed anything:

\b
nobackfill carry $S --release https://HOST/maps --root 1.root.json --to embedding_new

SOURCE is the address of a store of vectors: FILE.parquet or a folder of such files, a folder of
numpy files (ids.npy and one array),
postgresql://USER@HOST/DATABASE#TABLE with pgvector (put passwords in ~/.pgpass or PGPASSWORD),
qdrant:https://HOST:PORT#COLLECTION (its key in NOBACKFILL_QDRANT_KEY) or qdrant:FOLDER#COLLECTION,
milvus:https://HOST:PORT#COLLECTION (NOBACKFILL_MILVUS_TOKEN) or milvus:FILE.db#COLLECTION,
chroma:https://HOST:PORT#COLLECTION (NOBACKFILL_CHROMA_TOKEN), lancedb:FOLDER#TABLE,
sqlite:FILE#TABLE with sqlite-vec.

Exit codes: 0 done, or nothing to do, 2 wrong usage, 65 refused data or failed verification, 66 not
found, 69 a server does not answer, 73 cannot write or exists already, 75 busy: run it again,
77 not permitted, 78 an extra is missing or the configuration is wrong, 130 ended by Ctrl-C.
"""

app = typer.Typer(
    help="Move stored vectors to another model without computing them again, or learn why to stay.",
    epilog=_EPILOG,
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Exit code of a command that Ctrl-C ended, as typer has it for the others.
_INTERRUPTED = 130


@contextmanager
def _interruptible() -> Iterator[None]:
    """Print the command that continues where Ctrl-C ends a command that keeps what it wrote."""
    try:
        yield
    except KeyboardInterrupt:
        _tell(f"interrupted: what was written is kept; {_continuation()}")
        raise typer.Exit(_INTERRUPTED) from None


_FORMS = "`nobackfill --help` lists the forms of an address."
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Address of the store with the old vectors, such as 'postgresql:///shop#documents'. "
        f"It is only read. {_FORMS}",
    ),
]
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Address of the store with the old vectors, such as 'postgresql:///shop#documents'. "
        f"The new vectors are written into it. {_FORMS}",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Column with the unique keys of the rows, in the store of the old vectors.",
        show_default="the primary key, or `id`",
    ),
]
Vector = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Column with the old vectors, in a store with several columns of vectors.",
        show_default="the only one",
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION",
        help="Condition in SQL for the rows of a table of PostgreSQL, LanceDB or SQLite that holds "
        "vectors of several models, such as \"model = 'a'\": only these rows are read. Other "
        "stores refuse it, and only PostgreSQL takes it for migrate.",
        show_default="all rows",
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File 1.root.json with the publisher's first root metadata, the keys that this "
        "machine is to trust; it is only read. Get it over another channel than the publication. "
        "--release needs it once for each publication.",
        show_default="the one that an earlier run stored for this user",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object on stdout; without this, print readable text."
    ),
]
# Options that `fit` and the commands of `converter` share.
Old = Annotated[
    str,
    typer.Option(
        metavar="SOURCE",
        help=f"Address of the store with the old model's vectors. It is only read. {_FORMS}",
    ),
]
New = Annotated[
    str,
    typer.Option(
        metavar="SOURCE",
        help="Address of the new model's vectors of the same items, with the same ids: a folder "
        "that `nobackfill embed` wrote, or another SOURCE. It is only read.",
    ),
]
MapFile = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="File to write the map to, which computes new vectors from old ones. "
        "`nobackfill carry --map` reads it.",
    ),
]
OnnxFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Second file to write the map to, as an ONNX graph, which "
        "`python training/export.py --upgrade` publishes. Without this, no ONNX graph is written.",
    ),
]
JoiningFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File to write the weights of rank fusion to, which merges the hits of both models "
        "into one ranking. Dual of nobackfill.serve reads it if the verdict is `both` (search by "
        "both models) or `lazily` (also re-embed hits). Without this, no weights are written.",
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="HTML page to write the verdict to, with its advice and figures. Without this, the "
        "verdict is only printed.",
    ),
]
QueriesOld = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        help="Address of the old model's vectors of test queries, each with the id of the item "
        "that it should find: a folder that `nobackfill embed --queries` wrote. It is only read. "
        "Without queries, options are compared by how many of the new model's own hits they find.",
    ),
]
QueriesNew = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        help="Address of the new model's vectors of the queries of --queries-old, with the same "
        "ids. It is required with --queries-old, and only read. Without queries, options are "
        "compared by how many of the new model's own hits they find.",
    ),
]
ItemsGone = Annotated[
    bool,
    typer.Option(
        "--items-gone",
        help="The texts or images no longer exist, so the verdict never advises to re-embed them. "
        "Without this, the verdict assumes that they exist.",
    ),
]
OldGone = Annotated[
    bool,
    typer.Option(
        "--old-gone",
        help="The old model can embed no more queries, so the verdict never advises what needs it: "
        "`stay` (change nothing), `both` (search by both models) and `lazily` (also re-embed "
        "hits). Without this, the verdict assumes that it can.",
    ),
]
Also = Annotated[
    str | None,
    typer.Option(
        "--also",
        metavar="MODULE:FUNCTION",
        help="Python function that trains one more candidate map, which takes minutes, such as "
        "nobackfill.training.pairs:residual. Without this, all candidates are linear maps.",
    ),
]


@app.callback()
def options(version: Version = False) -> None:
    """Define the options that stand before a command."""


@app.command()
def inspect(
    source: SourceArgument,
    key: Key = None,
    vector: Vector = None,
    where: Where = None,
    as_json: Json = False,
) -> None:
    """Show what a store holds: count, dimension, norms and defects of its vectors.

    Defects are duplicates, rows with NaN or infinity, and drift from the first rows to the last.
    Every vector is read once, and nothing is written.
    """
    from nobackfill.adopt import pairs
    from nobackfill.adopt.sources.opening import open_source

    found = pairs.inspect(open_source(source, key=key, vector=vector, where=where))
    _answer(as_json, asdict(found), found.sentences)


@app.command()
def sample(
    source: SourceArgument,
    count: Annotated[
        int,
        typer.Option(
            "-n",
            metavar="N",
            min=1,
            help="Number of items to choose; all are chosen if the store has fewer.",
        ),
    ] = 2000,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File to write the ids of the chosen items to, one a line.",
            show_default="stdout",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Seed of the random choice; the same seed chooses the same items again.",
        ),
    ] = 0,
    key: Key = None,
    vector: Vector = None,
    where: Where = None,
) -> None:
    """Choose items to embed by the new model for `nobackfill fit`, spread over the old vectors."""
    from nobackfill.adopt import pairs
    from nobackfill.adopt.sources.opening import open_item_vectors
    from nobackfill.durable import write_file

    opened = open_item_vectors(source, source, key=key, vector=vector, where=where)
    sampling = pairs.sample_source(opened, count, seed=seed)
    ids = sampling.ids
    text = pairs.encode_ids(ids, source)
    if out is None:
        print(text, end="")
    else:
        write_file(out, text.encode())
        which = f"the ids of {len(ids)} of {sampling.source_count} items"
        print(escape_control(f"{out}: written, with {which}"))
    # Not on stdout with the ids, which may go into a pipe.
    covered = pairs.measure_coverage(opened, sampling, seed)
    print(covered.sentence, file=sys.stdout if out else sys.stderr)


@app.command()
@_interruptible()
def embed(
    items: Annotated[
        str,
        typer.Argument(
            help="Texts or images to embed, which are only read: a folder of images, whose ids are "
            "their paths in it; FILE.jsonl with an id and a text in each line; or a SOURCE with "
            "texts in --column."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="MODEL",
            help="Model that embeds the items: FILE.onnx, a folder that sentence-transformers or "
            "model2vec saved, a Python function module:function, or "
            "the https:// address of an endpoint like OpenAI's embeddings, whose key is in "
            "NOBACKFILL_ENDPOINT_KEY.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Folder to write the vectors to, as Parquet files. It is created if missing. "
            "Items whose vectors it holds already are not embedded again.",
        ),
    ],
    column: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Column of the SOURCE, or field of FILE.jsonl, with the texts. Images ignore it.",
        ),
    ] = "text",
    only: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File to read: ids of the items to embed, one a line, as `nobackfill sample` "
            "writes it.",
            show_default="all items",
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the model at the endpoint of --with. It is required for an endpoint; "
            "other models ignore it.",
        ),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Seconds for which one request is repeated while an endpoint is busy or fails.",
        ),
    ] = 120.0,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of items that the model gets at a time.")
    ] = 32,
    queries: Annotated[
        bool,
        typer.Option(
            "--queries",
            help="Embed the texts as queries: some models put another prefix before a query. "
            "Without this, they are embedded as documents.",
        ),
    ] = False,
    query_encoder: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Second model that embeds the texts as queries, named as for --with, where a "
            "model has an encoder of its own for queries.",
            show_default="the model of --with",
        ),
    ] = None,
    query_model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the model of --query-encoder at an endpoint.",
            show_default="that of --model-name",
        ),
    ] = None,
    fit: FitOption = None,
    size: Size = None,
    shortest: Shortest = None,
    interpolation: Interpolating = None,
    mean: Mean = None,
    std: Std = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column of the SOURCE, or field of FILE.jsonl, with the unique ids. Images "
            "ignore it.",
            show_default="the primary key, or `id`",
        ),
    ] = None,
    where: Where = None,
) -> None:
    """Embed texts or images by a model, and write their vectors into a folder.

    After a failure or Ctrl-C, run it again: it embeds only the items without a vector, and items
    whose content has changed since.

    Items that the model refuses are named and skipped, and so are lines of FILE.jsonl that cannot
    be read or repeat an id. The command then ends with exit code 65.

    The preprocessing of pictures for FILE.onnx is read from FILE.json in the same folder, or from
    the files that transformers, open_clip or timm exported there, and printed. --fit and the
    options after it replace the values of these files.
    """
    from nobackfill.adopt.embedding.embedder import (
        QueryEmbedder,
        describe_preparation,
        open_embedder,
    )
    from nobackfill.adopt.embedding.vector_folder import embed_into, read_items
    from nobackfill.adopt.pairs import read_ids

    pixels = given_options(
        fit=fit, size=size, shortest=shortest, interpolation=interpolation, mean=mean, std=std
    )
    wanted = None if only is None else read_ids(only)
    line_refusals = dict[str, str]()
    found = read_items(
        items, column=column, key=key, where=where, only=wanted, refusals=line_refusals
    )
    for name, why in line_refusals.items():
        _tell(f"{name}: {why}")
    if wanted is not None and (lost := sorted(wanted - set(found.ids))):
        _tell(f"{only}: {len(lost)} ids have no item in {items}, the first: {lost[0]}")
    if found.skipped_file_count:
        _tell(
            f"{items}: {found.skipped_file_count} files left out: hidden, or not named as pictures"
        )
    embedder = open_embedder(
        model, name=model_name, patience=patience, queries=queries, pixels=pixels
    )
    if told := describe_preparation(embedder):
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
            batch_size=batch,
            progress=_progress(len(found.ids)),
            on_failure=refusals.__setitem__,
        )
    finally:
        for name, why in refusals.items():
            _tell(f"{name}: {why}")
    refused_count = len(refusals) + len(line_refusals)
    count = f"{refused_count} refused, " if refused_count else ""
    vectors = len(found.ids) - len(refusals)
    print(escape_control(f"{made} items embedded now, {count}{vectors} with a vector in {out}"))
    if refused_count:
        raise typer.Exit(InvalidInputError.exit_code)


@app.command()
def fit(
    old: Old,
    new: New,
    out: MapFile = Path("map.npz"),
    onnx: OnnxFile = None,
    joining: JoiningFile = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File to write the query adapter to, which maps the new model's queries so that "
            "they search the old vectors: FILE.npz for AdapterSearch of nobackfill.serve, or "
            "FILE.onnx for `python training/export.py --adapter`. Without this, it is not written.",
        ),
    ] = None,
    report: ReportFile = None,
    queries_old: QueriesOld = None,
    queries_new: QueriesNew = None,
    items_gone: ItemsGone = False,
    old_gone: OldGone = False,
    trainer: Also = None,
    key: Key = None,
    vector: Vector = None,
    where: Where = None,
    as_json: Json = False,
) -> None:
    """Decide how to change the model, and write the map for `nobackfill carry`.

    It fits maps from the old model's vectors to the new one's. It compares them with staying, with
    a query adapter (a map of the new model's queries to the old vectors), with a search by both
    models and with re-embedding, and prints the best option with its figures. The stores are only
    read.
    """
    from nobackfill.adopt.fitting import FitFiles, fit_and_judge

    files = FitFiles(out, onnx, joining, report, query_adapter_file=adapter)
    found = fit_and_judge(
        old,
        new,
        files,
        queries_old,
        queries_new,
        not items_gone,
        old_model_available=not old_gone,
        trainer_name=trainer,
        key=key,
        vector=vector,
        where=where,
    )
    _answer(as_json, found.json_answer, found.terminal_lines)


converter_commands = typer.Typer(
    help="Publish, improve or withdraw a signed map between two public models.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.add_typer(converter_commands, name="converter")


@converter_commands.command()
def publish(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Publication folder to write the signed map into; it is created if missing.",
        ),
    ],
    old: Old,
    new: New,
    card: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="JSON file to read: the names, licences and files of both models, and the name "
            "and the licence of the corpus, as docs/adopt.md shows.",
        ),
    ],
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CONVERTER",
            help="Also try this published map, after a fit of what it misses to --old and --new. "
            "The best of all maps is written. Name it as for `nobackfill carry --release`. "
            "Without this, maps are fitted to --old and --new alone.",
        ),
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
    """Publish the map between two public models for users who cannot fit one themselves.

    The map is fitted and judged as by `nobackfill fit`, then signed. Nothing is published if the
    new model is worse than the old one.
    """
    from nobackfill.adopt.fitting import FitFiles, fit_and_judge

    files = FitFiles(out, onnx, joining, report, folder, card, start, root)
    found = fit_and_judge(
        old, new, files, queries_old, queries_new, not items_gone, key=key, vector=vector
    )
    _answer(as_json, found.json_answer, found.terminal_lines)


@converter_commands.command()
def improve(
    converter: Annotated[
        str,
        typer.Argument(
            metavar="CONVERTER",
            help="Published map to improve, which is only read: FOLDER or URL of its publication, "
            "with #N for number N of several, or N alone for number N in the folder model_repo.",
        ),
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
    """Improve a published map by vectors of your own items, and write it for `nobackfill carry`.

    It is `nobackfill fit` with two more candidates: the published map as it is, and the same map
    corrected by your vectors of both models. Nothing is published.
    """
    from nobackfill.adopt.fitting import FitFiles, fit_and_judge

    files = FitFiles(out, onnx, joining, report, converter_address=converter, trusted_root=root)
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
    _answer(as_json, found.json_answer, found.terminal_lines)


@converter_commands.command()
def withdraw(
    number: Annotated[
        int, typer.Argument(help="Number of the published map, as `converter publish` printed it.")
    ],
    reason: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Reason for the withdrawal, which is published: commands that refuse the map "
            "show it.",
        ),
    ],
    model_repo: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Publication folder that contains the map; new signed metadata is written there.",
        ),
    ] = Path("model_repo"),
    targets_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Private key that signs the new metadata, which is only read.",
            show_default="MODEL_REPO.keys/targets.pem",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what would change, and write nothing. Without this, the map is withdrawn.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Withdraw a published map, so that `nobackfill carry` and `improve` refuse it from then on."""
    from nobackfill.release.publishing import renew
    from nobackfill.release.publishing.metadata import SigningKeys

    keys = SigningKeys.of_publication(
        model_repo, None if targets_key is None else {"targets": targets_key}
    )
    news = renew.withdraw(model_repo, number, reason, keys, dry_run, is_converter=True)
    answer = {"converter": number, "reason": reason, "news": news, "written": news and not dry_run}
    if news:
        line = f"converter {number} {'would be' if dry_run else 'is'} withdrawn: {reason}"
    else:
        line = f"converter {number} is withdrawn already, for the same reason"
    _answer(as_json, answer, [line])


@app.command()
@_interruptible()
def carry(
    source: TargetArgument,
    to: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of the new vectors in the store, such as embedding_new. In PostgreSQL it is "
            "a new column of the table, or with table:NAME a second table.",
        ),
    ],
    mapping: Annotated[
        Path | None,
        typer.Option(
            "--map",
            metavar="FILE",
            help="File of the map that computes the new vectors from the old ones, as "
            "`nobackfill fit` wrote it. One of --map, --release, --with and --vectors is required, "
            "except with --rollback.",
        ),
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(
            metavar="CONVERTER",
            help="In place of --map, a published map: FOLDER or URL of its publication, with #N "
            "for number N of several, or N alone for number N in the folder model_repo. Without "
            "#N, the newest one that is for the old model.",
        ),
    ] = None,
    root: Root = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The old model, named as for `embed --with`; it must be the model that the map "
            "is for. --release requires it if the store does not name its model.",
            show_default="the model that the store names",
        ),
    ] = None,
    new_model: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="MODEL",
            help="In place of a map, the new model, named as for `embed --with`: every item is "
            "re-embedded. It needs --column or --items.",
        ),
    ] = None,
    new_model_name: Annotated[
        str | None,
        typer.Option(
            "--model-name",
            metavar="NAME",
            help="Name of the new model at the endpoint of --with. It is required for an endpoint; "
            "other models ignore it.",
        ),
    ] = None,
    vectors: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder that `nobackfill embed` wrote, which is only read. Its vectors are reused "
            "for items whose content has not changed. Without --with, other items get no new "
            "vector, and exit code 65 says so. It needs --column or --items.",
        ),
    ] = None,
    natives: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --with or --vectors: reuse the new vectors in this file, which searches by "
            "both models (nobackfill.serve.Dual) wrote. Without this, none are reused.",
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --with or --vectors: column of the store with the texts of the items. "
            "Either this or --items is required then; a row whose text changes is embedded again.",
        ),
    ] = None,
    items: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="In place of --column: folder of images, or FILE.jsonl of texts, which are only "
            "read. The paths in the folder, or the field `id`, must equal the ids in the store.",
        ),
    ] = None,
    flip: Annotated[
        bool,
        typer.Option(
            "--flip",
            help="Also make searches read the new vectors. In PostgreSQL it builds the index, "
            "locks the table, writes the last rows, renames the columns. In LanceDB, SQLite and "
            "Chroma it writes the last rows and exchanges the names. In Milvus an alias leads to "
            "the new collection. In Qdrant it writes the last points; your programs must already "
            "write both vectors. Without this, the steps are only printed.",
        ),
    ] = False,
    rollback: Annotated[
        bool,
        typer.Option(
            "--rollback",
            help="Remove the new vectors with the name of --to from the store, and write none. The "
            "old vectors stay.",
        ),
    ] = False,
    key: Key = None,
    vector: Vector = None,
    where: Where = None,
    as_json: Json = False,
) -> None:
    """Migrate a store: write a new vector for every item next to its old one, and check it.

    No old vector changes. After an interruption, run it again to continue. Others may write to the
    store meanwhile. In PostgreSQL, a new column updates every row, which fires the table's UPDATE
    triggers; table:NAME updates none.
    """
    from nobackfill.adopt.converters import open_map_for_store
    from nobackfill.adopt.embedding.native_vectors import open_native_vectors, open_originals
    from nobackfill.adopt.fitting import VERDICT_FACT
    from nobackfill.adopt.maps import NEW_MODEL
    from nobackfill.adopt.sources.opening import open_item_vectors
    from nobackfill.adopt.sources.source import Target

    opened = open_item_vectors(source, source, key=key, vector=vector, where=where)
    if rollback:
        removed = opened.drop_new_vectors(to)
        line = f"{to}: removed" if removed else f"{to}: no new vectors have this name"
        _answer(as_json, {"removed": removed}, [line])
        return
    facts = opened.facts()
    if new_model is not None or vectors is not None:
        if mapping is not None or release is not None:
            raise InvalidInputError(
                "expected a map (--map, --release) or vectors that the new model computes "
                "(--with, --vectors), got both; leave one of them out"
            )
        contents = open_originals(opened, column, items)
        if natives is not None and not natives.is_file():
            raise NotFoundError(
                f"--natives {natives}: no such file; expected the file that Dual of "
                "nobackfill.serve writes. Leave --natives out if there is none"
            )
        native = open_native_vectors(
            opened,
            contents,
            model=new_model,
            model_name=new_model_name,
            folder=vectors,
            natives_file=natives,
        )
        _carry_and_answer(opened, native.target(to), native, [], flip=flip, as_json=as_json)
        return
    loaded, said = open_map_for_store(facts, mapping, release, root, model)
    if (way := loaded.facts.get(VERDICT_FACT, "map")) != "map":
        then = "`nobackfill fit` did not recommend to migrate by this map alone"
        if way in ("both", "lazily"):
            then = (
                "build the index, do not flip, and search by both models with Dual of "
                f"nobackfill.serve, carried={to!r}"
            )
        said = [*said, f"the verdict of {mapping} was {way}: {then}"]
    made = loaded.facts.get(NEW_MODEL)
    target = Target(to, loaded.dims[1], loaded.digest, made)
    _carry_and_answer(opened, target, loaded, said, flip=flip, as_json=as_json)


def _carry_and_answer(
    source: "Source",
    target: "Target",
    maker: "Map | VectorComputer",
    notes: list[str],
    *,
    flip: bool,
    as_json: bool,
) -> None:
    """Write the new vectors and print the result.

    Args:
        source: The store.
        target: The place of the new vectors in it.
        maker: A map, or another maker of the new vectors.
        notes: Sentences to print before the result.
        flip: Whether to flip as well; then whatever prevents a flip is an error, not a warning.
        as_json: Whether to print JSON.
    """
    from nobackfill.adopt.carrying import carry as write_vectors
    from nobackfill.adopt.sources.source import WarningSource

    if isinstance(source, WarningSource):
        obstacles = [] if flip else source.flip_obstacles(target)
        for warning in [*source.warnings(target.name), *obstacles]:
            print(
                escape_control(f"nobackfill: warning: {warning}"),
                file=sys.stderr,
                flush=True,
            )
    done = write_vectors(source, target, maker, progress=_progress(source.count()), flip=flip)
    lines = [
        *notes,
        f"{done.write_count} vectors written now, {done.new_vector_count} in the store and checked",
    ]
    lines += [
        "the store is flipped" if flip or not done.next_steps else "to make searches read them:",
        *(f"  {step}" for step in done.next_steps),
    ]
    answer = {"written": done.write_count, "total": done.new_vector_count, "steps": done.next_steps}
    _answer(as_json, {**answer, "notes": notes}, lines)


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
    help="Do all steps of a migration in PostgreSQL, Qdrant, Milvus, Chroma, LanceDB or SQLite, or "
    "advise against it.\n\n"
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
    Path,
    typer.Option(
        metavar="FOLDER",
        help="Folder with the state of the migration, which is read and written; `migrate start` "
        "creates it. Each migration needs a folder of its own.",
    ),
]
_WORK = Path("nobackfill-migration")


@migrate_commands.command()
def start(
    source: TargetArgument,
    new: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The new model: FILE.onnx, a folder that sentence-transformers or model2vec "
            "saved, a Python function module:function, or the https:// address of an endpoint "
            "like OpenAI's embeddings, whose key is in NOBACKFILL_ENDPOINT_KEY.",
        ),
    ],
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column of the table with the texts to embed. Either --column or --items is "
            "required.",
        ),
    ] = None,
    items: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="In place of --column: folder of images, or FILE.jsonl of texts, which are only "
            "read. The paths in the folder, or the field `id`, are the keys of the table.",
        ),
    ] = None,
    old: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The old model, named as for --new. It embeds the queries of --queries, which "
            "requires it.",
        ),
    ] = None,
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="FILE.jsonl of test queries, which is only read: each line has `text`, and as "
            "`id` the key of the item to find. Without this, options are compared by how many of "
            "the new model's own hits they find.",
        ),
    ] = None,
    items_gone: ItemsGone = False,
    old_gone: OldGone = False,
    new_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the new model at the endpoint of --new. It is required for an endpoint; "
            "other models ignore it.",
        ),
    ] = None,
    old_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the old model at the endpoint of --old. It is required for an endpoint; "
            "other models ignore it.",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            metavar="N",
            min=20,
            help="Number of items to embed by the new model for the verdict.",
            show_default="2000, or the number of the run that this run continues",
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price-per-1000",
            metavar="PRICE",
            min=0.0,
            help="Price of embedding 1,000 items by the new model, in any currency. The verdict "
            "then names the cost of re-embedding; without this, it names none.",
        ),
    ] = None,
    natives: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File in which Dual of nobackfill.serve, the search by both models, stores new "
            "vectors of its hits. These vectors are reused, and items that searches returned are "
            "embedded first.",
            show_default="natives.db in --work",
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Write without asking. Without this, the command asks on a terminal, and writes "
            "nothing elsewhere.",
        ),
    ] = False,
    work: Work = _WORK,
    key: Key = None,
    vector: Vector = None,
    where: Where = None,
) -> None:
    """Decide whether to re-embed; then write the new vectors and make searches read them, or stay.

    It asks before it writes. If it is killed, run the same command again: it continues. The old
    vectors stay until `migrate finish`, and `migrate back` restores them.
    """
    from nobackfill.adopt.migrating import Migration, MigrationPlan

    if (queries is None) != (old is None):
        raise InvalidInputError(
            "expected --queries and --old together, because both models embed the queries; give "
            "both or neither"
        )
    if old_gone and old is not None:
        raise InvalidInputError(
            "expected --old or --old-gone, got both: a model that embeds the queries is not gone; "
            "leave one of them out"
        )
    plan = MigrationPlan(
        source, new, key, vector, text_column=column, items_path=items, originals_gone=items_gone,
        old_model_gone=old_gone, old_model=old, queries_file=queries, new_model_name=new_name,
        old_model_name=old_name, sample_size=count, price_per_1000=price,
        natives_file=None if natives is None else str(natives), row_condition=where,
    )  # fmt: skip
    migration = Migration(work)
    try:
        _migrate(migration, plan, yes)
    except (KeyboardInterrupt, typer.Abort):
        _tell(_interruption(migration, work))
        raise typer.Exit(_INTERRUPTED) from None


def _migrate(migration: "Migration", plan: "MigrationPlan", yes: bool) -> None:
    """Decide, ask unless `yes`, execute the verdict, and print what was done."""
    from nobackfill.adopt.maps import adapter_example
    from nobackfill.adopt.verdict import ADAPTER_OPTION

    for line in migration.decide(plan, _tell):
        print(escape_control(line))
    way = migration.plan().verdict
    if way in ("stay", ADAPTER_OPTION):
        migration.write(_tell)
        next_step = "stay with the old model"
        if way == ADAPTER_OPTION:
            next_step = adapter_example(migration.adapter)
        print(escape_control(f"nothing was written: {next_step}"))
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
        print(
            "no vector was written: the new model's queries find as much in the stored vectors; "
            "switch your queries to it"
        )
        return
    print(
        f"{result.new_vector_count} rows have a new vector, {result.write_count} of them written "
        "by this run"
    )
    if after.state == "flipped" and after.row_condition is not None:
        table = after.new_column.partition(":")[2]
        print(escape_control(f"flipped: the table {table} holds the new vectors of these rows"))
        print("next: join it in your queries, and switch them to the new model; then")
        print("`nobackfill migrate finish`. Until then `nobackfill migrate back` drops the table")
    elif after.state == "flipped":
        new_vectors, old_vectors = migration.vector_names()
        print(f"flipped: {new_vectors} holds the new vectors, {old_vectors} the old ones")
        print("next: switch your queries to the new model; then `nobackfill migrate finish` drops")
        print("the old vectors. Until then `nobackfill migrate back` restores them")
    if after.state == "mapped":
        print(
            f"nothing flips, because the items are gone: search by both models with Dual of "
            f"nobackfill.serve, carried='{after.new_column}'. `nobackfill migrate back` removes "
            "this column"
        )
        return
    for step in result.next_steps:
        print(escape_control(f"  {step}"))


def _interruption(migration: "Migration", work: Path) -> str:
    """Write what an interrupted run has done, what remains, and the command that continues."""
    again = _continuation()
    undo = shlex.join(["nobackfill", "migrate", "back", "--work", str(work)])
    try:
        progress = migration.status()
    except NotFoundError:
        return f"interrupted: nothing was written; {again}"
    except NobackfillError as error:
        return f"interrupted, and the store does not say what was written ({error}); {again}"
    if progress.plan.state == "flipped":
        return f"interrupted after the flip: the new vectors are in use; to undo it, run: {undo}"
    if progress.plan.state != "writing":
        kept = f"{work} keeps what was embedded"
        return f"interrupted: nothing was written to the table; {kept}; {again}"
    return (
        f"interrupted: {progress.migrated_rows} of {progress.total_rows} rows have a new vector, "
        f"{progress.total_rows - progress.migrated_rows} remain; searches still use the old ones; "
        f"{again}; to undo it, run: {undo}"
    )


@migrate_commands.command()
def status(work: Work = _WORK, as_json: Json = False) -> None:
    """Show the state of a migration, and how many rows have a new vector."""
    from nobackfill.adopt.migrating import Migration

    progress = Migration(work).status()
    plan = progress.plan
    line = f"migration of {plan.source_address}: {plan.state}"
    if plan.verdict:
        line += f", verdict {plan.verdict}"
    if plan.state == "deciding":
        line += "; nothing is written to the table yet, and the same `nobackfill migrate` continues"
    if progress.total_rows:
        line += f", {progress.migrated_rows} of {progress.total_rows} rows have a new vector"
    answer = {
        "state": plan.state,
        "way": plan.verdict,
        "rows": progress.migrated_rows,
        "total": progress.total_rows,
    }
    _answer(as_json, answer, [line])


@migrate_commands.command()
def pause(work: Work = _WORK) -> None:
    """Stop the running migration after the rows that it is embedding or writing."""
    from nobackfill.adopt.migrating import Migration

    Migration(work).pause()
    print(
        "the running migration stops after the rows that it is embedding or writing; run the same "
        "`nobackfill migrate` again to continue"
    )


@migrate_commands.command()
def back(
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Return to the old vectors even if rows that were written since the flip (when "
            "searches began to read the new vectors) lose their only vector. Without this, the "
            "command refuses in that case.",
        ),
    ] = False,
    work: Work = _WORK,
) -> None:
    """Undo a migration, even after the flip: remove the new vectors and restore the old ones."""
    from nobackfill.adopt.migrating import Migration

    lost = Migration(work).undo(allow_loss=yes)
    if lost is None:
        print("nothing is left to take back: the table has its old vectors")
        return
    print("migration taken back: the table has its old vectors")
    if lost:
        print(f"{lost} rows have no vector any more; embed them with the old model")


@migrate_commands.command()
def finish(work: Work = _WORK) -> None:
    """Drop the old vectors once searches read the new ones; `migrate back` then fails.

    It is refused before searches read the new vectors. If the migration had --where, the old
    vectors stay in their column, because other rows share it. A second call changes nothing.
    """
    from nobackfill.adopt.migrating import Migration

    migration = Migration(work)
    migration.finish()
    if migration.plan().row_condition is None:
        print("migration finished: the old vectors are dropped")
    else:
        print("migration finished: the old vectors stay in their column, which other rows share")


def _continuation() -> str:
    return f"to continue, run: {shlex.join(['nobackfill', *sys.argv[1:]])}"


def _tell(line: str) -> None:
    print(escape_control(line), file=sys.stderr)


def _progress(total: int) -> Callable[[int], None]:
    """Return a function that shows a count on stderr, if that is a terminal."""

    def show(count: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if count >= total else "\r"
            print(f"{count} of {total} items", end=end, file=sys.stderr, flush=True)

    return show


def _answer(as_json: bool, answer: Mapping[str, object], lines: list[str]) -> None:
    print(json.dumps(answer) if as_json else "\n".join(map(escape_control, lines)))


def main() -> None:
    """Run `nobackfill` with the words of this process, and exit with the command's code.

    An error is printed on stderr as one sentence. nobackfill.errors defines the codes.

    Raises:
        SystemExit: The command has ended; with its code.
        OSError: An error of the system for which nobackfill has no code.
    """
    try:
        app()
    except (NobackfillError, OSError) as error:
        refusal = error_from_os(error) if isinstance(error, OSError) else error
        if refusal is None:
            raise
        print(escape_control(f"nobackfill: {refusal}"), file=sys.stderr)
        sys.exit(refusal.exit_code)


if __name__ == "__main__":
    main()
