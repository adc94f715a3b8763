"""A gallery in its own store, both its models, and what `nobackfill fit` makes of them."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from nobackfill.adopt.crossfit import cross_fit
from nobackfill.adopt.joining import save_rank_fusion
from nobackfill.adopt.judgement import JudgedGallery, judge_options
from nobackfill.adopt.maps import Map, fit_maps, save_map
from nobackfill.adopt.sources.arrays import MemorySource
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Searchable
from nobackfill.serve import Dual, FunctionItems, ReembeddingLimits
from nobackfill.serving.fusion import FittedRankFusion
from nobackfill.vectors import InputKind, Vectors
from tests.adopt.made import world

MADE = world(300)
HITS = 60


def fitted() -> tuple[Map, FittedRankFusion]:
    mapping = fit_maps(MADE.old, MADE.new)["affine"]
    held = cross_fit(MADE.pairs, [MADE.queries], ["affine"])["affine"]
    gallery = JudgedGallery(MADE.old, held.migrated_vectors, MADE.new)
    joining = judge_options(gallery, MADE.queries, held.query_distances[0]).rank_fusion
    return mapping, replace(joining, map_digest=mapping.digest)


MAP, JOINING = fitted()


@dataclass
class NewModel:
    """The new model: "text of item-7" is that item's vector. Counts what it embeds."""

    fingerprint: str = "the new model"
    input_kind: InputKind | None = "text"
    text_role: str = ""
    seconds: float = 0.0
    vectors: Vectors = field(default_factory=lambda: MADE.new)
    times: Counter[str] = field(default_factory=Counter)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        names = [str(item).removeprefix("text of ") for item in items]
        with self.lock:
            self.times.update(names)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds)
        with self.lock:
            self.at_once -= 1
        return np.stack([self.vectors[int(name.removeprefix("item-"))] for name in names])


def files(
    folder: Path, mapping: Map = MAP, joining: FittedRankFusion = JOINING, old: Vectors = MADE.old
) -> Path:
    """`map.npz`, `joining.npz` and a folder of the old vectors."""
    save_map(folder / "map.npz", mapping)
    save_rank_fusion(folder / "joining.npz", joining)
    (folder / "store").mkdir(exist_ok=True)
    np.save(folder / "store" / "ids.npy", np.array([f"item-{row}" for row in range(len(old))]))
    np.save(folder / "store" / "old.npy", old)
    return folder


def loaded(folder: Path) -> MemorySource:
    return MemorySource(open_source(str(files(folder) / "store")))


def dual(
    folder: Path,
    source: Searchable,
    model: NewModel | None,
    limits: ReembeddingLimits | None = None,
) -> Dual:
    """Open it as an application does; without a model no hit is embedded again."""
    items = None if model is None else FunctionItems(lambda name: f"text of {name}", "text")
    return Dual.open(
        source, folder / "map.npz", folder / "joining.npz", folder / "natives.db",
        model or NewModel(), items=items, limits=limits or ReembeddingLimits(wait_seconds=30),
    )  # fmt: skip
