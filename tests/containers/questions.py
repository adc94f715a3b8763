"""What clients ask of gateways inside the containers' network: run there, by the public client.

fill ADDRESS COUNT          put pictures as items i0, i1, ... of gallery `g`
find ADDRESS COUNT          search each; a line of JSON: ids and distances of the hits
load ADDRESS COUNT FILE     search them, four at a time, until FILE is there; calls, failures
change ADDRESS FILE         put new items, put some anew, delete, until FILE is there; a line: which
                            (FILE.begun is there once either has been answered often)
overfill ADDRESS            put until it is refused; the error's class
ready ADDRESS               wait until /readyz answers, /healthz too
"""

import contextlib
import io
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from nobackfill.errors import AlreadyExistsError, NobackfillError
from nobackfill.wire import Gateway

_START_S = 120.0
_CLIENTS = 4
# Calls of a client before anything is done to a gateway under load.
_BEGUN = 50
GALLERY = "g"


def pictures(count: int) -> list[bytes]:
    """Random ones of 8 x 8 pixels as PNG, the same each time."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    made = []
    for one in pixels:
        buffer = io.BytesIO()
        Image.fromarray(one).save(buffer, "PNG")
        made.append(buffer.getvalue())
    return made


def fill(address: str, count: str) -> None:
    with Gateway(address) as gateway:
        with contextlib.suppress(AlreadyExistsError):
            gateway.create_gallery(GALLERY)
        refused = gateway.put(GALLERY, {f"i{n}": one for n, one in enumerate(pictures(int(count)))})
        assert not refused, refused


def find(address: str, count: str) -> None:
    answers = []
    with Gateway(address) as gateway:
        for number, picture in enumerate(pictures(int(count))):
            hits = gateway.search(GALLERY, image=picture, k=5).hits
            assert hits[0].id == f"i{number}" and hits[0].distance < 1e-4, (number, hits)
            answers.append([(hit.id, hit.distance) for hit in hits])
    print(json.dumps(answers))


def load(address: str, count: str, file: str) -> None:
    asked = pictures(int(count))

    def client(number: int) -> tuple[int, list[str]]:
        calls, failures = 0, []
        with Gateway(address, seconds=60) as gateway:
            while not Path(file).exists():
                which = (number + calls) % len(asked)
                calls += 1
                if calls == _BEGUN:
                    Path(f"{file}.begun").touch()
                try:
                    hits = gateway.search(GALLERY, image=asked[which], k=1).hits
                except NobackfillError as error:
                    failures.append(f"{type(error).__name__}: {error}")
                    continue
                if hits[0].id != f"i{which}":
                    failures.append(f"asked i{which}, got {hits[0].id}")
        return calls, failures

    with ThreadPoolExecutor(_CLIENTS) as pool:
        done = list(pool.map(client, range(_CLIENTS)))
    failures = [failure for _, some in done for failure in some]
    print(json.dumps({"calls": sum(calls for calls, _ in done), "failures": failures}))


def change(address: str, file: str) -> None:
    # None of those that are asked for.
    made = pictures(200)[100:]
    put, deleted = [], []
    with Gateway(address, seconds=60) as gateway:
        for turn in range(10_000):
            if Path(file).exists():
                break
            new = f"new-{turn}"
            refused = gateway.put(GALLERY, {new: made[turn % 100], "again": made[turn % 100]})
            assert not refused, refused
            put.append(new)
            if len(put) == 2:
                Path(f"{file}.begun").touch()
            gone = [f"item-{turn}"] + [f"new-{turn - 2}"] * (turn % 2 and turn > 2)
            assert gateway.delete(GALLERY, gone) == len(gone), gone
            deleted += gone
            time.sleep(0.02)
    print(json.dumps({"put": [*put, "again"], "deleted": deleted}))


def overfill(address: str) -> None:
    with Gateway(address) as gateway:
        picture = pictures(1)[0]
        for turn in range(1000):
            metadata = {"text": "x" * 60_000}
            try:
                gateway.put(GALLERY, {f"more-{turn}": picture}, {f"more-{turn}": metadata})
            except NobackfillError as error:
                print(type(error).__name__)
                return


def ready(address: str) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            for page in ("readyz", "healthz"):
                urllib.request.urlopen(f"http://{address}/{page}", timeout=5).close()
            return
        except (urllib.error.URLError, OSError) as error:
            assert time.monotonic() < end, f"{address}: no answer within {_START_S:.0f} s: {error}"
            time.sleep(0.1)


QUESTIONS: Mapping[str, Callable[..., None]] = {
    "fill": fill, "find": find, "load": load, "change": change, "overfill": overfill,
    "ready": ready,
}  # fmt: skip

if __name__ == "__main__":
    QUESTIONS[sys.argv[1]](*sys.argv[2:])
