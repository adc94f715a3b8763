"""Documents that a package ships: what botocore says of the operations of Amazon's services.

A document is what an operation does; its query is the operation's name in words.
"""

import gzip
import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Characters of a body.
SHORTEST, LONGEST = 80, 600
_TAG = re.compile(r"<[^>]*>")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+")


@dataclass(frozen=True)
class Document:
    """`title` is asked for, `body` is stored."""

    title: str
    body: str


def draw_documents(packages: Path, count: int, seed: int = 0) -> list[Document]:
    """`count` of them, no two alike, drawn from all services."""
    return draw_by_seed(read_documents(packages), count, seed)


def read_documents(packages: Path) -> dict[str, Document]:
    """All of them, by body."""
    found: dict[str, Document] = {}
    for service in sorted((packages / "botocore" / "data").iterdir()):
        files = sorted(service.glob("*/service-2.json.gz"))
        if files:
            for one in _operations(files[-1]):
                found.setdefault(one.body, one)
    return found


def draw_by_seed(found: Mapping[str, Document], count: int, seed: int) -> list[Document]:
    """`count` of the documents that were found, by body. Raises ValueError where there are less."""
    if len(found) < count:
        raise ValueError(f"expected {count} documents, found {len(found)}")
    every = list(found.values())
    rows = np.random.default_rng(seed).choice(len(every), count, replace=False)
    return [every[row] for row in rows.tolist()]


def _operations(file: Path) -> list[Document]:
    with gzip.open(file) as packed:
        said = json.load(packed)
    service = said["metadata"].get("serviceId", "")
    made = []
    for name, operation in said["operations"].items():
        text = html.unescape(_TAG.sub(" ", operation.get("documentation", "")))
        body = " ".join(text.split())[:LONGEST]
        if len(body) >= SHORTEST:
            words = " ".join(_WORDS.findall(name)).lower()
            made.append(Document(f"{service}: {words}", body))
    return made
