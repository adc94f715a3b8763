"""`python -m demo.texts`: notes in a gateway and on a device change their text model.

Two pretrained models become releases; the map between them is fitted on texts that are still there,
the gate judges it on others, and the galleries, which keep no text, are carried, healed, and
brought back.
"""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from demo import gateway, serve
from demo.adoption.documents import Document, draw_documents
from demo.adoption.figures import Lists, compute_figures, print_figures
from demo.adoption.models import write_model_files
from demo.children import Children
from nobackfill.client import Device
from nobackfill.errors import NobackfillError
from nobackfill.wire import Gateway

_EXPORT = Path(__file__).parents[1] / "training" / "export.py"
GALLERY, HITS = "notes", 10
# Until a gallery has healed, on a busy machine.
_HEALED_S = 900


class Releases:
    """The steps, in order. Of a killed run models and vectors are kept, all else is made anew."""

    def __init__(self, folder: Path, packages: Path, children: Children) -> None:
        for made in ("model_repo", "model_repo.keys", "data"):
            shutil.rmtree(folder / made, ignore_errors=True)
        for left in folder.glob("gallery.sqlite*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        self._folder, self._packages, self._children = folder, packages, children
        self._repo = folder / "model_repo"
        self._begun = time.monotonic()

    def run(self, pair_count: int, measured_count: int, item_count: int, query_count: int) -> None:
        docs = draw_documents(self._packages, pair_count + measured_count + item_count)
        known, held, kept = (
            docs[:pair_count],
            docs[pair_count:][:measured_count],
            docs[pair_count + measured_count :],
        )
        models = write_model_files(self._packages, self._folder / "models")
        upgrade = self._fitted(self._lines("known", known), models)
        self._export(1, models[0])
        address, metrics = serve.free_addresses(2)
        notes = self._lines("notes", kept)
        options = ("--triton", "in-process", "--item-folder", str(self._folder))
        serve.start_gateway(
            self._children, self._repo, self._folder / "data", (address, metrics), *options
        )
        with (
            gateway.connect(address) as connection,
            Device.create(
                self._folder / "gallery.sqlite", str(self._repo), self._repo / "1.root.json"
            ) as device,
        ):
            gateway.create_gallery(connection, GALLERY)
            self._gateway(address, "put", GALLERY, notes)
            titles, answers = (
                [d.title for d in kept[:query_count]],
                [str(n) for n in range(query_count)],
            )
            lists = {"old model": _searched(connection, titles)}
            device.put_texts({str(n): one.body for n, one in enumerate(kept)})
            on_device = {"old model": _found(device, titles)}
            self._publish(models[1], upgrade, held)
            self._gateway(address, "activate", "2")
            device.sync()
            lists["mapped"] = _searched(connection, titles)
            on_device["mapped"] = _found(device, titles)
            settings = self._folder / "source.toml"
            settings.write_text("seconds = 20\n", encoding="utf-8")
            self._gateway(address, "update-gallery", GALLERY, "--source", f"texts:{notes}",
                          "--settings", settings)  # fmt: skip
            lists["lazily"] = _searched(connection, titles)
            self._heal(connection, len(kept))
            lists["all healed"] = _searched(connection, titles)
            self._gateway(address, "rollback", "--yes")
            if _searched(connection, titles) != lists["old model"]:
                raise NobackfillError("after the rollback other notes are found than before")
            device.rollback()
            if _found(device, titles) != on_device["old model"]:
                raise NobackfillError("the device does not find what it found before")
        own = lists["all healed"]
        lists |= {f"{name}, device": found for name, found in on_device.items()}
        found = {name: compute_figures(one, answers, own) for name, one in lists.items()}
        print_figures(found, len(kept), query_count, "note")
        told = {name: asdict(one) for name, one in found.items()}
        (self._folder / "releases.json").write_text(json.dumps(told, indent=1))
        self._say("done")

    def _fitted(self, known: Path, models: tuple[Path, Path]) -> Path:
        made = [self._folder / name for name in ("known-old", "known-new")]
        for model, out in zip(models, made, strict=True):
            self._nobackfill("embed", known, "--with", model, "--out", out)
        upgrade = self._folder / "upgrade.onnx"
        self._nobackfill("fit", "--old", made[0], "--new", made[1], "--out",
                         self._folder / "map.npz", "--onnx", upgrade)  # fmt: skip
        return upgrade

    def _publish(self, model: Path, upgrade: Path, held: Sequence[Document]) -> None:
        """Past a gate that refuses it, too: these galleries heal."""
        asked = self._lines("asked", held, query=True)
        options = ("--upgrade", upgrade, "--eval-texts", asked)
        try:
            self._export(2, model, *options)
        except NobackfillError as error:
            self._say(f"refused: {error}")
            self._export(2, model, *options, "--force")

    def _export(self, number: int, model: Path, *more: str | Path) -> None:
        command = [sys.executable, _EXPORT, "--model-repo", self._repo, "--release", str(number),
                   "--text-encoder", model, *more]  # fmt: skip
        self._run("export.py", command, command[4:])

    def _heal(self, connection: Gateway, items: int) -> None:
        end = time.monotonic() + _HEALED_S
        while [*connection.watch_upgrade(GALLERY)][-1].healing.carried:
            if time.monotonic() > end:
                raise NobackfillError(f"the gallery has not healed after {_HEALED_S} s")
            time.sleep(0.5)
        self._say(f"{items} notes read again")

    def _lines(self, name: str, docs: Sequence[Document], *, query: bool = False) -> Path:
        path = self._folder / f"{name}.jsonl"
        with path.open("w") as file:
            for number, one in enumerate(docs):
                line: dict[str, Any] = {"id": number, "text": one.body}
                line |= {"query": one.title} if query else {}
                file.write(json.dumps(line) + "\n")
        return path

    def _nobackfill(self, *words: object) -> None:
        line = [str(word) for word in words]
        self._run("nobackfill", [Path(sys.executable).with_name("nobackfill"), *line], line)

    def _gateway(self, address: str, *words: object) -> None:
        line = [str(word) for word in words]
        self._run("gateway", [serve.COMMAND, *line, "--server", address], line)

    def _run(self, program: str, command: Sequence[str | Path], shown: Sequence[object]) -> None:
        self._say(f"$ {program} {' '.join(map(str, shown))}")
        said = self._children.run(program.partition(".")[0], command)
        print("".join(f"    {one}\n" for one in said.splitlines()), end="", flush=True)

    def _say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._begun:5.0f} s] {line}", flush=True)


