"""Training and publishing a release, as a person does it: train.py, then export.py."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from demo.children import Child, Children
from demo.recipes import Recipe
from demo.screen import Bar, Screen


def epochs_done(run: Path) -> int:
    """Epochs that a training has begun, from the last whole line of its stats.jsonl."""
    stats = run / "stats.jsonl"
    if not stats.exists():
        return 0
    lines = stats.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return int(json.loads(whole[-1])["epoch"]) if whole else 0


def train_all(children: Children, screen: Screen, recipes: Sequence[Recipe]) -> None:
    """Train side by side, one core each. Raises NobackfillError when the first of them fails."""
    running: list[tuple[Child, Recipe, Bar]] = []
    for recipe in recipes:
        bar = screen.bar(f"train {recipe.run.name}", recipe.epochs)
        command = [sys.executable, "training/train.py", *recipe.arguments()]
        running.append((children.start(f"train-{recipe.run.name}", command), recipe, bar))
    while running:
        time.sleep(0.2)
        for child, recipe, bar in list(running):
            bar(epochs_done(recipe.run))
            if child.process.poll() is not None:
                children.wait(child)
                bar(recipe.epochs)
                running.remove((child, recipe, bar))


PUBLICATION = Path(sys.executable).with_name("publication")


def published_releases(children: Children, model_repo: Path) -> set[int]:
    """The numbers of the releases in a publication folder."""
    if not (model_repo / "timestamp.json").exists():
        return set()
    listed = children.run(
        "release-list",
        [PUBLICATION, "list", "--model-repo", model_repo, "--json"],
    )
    return {release["release"] for release in json.loads(listed)["releases"]}


def publish_release(
    children: Children, model_repo: Path, release: int, runs: Path, evaluation: Path, force: bool
) -> None:
    """Export, check, measure and sign a release; one that is there already is left alone.

    `force` publishes a release that does not pass its gate; its manifest says so.
    """
    if release in published_releases(children, model_repo):
        return
    command: list[str | Path] = [
        *(sys.executable, "training/export.py", "--model-repo", model_repo),
        *("--release", str(release), "--embedder", runs / f"embedder-{release}"),
        *("--side-encoder", runs / f"side_encoder-{release}", "--eval", evaluation),
    ]
    if release > 1:
        command += ["--upgrade", runs / f"upgrade-{release - 1}-{release}"]
    if force:
        command.append("--force")
    children.run(f"export-{release}", command)
