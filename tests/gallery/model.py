"""A gallery as a dict: what the SqliteGallery is compared with, rule by rule."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nobackfill.errors import NotFoundError, PreconditionError
from nobackfill.gallery import staging
from nobackfill.gallery.filter_engine import passing_labels
from nobackfill.gallery.filters import OneOf
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.view import LiveView
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import run_upgrade
from nobackfill.gallery.store import NewVectors
from tests.gallery.making import SIDE_DIM, Linear, rows, spec, vectors
from tests.support.memory import MEMORY

NAMES = [f"item-{number}" for number in range(12)]
RELEASES = [1, 2, 3, 4]
SEEDS = st.integers(0, 5)


@dataclass
class Thing:
    """One item: its vectors by release, and in which an upgrade carried them."""

    label: int
    digest: str
    colour: str
    vectors: dict[int, bytes] = field(default_factory=dict)
    carried: set[int] = field(default_factory=set)


class GalleryModel(RuleBasedStateMachine):
    """Rules act on the store and on the dict; invariants compare them."""

    @initialize()
    def make(self) -> None:
        where = MEMORY if MEMORY.is_dir() else None
        self.folder = tempfile.TemporaryDirectory(prefix="nobackfill-", dir=where)
        self.path = Path(self.folder.name) / "g.sqlite"
        self.store = SqliteGallery.create(self.path, spec())
        self.things: dict[str, Thing] = {}
        self.label = 0
        self.active = 1
        self.states = {1: "active"}
        self.previous: list[int] = []
        self.views = {1: LiveView(self.store, spec(1).space)}

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True),
        into=st.sets(st.sampled_from(RELEASES), min_size=1, max_size=2),
        seed=SEEDS,
        colour=st.sampled_from(["red", "green"]),
    )
    def put(self, names: list[str], into: set[int], seed: int, colour: str) -> None:
        releases = sorted(into & set(self.states)) or [self.active]
        content = {n: vectors(len(names), 100 * seed + n) for n in releases}
        side = vectors(len(names), seed, SIDE_DIM)
        result = self.store.put(
            names,
            [NewVectors(spec(n).space, content[n], side) for n in releases],
            digests=[f"{name} {seed}" for name in names],
            metadata=[{"colour": colour}] * len(names),
        )
        for row, name in enumerate(names):
            old = self.things.get(name)
            kept = old is not None and old.digest == f"{name} {seed}"
            assert result.changed_mask[row] == (not kept)
            if old is None or not kept:
                self.label += 1
                old = self.things[name] = Thing(self.label, f"{name} {seed}", colour)
            old.colour = colour
            assert result.labels[row] == old.label
            for n in releases:
                if n in old.carried or n not in old.vectors:
                    old.vectors[n] = content[n][row].tobytes()
                old.carried.discard(n)

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4))
    def delete(self, names: list[str]) -> None:
        gone = {name for name in names if self.things.pop(name, None)}
        assert self.store.delete(names) == len(gone)

    @rule(release=st.sampled_from(RELEASES))
    def begin(self, release: int) -> None:
        staging.add_staging_space(self.store, spec(release))
        self.states.setdefault(release, "staging")
        if release not in self.views:
            self.views[release] = LiveView(self.store, spec(release).space)

    @rule(release=st.sampled_from(RELEASES), chunks=st.integers(1, 4), source=st.booleans())
    def upgrade(self, release: int, chunks: int, source: bool) -> None:
        others = [n for n in self.states if n != release]
        if release not in self.states or not others:
            return
        begun = others[0] if source else self.active
        if begun == release:
            return
        linear = Linear(seed=release)
        asked = iter(range(1000))
        run_upgrade(
            self.store, linear, spec(release), source_space=spec(begun).space, items_per_chunk=3,
            should_stop=lambda: next(asked) >= chunks,
        )  # fmt: skip
        todo = sorted(
            (thing for thing in self.things.values() if self.can_carry(thing, begun, release)),
            key=lambda thing: thing.label,
        )
        for start in range(0, min(len(todo), 3 * chunks), 3):
            some = todo[start : start + 3]
            content = np.stack([np.frombuffer(t.vectors[begun], np.float32) for t in some])
            for thing, vector in zip(some, linear.run(content, None).embedding, strict=True):
                thing.vectors[release] = vector.tobytes()
                thing.carried.add(release)

    def can_carry(self, thing: Thing, source: int, target: int) -> bool:
        return source in thing.vectors and target not in thing.vectors

    @rule(release=st.sampled_from(RELEASES), seed=SEEDS)
    def backfill(self, release: int, seed: int) -> None:
        chosen = [t for t in self.things.values() if release in t.vectors][:3]
        if not chosen or release not in self.states:
            return
        content = vectors(len(chosen), seed)
        labels = np.array([thing.label for thing in chosen])
        side = vectors(len(chosen), seed, SIDE_DIM)
        staging.write_vectors(
            self.store, spec(release).space, labels, content, side=side, replace=True,
            origin="re-embedded",
        )  # fmt: skip
        for thing, vector in zip(chosen, content, strict=True):
            thing.vectors[release] = vector.tobytes()
            thing.carried.discard(release)

    def behind(self, release: int) -> int:
        return sum(release not in thing.vectors for thing in self.things.values())

    @rule(release=st.sampled_from(RELEASES), leave_behind=st.booleans())
    def flip(self, release: int, leave_behind: bool) -> None:
        if release not in self.states or release == self.active:
            return
        if self.behind(release) and not leave_behind:
            with pytest.raises(PreconditionError):
                staging.flip(self.store, spec(release).space)
            return
        staging.flip(self.store, spec(release).space, leave_behind=leave_behind)
        self.move(release, "previous")

    def move(self, release: int, old: str) -> None:
        self.states[self.active] = old
        if release in self.previous:
            self.previous.remove(release)
        if old == "previous":
            self.previous.append(self.active)
        self.active = release
        self.states[release] = "active"

    @rule()
    def rollback(self) -> None:
        if not self.previous:
            with pytest.raises(NotFoundError):
                staging.rollback(self.store)
            return
        target = self.previous[-1]
        assert staging.rollback(self.store, leave_behind=True) == spec(target).space
        self.move(target, "staging")

    @rule(release=st.sampled_from(RELEASES))
    def drop(self, release: int) -> None:
        if release not in self.states:
            return
        if release == self.active:
            with pytest.raises(PreconditionError):
                staging.drop_space(self.store, spec(release).space)
            return
        staging.drop_space(self.store, spec(release).space)
        self.views.pop(release).close()
        del self.states[release]
        if release in self.previous:
            self.previous.remove(release)
        for thing in self.things.values():
            thing.vectors.pop(release, None)

    @rule()
    def open_again(self) -> None:
        self.store.close()
        self.store = SqliteGallery.open(self.path)
        self.views = {n: LiveView(self.store, spec(n).space) for n in self.states}

    @precondition(lambda self: bool(self.states))
    @rule(release=st.sampled_from(RELEASES))
    def compact(self, release: int) -> None:
        if release in self.views:
            self.views[release].compact(ExactIndex)

    @invariant()
    def the_store_is_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        assert {i.spec.release: i.state for i in self.store.spaces()} == self.states
        listed = {item.id: item for item in self.store.list_items()}
        assert listed.keys() == self.things.keys()
        for name, thing in self.things.items():
            item = listed[name]
            assert (item.label, item.digest) == (thing.label, thing.digest)
            assert item.metadata == {"colour": thing.colour}
        red = sorted(t.label for t in self.things.values() if t.colour == "red")
        assert passing_labels(self.store, OneOf("colour", ("red",))).tolist() == red
        for release in self.states:
            expected = {
                t.label: t.vectors[release] for t in self.things.values() if release in t.vectors
            }
            found = {label: row[0] for label, row in rows(self.store, spec(release).space).items()}
            assert found == expected
            labels, content = self.views[release].snapshot().live_content()
            assert (
                dict(zip(labels.tolist(), map(bytes, np.asarray(content)), strict=True)) == expected
            )
            assert staging.count_items_without_vector(
                self.store, spec(release).space
            ) == self.behind(release)