def _searched(connection: Gateway, titles: Sequence[str]) -> Lists:
    answers = (connection.search(GALLERY, text=title, k=HITS) for title in titles)
    return [[hit.id for hit in answer.hits] for answer in answers]


def _found(device: Device, titles: Sequence[str]) -> Lists:
    answers = (device.search(text=title, k=HITS) for title in titles)
    return [[hit.id for hit in answer.hits] for answer in answers]


def main(
    packages: Annotated[
        Path, typer.Option(help="Folder of the packages with weights and texts; only read.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to which everything is written; results in it are reused.")
    ],
    pairs: Annotated[
        int, typer.Option(min=50, help="Number of texts on which the map is fitted.")
    ] = 2000,
    measured: Annotated[
        int, typer.Option(min=40, help="Number of texts by which the gate measures the release.")
    ] = 800,
    items: Annotated[
        int, typer.Option(min=50, help="Number of notes in each of the two galleries.")
    ] = 300,
    queries: Annotated[
        int, typer.Option(min=20, help="Number of searches that are measured.")
    ] = 100,
) -> None:
    """Publish two pretrained models as releases, and carry notes from one to the other."""
    out.mkdir(parents=True, exist_ok=True)
    with Children(out / "logs") as children:
        Releases(out.absolute(), packages, children).run(pairs, measured, items, queries)


if __name__ == "__main__":
    try:
        typer.run(main)
    except NobackfillError as error:
        print(f"demo-texts: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
