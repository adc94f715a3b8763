"""How a gallery is searched and written at present: pure decisions, no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, Protocol

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import Filter
from nobackfill.gallery.spec import Origin, SpaceInfo
from nobackfill.release.calibration import Joint, Scale, Scorer, find
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries.locks import Level, Users
from nobackfill.server.galleries.ranking import PlanPart, SearchResult
from nobackfill.server.state import RolloutName, State

# What a gallery remembers of its staging space once that is whole, and a canary may search it.
CANARY = "canary"
# What it remembers of the source of its images, if it has one.
SOURCE = "source"
# Whether both models rank what is carried, where a release has weights for that.
BOTH = "both"
Filling = RolloutName | Literal["canary"]


# A query by embedding: space id to little-endian float32 values.
ByEmbedding = Mapping[str, bytes]
# An image, a text, or vectors.
Query = bytes | str | ByEmbedding
# What is found, or why the query was refused.
QueryAnswer = SearchResult | InvalidInputError


@dataclass(frozen=True)
class SearchRequest:
    """What one call asks of a gallery: the `k` nearest items to each of `queries`.

    `ef` as in Index.search. `single`: a call of one query, which may be answered together with
    those of other calls. `background`: nobody waits for the answer, and no other call's query is
    answered together with it. `heal`: re-embed hits first, where the gallery does.
    """

    queries: tuple[Query, ...]
    k: int
    filtered: Filter | None = None
    ef: int = 0
    single: bool = False
    background: bool = False
    heal: bool = True


class Answerer(Protocol):
    """Answers searches in one mode of a plan; nobackfill.server.galleries.answering says which
    there are. `hosted` is the gallery: a Hosted, whose module imports this one."""

    def answer(self, hosted: Any, request: SearchRequest) -> list[QueryAnswer]:
        """Answer each query of a request. Raises as Searching.batch."""
        ...

    def image_part(self, hosted: Any) -> PlanPart | None:
        """The part whose nearest items answer an image; None where more has a say."""
        ...

    def space_part(self, hosted: Any, space: str) -> PlanPart | None:
        """The part whose nearest items answer one embedding in a space; None where more has a
        say."""
        ...


@dataclass(frozen=True, eq=False)
class Both:
    """The space before, whose model has its say in how carried items are ranked."""

    part: PlanPart
    joint: Joint


@dataclass(frozen=True, eq=False)
class Plan:
    """Every item is answered for by the first of `parts` that has it.

    `alone`: spaces, by the query's space, in which a query by embedding is answered on its own.
    `writes`: releases whose models embed each image that is put, active space first.
    `accepts`: spaces in which bare embeddings may be put. `canary`: the release on trial in its own
    space, which is whole; None at nearly all times. `heals`: the space whose carried vectors are
    made anew from their images as people look; None without a source, and while another is filled.
    `both`: asked beside the active space; None where nobody wishes it, or no release has weights.
    `epoch`: of what it was made of, where other gateways change that, too. `answerer`: what answers
    searches in the mode that canary, heals and both say, as `answerer_of` makes it. `query`: the
    release that answers image queries.
    """

    parts: tuple[PlanPart, ...]
    alone: Mapping[str, PlanPart]
    writes: tuple[Manifest, ...]
    accepts: frozenset[str]
    answerer_of: InitVar["AnswererOf"]
    canary: PlanPart | None = None
    epoch: int = 0
    heals: str | None = None
    both: Both | None = None
    users: Users = field(default_factory=lambda: Users(Level.PLAN))
    query: Manifest = field(init=False)
    answerer: Answerer = field(init=False)

    def __post_init__(self, answerer_of: "AnswererOf") -> None:
        object.__setattr__(self, "query", self.parts[0].query)
        object.__setattr__(self, "answerer", answerer_of(self))

    def searched(self) -> set[str]:
        """Spaces that need a view."""
        on_trial = () if self.canary is None else (self.canary,)
        return {part.space for part in (*self.parts, *self.alone.values(), *on_trial)}

    def models(self) -> list[Manifest]:
        """Releases whose models it uses, the one that answers first."""
        return [*(part.query for part in self.parts), *self.writes]


AnswererOf = Callable[[Plan], Answerer]


def own_part(manifest: Manifest) -> PlanPart:
    """A release's queries in its own space."""
    space, curves, scale = manifest.space, dict[Origin, Scorer](), None
    for origin in ("native", "upgraded", "re-embedded"):
        if curve := find(manifest, space, space, origin):
            curves[origin] = Scorer(curve)
            scale = Scale(*curve.scale) if curve.scale else scale
    # What was embedded from its image is what native vectors are.
    if "native" in curves:
        curves.setdefault("re-embedded", curves["native"])
    return PlanPart(space, manifest.release, manifest, None, curves, scale)


