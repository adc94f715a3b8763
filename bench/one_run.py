"""Run one topic of the checkout in the working directory, in that checkout's environment.

`CHECKOUT/.venv/bin/python bench/one_run.py TOPIC SIZES FOLDER SHARED RESULT`. SIZES is a dictionary
in Python's notation: a number of the small scale and the number to take instead. The script imports
nothing of its own checkout. It calls only what commit 7f9ceb1 has too: `bench.harness.Bench` and
`Scale`, `bench.topics.TOPIC.run` and `bench.record.save`.
"""

import ast
import importlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(topic: str, sizes: str, folder: str, shared: str, result: str) -> None:
    """Write the topic's tables to `result`, with the commit and the machine."""
    root = Path.cwd().resolve()
    # Python puts the folder of this script here, which holds the other checkout's bench.
    sys.path[0] = str(root)
    _check_code(root)
    harness: Any = importlib.import_module("bench.harness")
    record: Any = importlib.import_module("bench.record")
    smaller = ast.literal_eval(sizes)

    class Cut(harness.Bench):  # type: ignore[misc]
        """The small scale with the sizes that were given."""

        def size(self, tiny: Any, small: Any, full: Any) -> Any:
            return smaller.get(small, small)

    module: Any = importlib.import_module(f"bench.topics.{topic}")
    # numpy has read it; the commands that are measured start as a user starts them.
    os.environ.pop("OMP_NUM_THREADS", None)
    started = time.monotonic()
    tables = module.run(Cut(harness.Scale.SMALL, Path(folder), Path(shared)))
    seconds = time.monotonic() - started
    record.save(Path(result), topic, harness.Scale.SMALL, seconds, tables)


def _check_code(root: Path) -> None:
    """End where the environment would run another checkout's code."""
    spec = importlib.util.find_spec("nobackfill")
    places = list(spec.submodule_search_locations or []) if spec else []
    foreign = [place for place in places if not Path(place).resolve().is_relative_to(root)]
    if foreign or not places:
        sys.exit(
            f"{sys.executable} must import nobackfill from {root}; it imports it from "
            f"{foreign[0] if foreign else 'nowhere'}. Run `make setup` in {root}."
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
