"""Digests: ids of spaces change with everything that changes what a vector means."""

import hashlib
import json
from pathlib import Path

import pytest

from nobackfill.digests import sha256_file, side_space_id, space_id
from nobackfill.errors import InvalidInputError
from nobackfill.vectors import Metric

EMBEDDER = hashlib.sha256(b"embedder").hexdigest()


def make(
    embedder: str = EMBEDDER, height: int = 8, width: int = 16, dim: int = 4,
    metric: Metric = "cosine", unit: bool = True,
) -> str:  # fmt: skip
    return space_id(embedder, height=height, width=width, dim=dim, metric=metric, unit_norm=unit)


def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = bytes(range(256)) * 5000
    path.write_bytes(data)
    assert sha256_file(path) == hashlib.sha256(data).hexdigest()


def test_a_space_id_is_the_digest_of_its_facts() -> None:
    facts = {
        "dim": 4, "embedder": EMBEDDER, "height": 8, "metric": "cosine", "unit": True, "width": 16,
    }  # fmt: skip
    text = json.dumps(facts, separators=(",", ":"))
    assert make() == "sp-" + hashlib.sha256(text.encode()).hexdigest()


def test_each_fact_makes_another_space() -> None:
    other = hashlib.sha256(b"other").hexdigest()
    ids = [
        make(), make(embedder=other), make(height=16, width=8), make(height=9), make(width=17),
        make(dim=5), make(metric="squared_l2"), make(unit=False),
    ]  # fmt: skip
    assert len(set(ids)) == len(ids)
    assert side_space_id(EMBEDDER) != side_space_id(other)
    assert side_space_id(EMBEDDER).startswith("ss-")


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "G" * 64, "A" * 64])
def test_what_is_no_digest_is_refused(digest: str) -> None:
    with pytest.raises(InvalidInputError):
        make(embedder=digest)
    with pytest.raises(InvalidInputError):
        side_space_id(digest)