def direct_part(new: Manifest, old: Manifest) -> PlanPart:
    """Queries of `new` in the space of `old`, as `new` declares that they may."""
    curve = find(new, new.space, old.space, "direct")
    curves: dict[Origin, Scorer] = {"direct": Scorer(curve)} if curve else {}
    return PlanPart(old.space, old.release, new, "direct", curves)


def old_model_part(new: Manifest, old: Manifest) -> PlanPart:
    """Queries of `old` in its own space, while `new` answers: the dual rollout."""
    own = own_part(old).curves
    announced = find(new, old.space, old.space, "old-model")
    curve = Scorer(announced) if announced else own.get("native")
    curves: dict[Origin, Scorer] = {"old-model": curve} if curve else {}
    return PlanPart(old.space, old.release, old, "old-model", curves)


def make_plan(
    spaces: Sequence[SpaceInfo],
    state: State,
    manifests: Mapping[int, Manifest],
    answerer_of: AnswererOf,
    rollout: Filling | None,
    epoch: int = 0,
    *,
    source: bool = False,
    both: bool = False,
) -> Plan:
    """The plan of a gallery with these `spaces`; `rollout` is how it came to its staging space, and
    CANARY once that is whole. `source`: its items can be had again; `both`: both models are asked.

    While an item of the active release may still be missing from its space, direct and dual search
    two spaces. With cutover the old space answers until the gallery is flipped.
    """
    active = next(info.spec for info in spaces if info.state == "active")
    previous = [
        info.spec
        for info in spaces
        if info.state == "previous" and info.spec.release not in state.retired
    ]
    native = own_part(manifests[active.release])
    kept = [native, *(own_part(manifests[spec.release]) for spec in previous)]
    parts: tuple[PlanPart, ...] = (native,)
    staged = _staged(spaces, state, manifests)
    if staged is not None:
        kept.append(staged)
        if staged.query.release == state.active and rollout in ("direct", "dual"):
            make = direct_part if rollout == "direct" else old_model_part
            parts = (staged, make(staged.query, native.query))
    alone = {part.space: part for part in kept if part is not staged}
    accepts = frozenset({*alone, parts[0].space})
    writes = tuple(part.query for part in kept)
    canary = staged if rollout == CANARY and len(parts) == 1 and _on_trial(state, staged) else None
    embeds = native.query.embedder.vectors_of is None
    heals = native.space if source and embeds and staged is None else None
    asks = both and len(parts) == 1 and canary is None and heals is None
    before = _both(native.query, kept[1:]) if asks else None
    return Plan(parts, alone, writes, accepts, answerer_of, canary, epoch, heals, before)


def _both(new: Manifest, previous: Sequence[PlanPart]) -> Both | None:
    """The newest space before that `new` has weights for; by the route that keeps most."""
    for part in sorted(previous, key=lambda part: -part.release):
        routes = [route for route in new.routes if route.releases[0] == part.release]
        for route in sorted(routes, key=lambda route: -route.kept):
            if found := route.both:
                return Both(part, Joint(found.new, found.old, found.offset))
    return None


def _on_trial(state: State, staged: PlanPart | None) -> bool:
    record = state.activation
    if record is None or record.canary is None or staged is None:
        return False
    return record.release != state.active and staged.query.release == record.release


def _staged(
    spaces: Sequence[SpaceInfo], state: State, manifests: Mapping[int, Manifest]
) -> PlanPart | None:
    """The space being filled for the active or coming release; none left by a rollback."""
    wanted = {state.active, state.activation.release if state.activation else None}
    for info in spaces:
        if info.state == "staging" and info.spec.release in wanted:
            return own_part(manifests[info.spec.release])
    return None
