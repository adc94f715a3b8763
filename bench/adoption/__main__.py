"""`python -m bench.adoption`: tables of real pairs of models, into bench/results/adoption.json."""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from bench.adoption.beside import NOTE as BESIDE
from bench.adoption.beside import compare_rivals
from bench.adoption.covering import NOTE as COVERING
from bench.adoption.covering import coverage_rows
from bench.adoption.curves import AGAINST_OLD, AGAINST_OLD_TITLE
from bench.adoption.curves import NOTE as CURVES
from bench.adoption.maps_alone import NOTE as MAPS_ALONE
from bench.adoption.maps_alone import maps_alone
from bench.adoption.parts import Part, run_parts
from bench.adoption.texts import Corpus, embed_documents, read_operations, read_package_descriptions
from bench.adoption.trial import Trial, correction_rows
from bench.harness import Row, Value
from demo.adoption.models import LONGEST, write_model_files
from demo.adoption.transformer import export_transformer
from nobackfill.adopt.pairs import Pairs
from nobackfill.vectors import Vectors

# Pairs that are fitted on; documents of the larger models are fewer, as they take their time.
FEW, SOME, PAIRS = 100, 500, 2000
MOST, MOST_SLOW = 4000, 3000
# Drawn from Debian's descriptions; the first of them are used.
DRAWN = 5000


def main(
    packages: Annotated[
        Path, typer.Option(help="Folder of packages as `make demo-adopt` fills it; only read.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to which vectors are written; those in it are used again.")
    ],
    lists: Annotated[
        Path | None,
        typer.Option(
            help="File …_i18n_Translation-en.lz4 of apt, with descriptions of packages as a second "
            "set of texts. Without it, only the texts of --packages are measured."
        ),
    ] = None,
    mpnet: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the unpacked model all-mpnet-base-v2, to which model.onnx is "
            "written. Without it, this model is not measured."
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            help="Measure only pairs of models whose name contains this text; empty: every pair."
        ),
    ] = "",
) -> None:
    """Measure verdicts, maps, converters and valleys, and keep the tables."""
    models = dict(zip(("L3", "L6"), write_model_files(packages, out / "models"), strict=True))
    if mpnet is not None:
        file = mpnet / "model.onnx"
        models["mpnet"] = file if file.exists() else export_transformer(mpnet, LONGEST)
        # No more than its graph takes.
        sizes = {"max_seq_length": LONGEST, "do_lower_case": False}
        (mpnet / "sentence_bert_config.json").write_text(json.dumps(sizes))
    corpora = [read_operations(packages, 4000)]
    if lists is not None:
        corpora.append(read_package_descriptions(lists, DRAWN))
    trials = [trial for corpus in corpora for trial in _trials(corpus, models, out)]
    parts = [Part("The verdict and the truth", trial.name, trial.verdict_rows) for trial in trials]
    parts += [Part("Maps alone", trial.name, partial(maps_alone, trial)) for trial in trials]
    parts += [Part("On the way to native", trial.name, trial.reembedding_rows) for trial in trials]
    parts += [
        Part("On the way, less the old model", trial.name, trial.rows_against_old)
        for trial in trials
    ]
    parts += [
        Part("Beside rivals", trial.name, partial(compare_rivals, trial, count))
        for count in (SOME, PAIRS)
        for trial in reversed(trials)
    ]
    parts += [
        Part("Sampled or at random", trial.name, partial(coverage_rows, trial, count))
        for trial in trials
        for count in (FEW, SOME)
    ]
    if len(corpora) == 2:
        foreign, own = (next(t for t in trials if t.name.startswith(f"L3 to L6, {c.name}"))
                        for c in corpora)  # fmt: skip
        name = f"A converter from {corpora[0].name}, R@1"
        parts.append(
            Part(name, own.name, partial(correction_rows, foreign, own, (FEW, SOME, PAIRS)))
        )
    parts.append(Part("From inspect to a verdict", "made vectors", lambda: [_seconds(out)]))
    run_parts("adoption", parts, NOTES, only)


VERDICT = (
    f"The verdict is fitted and judged on {PAIRS} items of which 1,000 have a query; the truth is "
    "that of the other items, which the map and the verdict have not seen, in %. `best`: the "
    "cheapest way that keeps 99 % of embedding everything again in R@1, R@10 and MRR, and in none "
    "of them is measurably worse than staying (paired bootstrap, over classes where items have "
    "any)."
)
NOTES = {
    "The verdict and the truth": VERDICT,
    "Beside rivals": BESIDE,
    "Maps alone": MAPS_ALONE,
    "Sampled or at random": COVERING,
    "On the way to native": CURVES,
    AGAINST_OLD_TITLE: AGAINST_OLD,
}


def _trials(corpus: Corpus, models: dict[str, Path], out: Path) -> list[Trial]:
    made, more = {}, {}
    for name in ("L3", "L6"):
        file = out / f"{corpus.name}-{name}.npz"
        made[name] = embed_documents(corpus.documents[:MOST], models[name], file)
        file = file.with_stem(f"{file.stem}-more")
        more[name] = embed_documents(corpus.more, models[name], file).bodies
    others = Pairs([], more["L3"], more["L6"])
    found = [Trial(f"L3 to L6, {corpus.name}", made["L3"], made["L6"], PAIRS, more_pairs=others)]
    if "mpnet" in models and "Debian" in corpus.name:
        few = corpus.documents[:MOST_SLOW]
        large = embed_documents(few, models["mpnet"], out / f"{corpus.name}-mpnet.npz")
        small = made["L6"].first(MOST_SLOW)
        found.append(Trial(f"L6 to mpnet, {corpus.name}", small, large, PAIRS))
    return found


def _seconds(out: Path) -> Row:
    """Of the commands from `inspect` to `fit`: 20,000 vectors of 384 dims, 2,000 of them pairs."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(20_000, 384)).astype(np.float32)
    turned = hidden @ rng.normal(size=(384, 384)).astype(np.float32)
    ids = np.array([f"item-{row}" for row in range(len(hidden))])
    chosen = out / "sample.txt"
    program = Path(sys.executable).with_name("nobackfill")
    row: dict[str, Value] = {"pair": "made vectors", "items": len(hidden), "dims": 384}
    row["pairs"] = PAIRS
    _write(out / "large", ids, hidden)
    spent = 0.0
    for command in ("inspect", "sample", "fit"):
        words = {
            "inspect": ["inspect", out / "large"],
            "sample": ["sample", out / "large", "-n", PAIRS, "--out", chosen],
            "fit": ["fit", "--old", out / "large", "--new", out / "again", "--out", out / "m.npz"],
        }[command]
        if command == "fit":
            kept = np.isin(ids, chosen.read_text().split())
            _write(out / "again", ids[kept], turned[kept])
        started = time.perf_counter()
        subprocess.run([program, *map(str, words)], check=True, capture_output=True)
        row[f"{command}, s"] = time.perf_counter() - started
        spent += time.perf_counter() - started
    return {**row, "all, s": spent}


def _write(folder: Path, ids: NDArray[np.str_], vectors: Vectors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "ids.npy", ids)
    np.save(folder / "vector.npy", vectors)


if __name__ == "__main__":
    typer.run(main)
