"""The device: `edge-client` and one SQLite file."""

import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.children import Child, Children

COMMAND = Path(sys.executable).with_name("edge-client")


class Device:
    """A gallery file in a folder of its own, driven by commands."""

    def __init__(self, children: Children, folder: Path) -> None:
        self._children = children
        self.folder = folder
        self.gallery = folder / "gallery.sqlite"

    def _command(self, *arguments: str | Path) -> list[str | Path]:
        return [COMMAND, "--gallery", self.gallery, *arguments]

    def create(self, source: str, root: Path, images: Path) -> int:
        """A new gallery that follows `source` and trusts `root`, with images; how many it holds."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._children.run(
            "device-init", self._command("init", "--from", source, "--root", root, "--json")
        )
        self._children.run("device-add", self._command("add", images, "--json"))
        return int(self.status()["items"])

    def status(self) -> dict[str, Any]:
        """What `edge-client status --json` says."""
        answer: dict[str, Any] = json.loads(
            self._children.run("device-status", self._command("status", "--json"))
        )
        return answer

    def search(self, queries: Mapping[str, Path], k: int) -> dict[str, list[str]]:
        """Search for every query's image; CLASS/NAME of its k nearest items, nearest first."""
        output = self._children.run(
            "device-search",
            self._command("search", *queries.values(), "-k", str(k), "--json"),
        )
        answers = json.loads(output)["answers"]
        return {
            query: ["/".join(Path(hit["path"]).parts[-2:]) for hit in answer["hits"]]
            for query, answer in zip(queries, answers, strict=True)
        }

    def sync(self, source: str, query: Path) -> tuple[float, int, int]:
        """Upgrade the gallery from `source`, where the gateway is now, and search meanwhile.

        Seconds it took, searches answered meanwhile, and searches that failed.
        """
        start = time.monotonic()
        syncing = self._children.start(
            "device-sync", self._command("sync", "--from", source, "--json")
        )
        answered = failed = 0
        while syncing.process.poll() is None:
            search = self._search_once(query)
            answered += search.process.returncode == 0
            failed += search.process.returncode != 0
        self._children.wait(syncing)
        return time.monotonic() - start, answered, failed

    def _search_once(self, query: Path) -> Child:
        search = self._children.start(
            "device-search-during-sync", self._command("search", query, "--json")
        )
        search.process.wait()
        return search
