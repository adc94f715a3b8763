"""What must be true of the whole system: publication, gateway and device as plain Python.

Nothing is stored, searched or embedded here: an item is the set of releases in whose spaces it has
a vector, and every operation says how these sets change.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Rollout = Literal["cutover", "dual", "direct"]
SpaceState = Literal["active", "previous", "staging"]


@dataclass
class Publication:
    """`sources`: release -> releases it carries upgrades from. `directly`: releases that search the
    one before as it is."""

    sources: dict[int, tuple[int, ...]] = field(default_factory=dict)
    directly: set[int] = field(default_factory=set)
    withdrawn: set[int] = field(default_factory=set)

    def leads(self, source: int, target: int) -> bool:
        """Whether upgrades of releases that count lead from one release to another."""
        reached = {source}
        for release in range(source + 1, target + 1):
            if release not in self.withdrawn and reached & set(self.sources.get(release, ())):
                reached.add(release)
        return target in reached and target not in self.withdrawn


@dataclass(frozen=True)
class Item:
    """`content` tells puts of the same from puts of another; `picture` is what it shows."""

    content: str
    picture: int
    releases: frozenset[int]


@dataclass
class Gallery:
    """`states`: spaces by release, as they were made. `turns`: releases as they became active."""

    states: dict[int, SpaceState]
    turns: list[int]
    rollout: Rollout | None = None
    items: dict[str, Item] = field(default_factory=dict)

    @property
    def active(self) -> int:
        """The release whose space is active."""
        return next(release for release, state in self.states.items() if state == "active")

    @property
    def before(self) -> int | None:
        """The release whose space a rollback makes active."""
        kept = [release for release in self.turns if self.states.get(release) == "previous"]
        return kept[-1] if kept else None

    def put(self, name: str, item: Item) -> None:
        """The same content again fills what is missing; another replaces all."""
        old = self.items.get(name)
        kept = old.releases if old is not None and old.content == item.content else frozenset()
        self.items[name] = Item(item.content, item.picture, item.releases | kept)

    def carry(self, target: int) -> bool:
        """Upgrade what the active space has; whether the target is whole."""
        for name, item in self.items.items():
            if self.active in item.releases:
                self.items[name] = Item(item.content, item.picture, item.releases | {target})
        return self.lacking(target) == 0

    def waits(self, target: int) -> bool:
        """Whether an upgrade has something to carry."""
        return any(
            self.active in i.releases and target not in i.releases for i in self.items.values()
        )

    def lacking(self, release: int) -> int:
        """Items without a vector in a space."""
        return sum(release not in item.releases for item in self.items.values())

    def turn(self, release: int, old_becomes: SpaceState) -> None:
        """Make a space the active one."""
        self.states[self.active] = old_becomes
        self.states[release] = "active"
        self.turns = [n for n in self.turns if n != release] + [release]
        self.rollout = None

    def drop(self, releases: Iterable[int]) -> None:
        """Remove spaces with all their vectors."""
        gone = frozenset(releases)
        self.states = {n: state for n, state in self.states.items() if n not in gone}
        for name, item in self.items.items():
            self.items[name] = Item(item.content, item.picture, item.releases - gone)


@dataclass
class Server:
    """`begun`: the activation that waits, as its galleries are paused."""

    publication: Publication
    active: int = 1
    previous: list[int] = field(default_factory=list)
    retired: set[int] = field(default_factory=set)
    galleries: dict[str, Gallery] = field(default_factory=dict)
    begun: tuple[int, Rollout] | None = None

    def staged(self, gallery: Gallery) -> int | None:
        """The space that is filled for the active or the coming release."""
        wanted = {self.active, self.begun[0] if self.begun else self.active}
        states = gallery.states.items()
        return next((n for n, state in states if state == "staging" and n in wanted), None)

    def parts(self, gallery: Gallery) -> tuple[int, ...]:
        """Spaces that are searched, the one that answers for an item in both first."""
        staged = self.staged(gallery)
        if staged == self.active and gallery.rollout in ("dual", "direct"):
            return staged, gallery.active
        return (gallery.active,)

    def kept(self, gallery: Gallery) -> list[int]:
        """Releases that images are embedded for, active first."""
        states = gallery.states.items()
        previous = [n for n, s in states if s == "previous" and n not in self.retired]
        staged = self.staged(gallery)
        return [gallery.active, *previous, *([] if staged is None else [staged])]

    def create(self, name: str) -> None:
        """A new gallery keeps what a rollback may return to."""
        states: dict[int, SpaceState] = dict.fromkeys(self.previous, "previous")
        turns = [*self.previous, self.active]
        self.galleries[name] = Gallery({**states, self.active: "active"}, turns)

    def bare(self, gallery: Gallery, release: int) -> frozenset[int] | None:
        """Where vectors of a release go; None: they are refused."""
        parts, kept = self.parts(gallery), self.kept(gallery)
        if release in parts:
            return frozenset({release})
        if release not in kept or release == self.staged(gallery):
            return None
        if not self.publication.leads(release, parts[0]):
            return None
        return frozenset({release, parts[0]})

    def begin(self, release: int, rollout: Rollout, only: str | None = None) -> None:
        """Stage a release in every gallery that can follow; direct and dual switch at once."""
        self.begun = (release, rollout)
        self.retired.discard(release)
        for _, gallery in self.going(release, only):
            if self.parts(gallery)[0] != release:
                gallery.states.setdefault(release, "staging")
                gallery.rollout = rollout
        if rollout != "cutover":
            self.switch(release)

    def going(self, release: int, only: str | None = None) -> list[tuple[str, Gallery]]:
        """Galleries that an activation carries."""
        return [
            (name, gallery)
            for name, gallery in sorted(self.galleries.items())
            if only in (None, name)
            and gallery.active != release
            and self.publication.leads(gallery.active, release)
        ]

    def switch(self, release: int) -> None:
        """The release answers from now on."""
        if self.active != release:
            self.previous.append(self.active)
            self.active = release

    def advance(self, *, paused: bool, only: str | None = None) -> None:
        """Let what was begun go on, to its end or to the first gallery that is held up."""
        assert self.begun is not None
        release, rollout = self.begun
        whole = []
        for _, gallery in self.going(release, only):
            if paused and gallery.waits(release):
                return
            if gallery.carry(release):
                whole.append(gallery)
                if rollout != "cutover":
                    gallery.turn(release, "previous")
                    self.let_go()
        if rollout == "cutover":
            for gallery in whole:
                gallery.turn(release, "previous")
            self.switch(release)
        self.begun = None
        self.let_go()

    def let_go(self) -> None:
        """The spaces of retired releases go as soon as nothing needs them."""
        for gallery in self.galleries.values():
            gallery.drop(self.retired - set(self.kept(gallery)))

    def target(self) -> int | None:
        """The release that a rollback leads to."""
        if self.begun is not None and self.begun[0] != self.active:
            return self.active
        return self.previous[-1] if self.previous else None

    def lost(self) -> int:
        """Items that a rollback would not find."""
        target, lost = self.target(), 0
        assert target is not None
        for gallery in self.galleries.values():
            if gallery.active > target:
                assert gallery.before is not None
                lost += gallery.lacking(gallery.before)
            elif len(self.parts(gallery)) > 1:
                lost += gallery.lacking(gallery.active)
        return lost

    def rollback(self) -> None:
        """Return to the release before, or call off what was not switched yet."""
        target = self.target()
        assert target is not None
        self.begun = None
        if self.active != target:
            self.active = self.previous.pop()
        for gallery in self.galleries.values():
            if gallery.active > target:
                assert gallery.before is not None
                gallery.turn(gallery.before, "staging")
            elif gallery.active == target:
                gallery.rollout = None
        self.let_go()

    def retire(self) -> list[int]:
        """Let go of all that is older than the active release; the releases that are gone."""
        queried = {self.active}
        for gallery in self.galleries.values():
            parts = self.parts(gallery)
            queried |= {parts[0]} if gallery.rollout == "direct" else set(parts)
        present = {n for gallery in self.galleries.values() for n in gallery.states}
        gone = sorted(n for n in (present | set(self.previous)) - queried if n < self.active)
        self.previous = [n for n in self.previous if n in queried]
        self.retired |= set(gone)
        for gallery in self.galleries.values():
            gallery.drop(set(gallery.states) - set(self.kept(gallery)))
        return gone


@dataclass
class Device:
    """`back`: the release that a rollback returns to. `held`: releases it does not follow."""

    publication: Publication
    active: int
    pictures: set[int] = field(default_factory=set)
    back: int | None = None
    held: set[int] = field(default_factory=set)

    def sync(self, *, retry: bool = False) -> str:
        """Follow the newest release that can be followed; the state that is reported."""
        self.held = set() if retry else self.held
        published, behind = self.publication, False
        newer = [n for n in published.sources if n > self.active and n not in published.withdrawn]
        for release in sorted(newer, reverse=True):
            if release not in self.held and published.leads(self.active, release):
                self.active, self.back = release, self.active
                return "upgraded"
            behind = True
        if self.active in published.withdrawn and self.back not in (None, *published.withdrawn):
            assert self.back is not None
            self.active, self.back = self.back, None
            return "rolled-back"
        if behind or self.active in published.withdrawn:
            return "behind"
        # No life lasts the week after which the way back goes.
        return "up-to-date"

    def rollback(self) -> None:
        """Return to the release before the last upgrade, and stay there."""
        assert self.back is not None
        self.held = self.held | {self.active}
        self.active, self.back = self.back, None
