"""Finished steps and what they measured, kept so that a killed demo goes on where it was."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nobackfill.errors import ConfigurationError

# What a step measured; JSON values only.
Result = dict[str, Any]


class Journal:
    """`journal.json` in the demo's folder. Written whole, aside, then moved: never half there."""

    def __init__(self, path: Path, options: Mapping[str, object]) -> None:
        """Open or begin. Raises ConfigurationError where the run was begun with other options."""
        self._path = path
        self._content: dict[str, Any] = {"options": dict(options), "steps": {}}
        if path.exists():
            self._content = json.loads(path.read_text(encoding="utf-8"))
            begun = self._content["options"]
            if begun != dict(options):
                changed = {k: (begun.get(k), v) for k, v in options.items() if begun.get(k) != v}
                raise ConfigurationError(
                    f"{path.parent} holds a run with other options (then, now): {changed}; "
                    "go on with the same, or give --fresh to begin anew",
                )

    def __contains__(self, step: str) -> bool:
        return step in self._content["steps"]

    def __getitem__(self, step: str) -> Result:
        result: Result = self._content["steps"][step]["result"]
        return result

    @property
    def seconds(self) -> dict[str, float]:
        return {name: step["seconds"] for name, step in self._content["steps"].items()}

    def finish(self, step: str, result: Result, seconds: float) -> None:
        """Note that a step is done; on disk when this returns."""
        self._content["steps"][step] = {"result": result, "seconds": round(seconds, 2)}
        aside = self._path.with_suffix(".tmp")
        with aside.open("w", encoding="utf-8") as file:
            json.dump(self._content, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)
