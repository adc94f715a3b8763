"""`make bench`: measure this project beside its limits and beside what one would pick instead.

Each topic runs in a process of its own, prints its tables and writes bench/results/NAME.json.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from bench import pairs, record
from bench.harness import Bench, Scale

# In the order in which they are shown; each is bench/topics/NAME.py with a function `run`.
TOPICS = (
    "transform", "quality", "reembed", "index", "upgrade", "search", "image", "database", "swap",
    "edge", "pages", "training", "loading", "startup", "memory", "filter", "scale",
    "gateways", "milvus", "carry",
)  # fmt: skip
BUILD = record.ROOT / "build" / "bench"


def main(
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Topics to measure: {', '.join(TOPICS)}. Without a topic, all are measured."
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Measure large sizes, for hours. Without this flag, small ones are used."
        ),
    ] = False,
    docs: Annotated[
        bool,
        typer.Option(
            help="Write the stored results into the documents again, and measure nothing. With "
            "--no-docs, the topics are measured."
        ),
    ] = False,
    beside: Annotated[
        Path | None,
        typer.Option(
            help="Folder of another checkout, with its own .venv, with which one topic is compared "
            "in pairs of runs. Without it, only this checkout is measured."
        ),
    ] = None,
    number: Annotated[
        int,
        typer.Option(
            "--pairs", min=2, help="Number of pairs of runs by which --beside compares checkouts."
        ),
    ] = 10,
    file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="File to which the comparison of --beside is also written as JSON; an existing "
            "one is replaced. Without it, only tables are printed.",
        ),
    ] = None,
    part: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run topics, one after the other."""
    chosen = topics or list(TOPICS)
    if unknown := [topic for topic in chosen if topic not in TOPICS]:
        raise typer.BadParameter(f"no topic {', '.join(unknown)}; known: {', '.join(TOPICS)}")
    if beside is not None:
        _compare(chosen, beside, number, file)
        return
    if docs:
        record.refresh_docs()
        return
    if part:
        run_topic(chosen[0], Scale.FULL if full else Scale.SMALL)
        return
    shutil.rmtree(BUILD, ignore_errors=True)
    failed = [topic for topic in chosen if not _apart(topic, full)]
    record.refresh_docs()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


def run_topic(topic: str, scale: Scale) -> None:
    """Run one topic here; print and keep what it found."""
    folder = BUILD / topic
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    module = importlib.import_module(f"bench.topics.{topic}")
    # Read when numpy was loaded; the commands that are measured start as a user starts them.
    os.environ.pop("OMP_NUM_THREADS", None)
    print(f"## {topic} ({scale})\n", flush=True)
    started = time.monotonic()
    tables = module.run(Bench(scale, folder, BUILD / "shared"))
    for table in tables:
        print(record.format_table(table), flush=True)
    seconds = time.monotonic() - started
    path = record.result_path(topic, scale)
    record.save(path, topic, scale, seconds, tables)
    print(f"{seconds:.0f} s; {path.relative_to(record.ROOT)}\n", flush=True)
    shutil.rmtree(folder, ignore_errors=True)


def _compare(topics: list[str], other: Path, number: int, file: Path | None) -> None:
    if len(topics) != 1 or topics[0] not in pairs.SIZES:
        raise typer.BadParameter(f"--beside needs one topic of {', '.join(pairs.SIZES)}")
    (topic,) = topics
    try:
        found = pairs.compare_checkouts(topic, record.ROOT, other, number, BUILD / "pairs")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    for table in found.tables():
        print(record.format_table(table))
    if file is not None:
        file.write_text(json.dumps(found.answer(), indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(0 if found.met else 1)


def _apart(topic: str, full: bool) -> bool:
    command = [sys.executable, "-m", "bench.run", topic, "--part", *(["--full"] if full else [])]
    # What is said to run on one thread must; what runs on two sets its own number.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=False, env=env, cwd=record.ROOT).returncode == 0


if __name__ == "__main__":
    typer.run(main)
