"""Open stores, fork workers, search in all of them at once, and tell what went wrong in each.

`python -m tests.adopt.forking ADDRESS NATIVES`: a program of its own, whose workers end as a
server's do, with what Python does at its end."""

import json
import os
import sys
from pathlib import Path

import numpy as np

from nobackfill.adopt.sources.opening import open_searchable
from nobackfill.adopt.sources.source import Searchable
from nobackfill.errors import NobackfillError
from nobackfill.serving.natives import NativeVectorFile
from tests.adopt.stores import MADE

SEARCHES, WORKERS = 60, 3


def wrong(source: Searchable, natives: NativeVectorFile, first: int) -> list[str]:
    """Wrong answers that a process gets."""
    found = []
    for number in range(SEARCHES):
        row = (first + 7 * number) % len(MADE.ids)
        try:
            hits = source.nearest(MADE.old[row], 1)
            if hits != [MADE.ids[row]]:
                found.append(f"asked for {MADE.ids[row]}, got {hits}")
            natives.store_vectors([MADE.ids[row]], [bytes([first % 256])], MADE.new[row : row + 1])
        except NobackfillError as error:
            return [f"{type(error).__name__}: {error}"]
    return found


def main() -> None:
    address, path = sys.argv[1], Path(sys.argv[2])
    source, natives = open_searchable(address), NativeVectorFile(path, "new", 32)
    told = {"before": wrong(source, natives, 0)}
    workers = {}
    for worker in range(WORKERS):
        out, into = os.pipe()
        if not os.fork():
            os.close(out)
            said = wrong(source, natives, 50 * (worker + 1))
            with os.fdopen(into, "w") as pipe:
                json.dump(said, pipe)
            sys.exit(0)
        os.close(into)
        workers[f"worker {worker}"] = os.fdopen(out)
    told["meanwhile"] = wrong(source, natives, 9)
    told |= {name: json.load(pipe) for name, pipe in workers.items()}
    for _ in workers:
        os.wait()
    # After the workers have let go of what they had.
    told["after"] = wrong(source, natives, 3)
    assert np.isfinite(natives.read_vectors(MADE.ids[:1])[MADE.ids[0]].vector).all()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
