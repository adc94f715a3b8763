"""`edge-client browse` over a gallery of photos: what the server takes for each page."""

import http.client
import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench import data
from bench.galleries import PUT_ROWS
from bench.harness import Bench, Row, Table, time_call
from bench.photos import write_photos
from bench.published import INNER, SIZE, Publication, make_publication
from bench.topics.edge import make_device
from nobackfill.client.device import Device
from nobackfill.client.photos import read_image
from nobackfill.gallery.sqlite_file import find_space, vector_table_name
from nobackfill.gallery.store import NewVectors
from nobackfill.plugins.web.browse.app import make_site
from nobackfill.plugins.web.guard import new_token
from nobackfill.plugins.web.listener import Listener

# Photos of 12 megapixels; items beyond as many show them again.
PHOTOS, HEIGHT, WIDTH = 100, 3000, 4000
FOLDERS = 500
NOTE = (
    "Milliseconds from a request to the last byte of its answer, one after another, over one "
    "connection to the server in the same process; `first`: the first of its kind, for a search "
    "the one that reads all vectors. {dim} dims, metadata of five keys, photos of 12 megapixels. "
    "A page is its HTML: 60 items of the grid, 24 hits, each with its name and score; `copy` is "
    "one of its small pictures, made when it is first seen and kept."
)


# Path below the site, and what is posted there, if anything.
Ask = Callable[[str, bytes | None], None]


def run(bench: Bench) -> list[Table]:
    """Each size, each page."""
    pair = make_publication(bench.shared, inner=bench.size(64, INNER, INNER))
    photos = bench.folder / "photos"
    side = bench.size(8, 1, 1)
    write_photos(photos, bench.size(20, PHOTOS, PHOTOS), HEIGHT // side, WIDTH // side, 10)
    sizes: tuple[int, ...] = bench.size((300,), (1000, 10_000, 100_000), (1000, 10_000, 100_000))
    rows: list[Row] = []
    for size in sizes:
        gallery = _filled(bench.folder / str(size), pair, size, sorted(photos.rglob("*.jpg")))
        rows += _measured(bench, gallery, size)
    return [Table("pages", rows, NOTE.format(dim=data.DIM))]


def _filled(folder: Path, pair: Publication, size: int, photos: list[Path]) -> Path:
    """A gallery of so many photos, as an upgrade left it that says how sure it is."""
    gallery, _ = make_device(folder, pair)
    things, digests = data.draw_items(size), [read_image(photo)[1] for photo in photos]
    with Device(gallery) as opened:
        space = opened.store.active().spec.space
        for start in range(0, size, PUT_ROWS):
            numbers = range(start, min(start + PUT_ROWS, size))
            rows = slice(start, start + PUT_ROWS)
            opened.store.put(
                [f"item-{n}" for n in numbers],
                [NewVectors(space, things.old[rows], things.side[rows])],
                digests=[digests[n % len(photos)] for n in numbers],
                metadata=[
                    {"path": str(photos[n % len(photos)]), "name": f"IMG_{n:06d}.jpg",
                     "folder": f"trip {n % FOLDERS}", "stars": n % 5, "year": 2000 + n % 25}
                    for n in numbers
                ],
            )  # fmt: skip
        drawn = np.random.default_rng(0).random(size).tolist()
        with opened.store.transaction() as connection:
            table = vector_table_name(find_space(connection, space).table_number)
            connection.executemany(
                f"UPDATE {table} SET uncertainty = ? WHERE label = ?",  # noqa: S608 - ours
                [(value, label) for label, value in enumerate(drawn, 1)],
            )
    return gallery


@contextmanager
def _served(gallery: Path) -> Iterator[Ask]:
    """Asks for a path below the site, with a body to post or none."""
    token = new_token()
    with Device(gallery) as opened, Listener("127.0.0.1", 0) as listener:
        listener.serve(make_site(opened, listener.hosts, token))
        connection = http.client.HTTPConnection(listener.host, listener.port)

        def ask(path: str, body: bytes | None) -> None:
            kind = "GET" if body is None else "POST"
            connection.request(kind, f"/{token}/{path}", body, {"Origin": listener.address})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200 or not content:
                raise RuntimeError(f"{path}: {answer.status} {content[:200]!r}")

        yield ask
        connection.close()


def _measured(bench: Bench, gallery: Path, size: int) -> list[Row]:
    middle = size // 2
    pictures = itertools.cycle(data.draw_jpegs(20, SIZE, seed=7))
    labels = np.random.default_rng(1).integers(1, size + 1, 1000).tolist()
    asked: dict[str, Callable[[], tuple[str, bytes | None]]] = {
        "grid, its beginning": lambda: ("", None),
        "grid, from the middle": lambda: (f"?after={middle}", None),
        "one folder": lambda: (
            f"?where=folder=trip {labels[-1] % FOLDERS}".replace(" ", "+"),
            None,
        ),
        "stars > 2": lambda: ("?where=stars%3E2", None),
        "least certain": lambda: ("uncertain", None),
        "least certain, from the middle": lambda: (f"uncertain?after={middle}:0.5", None),
        "search by a picture": lambda: ("search", next(pictures)),
        "the same in 2/5 of them": lambda: ("search?where=stars%3E2", next(pictures)),
        "an item with its nearest": lambda: (f"item/{labels.pop()}", None),
        "copy, made": lambda: (f"thumb/{labels.pop()}", None),
        "copy, kept": lambda: ("thumb/1", None),
    }
    rows: list[Row] = []
    with _served(gallery) as ask:
        for name, wanted in asked.items():
            first, *others = [_milliseconds(ask, *wanted()) for _ in range(bench.size(4, 51, 201))]
            rows.append(
                {
                    "items": size,
                    "page": name,
                    "first ms": first,
                    "median ms": statistics.median(others),
                    "slowest ms": max(others),
                }
            )
    return rows


def _milliseconds(ask: Ask, path: str, body: bytes | None) -> float:
    return 1000 * time_call(lambda: ask(path, body))
