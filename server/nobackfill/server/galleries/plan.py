"""Decide how a gallery is searched and written: pure functions, without I/O.

A plan has the parts that searches use, the releases that a put embeds for, and its users.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import Filter
from nobackfill.gallery.spec import Origin, SpaceInfo
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.release.calibration import DistanceScale, JointDistance, Scorer, find_curve
from nobackfill.release.manifest import Manifest, QueryAdapter
from nobackfill.server.state import RolloutName, State

# A gallery's rollout while a canary may search its complete, but not active, space.
CANARY_KEY = "canary"
# Key of a gallery's state: the source from which its items are re-embedded.
SOURCE_KEY = "source"
# Key of a gallery's state: whether the previous model helps to rank migrated items.
RANK_FUSION_KEY = "both"
FillMode = RolloutName | Literal["canary"]


@dataclass(frozen=True, eq=False)
class PlanPart:
    """Describe one space that a plan searches, and the queries that search it.

    Attributes:
        space: id of the space of the stored vectors.
        release: the release that made these vectors.
        query_manifest: manifest of the release that makes the queries.
        fixed_origin: origin of every hit, direct or old-model; None if each item has its own.
        score_curves: by origin of a vector, the calibration from distance to score.
        distance_scale: how distances of migrated vectors compare with those of native ones; None if
            they compare as they are.
        adapter: maps the queries to `space`; None if they search it as they are.
    """

    space: str
    release: int
    query_manifest: Manifest
    fixed_origin: Origin | None
    score_curves: Mapping[Origin, Scorer]
    distance_scale: DistanceScale | None = None
    adapter: QueryAdapter | None = None


class RankedHit(NamedTuple):
    """Hold one hit.

    Attributes:
        item: the item.
        distance: its distance to the query.
        score: calibrated probability of a match, 0 to 1; None without a calibration.
        release: the release that made the vector.
        origin: how the vector was made.
        beyond_calibration: True if the calibration saw no such distance.
    """

    item: StoredItem
    distance: float
    score: float | None
    release: int
    origin: Origin
    beyond_calibration: bool = False


@dataclass(frozen=True)
class SearchResult:
    """Hold the answer to one query.

    Attributes:
        hits: the hits, best first; may be empty.
        release: the release whose model embedded the query.
        space: id of the space that answered.
        request_id: identifies the answer for feedback; empty without a canary.
    """

    hits: list[RankedHit]
    release: int
    space: str
    request_id: str = ""


class Score(NamedTuple):
    """Hold a calibrated probability.

    Attributes:
        value: probability of a match, 0 to 1.
        beyond_calibration: True if the calibration saw no such distance, so that the value is a
            bound.
    """

    value: float
    beyond_calibration: bool


class PlanUseCounter(Protocol):
    """Count the calls that use a plan; nobackfill.server.galleries.hosted.UseCounter does."""

    def enter(self) -> bool:
        """Count one more user, without waiting; False if the plan is closed."""

    def leave(self) -> None:
        """Count one user less; once for each `enter` that returned True."""

    def wait_until_none(self, timeout_s: float) -> bool:
        """Wait until there is no user, at most `timeout_s` seconds; False if there is still one."""


# Query by embedding: little-endian float32 values by space id.
EmbeddingQuery = Mapping[str, bytes]
# Query: an encoded image, a text, or embeddings.
Query = bytes | str | EmbeddingQuery
# The answer to a query, or the error that refused it.
QueryAnswer = SearchResult | InvalidInputError


@dataclass(frozen=True)
class SearchRequest:
    """Ask a gallery for the nearest items to some queries.

    Attributes:
        queries: the queries.
        k: most hits for each query.
        condition: only items that pass this filter; None means all.
        ef: width of the graph search, as in Index.search; 0 means the index's own.
        is_single: the call has one query, which may be batched with those of other calls.
        is_background: no caller waits; the query is not batched with others.
        may_reembed: re-embed first hits if the gallery does so.
    """

    queries: tuple[Query, ...]
    k: int
    condition: Filter | None = None
    ef: int = 0
    is_single: bool = False
    is_background: bool = False
    may_reembed: bool = True


class Answerer(Protocol):
    """Answer searches in one mode of a plan; nobackfill.server.galleries.answering has the modes.

    `hosted` is a HostedGallery, whose module imports this one.
    """

    def answer(self, hosted: Any, request: SearchRequest) -> list[QueryAnswer]:
        """Answer each query of a request.

        The caller uses the gallery and the plan until the end.

        Args:
            hosted: the gallery.
            request: the request.

        Returns:
            For each query, in order, the result, or the InvalidInputError that refused it.

        Raises:
            InvalidInputError: the filter is not valid; TooLargeError if the images together are too
                large.
            NoEncoderError, IncompatibleSpaceError, NeedsImageError, ReleaseRetiredError: a query
                does not suit the gallery; see GallerySearcher.search.
            OutdatedPlanError: another gateway has replaced the plan; the caller begins again.
            DeadlineError, CancelledError: the call's time is over, or its caller has gone.
            BusyError, UnavailableError: the store is busy, a server does not answer, or too many
                images are being decoded (OverloadedError).
            NotFoundError: the gallery was closed or deleted.
            VerificationError: the store, or a model's output, is damaged.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """

    def sole_image_part(self, hosted: Any) -> PlanPart | None:
        """Return the part whose nearest items answer an image; None if more is needed.

        It reads memory only.
        """

    def sole_space_part(self, hosted: Any, space: str) -> PlanPart | None:
        """Return the part whose nearest items answer an embedding of a space; None if more is
        needed.

        It reads memory only. An unknown space gives None.
        """


@dataclass(frozen=True, eq=False)
class RankFusion:
    """Hold what rank fusion of both models needs.

    Attributes:
        old_part: the previous model's space.
        joint_distance: weights of the two models' distances.
    """

    old_part: PlanPart
    joint_distance: JointDistance


@dataclass(frozen=True, eq=False)
class Plan:
    """Describe how a gallery is searched and written until its next plan.

    Attributes:
        parts: spaces for images, texts and complete embeddings; the first part that has an item
            answers for it.
        single_parts: by space of the query, the part that answers a query with only that embedding.
        written_releases: releases that embed each image that is put, the active one first.
        accepted_spaces: spaces in which bare embeddings may be put.
        answerer_of: makes the answerer.
        use_counter: calls that use the plan.
        canary_part: the complete space of a canary's release; None without a canary.
        epoch: counts changes of the gallery in a shared database.
        reembedded_space: the space whose migrated vectors are re-embedded when queries find them;
            None without a source, and during an upgrade.
        fusion: the previous space and its weights; None unless both models rank.
        query_manifest: the release that embeds image and text queries.
        answerer: answers searches in the mode of the plan.
    """

    parts: tuple[PlanPart, ...]
    single_parts: Mapping[str, PlanPart]
    written_releases: tuple[Manifest, ...]
    accepted_spaces: frozenset[str]
    answerer_of: InitVar["AnswererOf"]
    use_counter: PlanUseCounter
    canary_part: PlanPart | None = None
    epoch: int = 0
    reembedded_space: str | None = None
    fusion: RankFusion | None = None
    query_manifest: Manifest = field(init=False)
    answerer: Answerer = field(init=False)

    def __post_init__(self, answerer_of: "AnswererOf") -> None:
        object.__setattr__(self, "query_manifest", self.parts[0].query_manifest)
        object.__setattr__(self, "answerer", answerer_of(self))

    def searched_spaces(self) -> set[str]:
        """Return the ids of all spaces that searches use.

        It includes the spaces that only some queries by embedding search, and a canary's. The space
        of `fusion` is among the former.
        """
        on_trial = () if self.canary_part is None else (self.canary_part,)
        return {part.space for part in (*self.parts, *self.single_parts.values(), *on_trial)}

    def model_manifests(self) -> list[Manifest]:
        """Return the releases whose models the plan uses, the one that embeds queries first.

        A release may be named more than once. A canary's release is among them, because puts embed
        for it.
        """
        return [*(part.query_manifest for part in self.parts), *self.written_releases]


AnswererOf = Callable[[Plan], Answerer]


def own_part(manifest: Manifest) -> PlanPart:
    """Make the part for a release's queries in its own space.

    Each origin with a published calibration has a curve. Re-embedded vectors without one use that
    of native ones. The last of several scales counts, in the order native, upgraded, re-embedded. A
    release without calibrations gives no curves and no scale.
    """
    space, curves, scale = manifest.space, dict[Origin, Scorer](), None
    for origin in ("native", "upgraded", "re-embedded"):
        if curve := find_curve(manifest, space, space, origin):
            curves[origin] = Scorer(curve)
            scale = DistanceScale(*curve.scale) if curve.scale else scale
    # A re-embedded vector is as good as a native one.
    if "native" in curves:
        curves.setdefault("re-embedded", curves["native"])
    return PlanPart(space, manifest.release, manifest, None, curves, scale)


def direct_part(new: Manifest, old: Manifest) -> PlanPart:
    """Make a plan's part in which queries of `new` search the space of `old` (rollout direct).

    `new` must declare this space searchable, or have a query adapter to it, which its queries then
    pass. Hits have a score only if `new` publishes a calibration for them.

    Nothing is checked, and the part has no scale.
    """
    curve = find_curve(new, new.space, old.space, "direct")
    curves: dict[Origin, Scorer] = {"direct": Scorer(curve)} if curve else {}
    adapter = new.adapter_to(old.space)
    return PlanPart(old.space, old.release, new, "direct", curves, adapter=adapter)


def old_model_part(new: Manifest, old: Manifest) -> PlanPart:
    """Make a plan's part in which queries of `old` search its own space (rollout dual).

    The part is used while `new` is active and its space may lack items. Hits get the score that
    `new` publishes for them, else the one of `old` for its own vectors. Without either calibration
    they have no score.

    The part has no scale. All its hits have the origin old-model.
    """
    own = own_part(old).score_curves
    published = find_curve(new, old.space, old.space, "old-model")
    curve = Scorer(published) if published else own.get("native")
    curves: dict[Origin, Scorer] = {"old-model": curve} if curve else {}
    return PlanPart(old.space, old.release, old, "old-model", curves)


def make_plan(
    spaces: Sequence[SpaceInfo],
    state: State,
    manifests: Mapping[int, Manifest],
    answerer_of: AnswererOf,
    users: PlanUseCounter,
    rollout: FillMode | None,
    epoch: int = 0,
    *,
    has_source: bool = False,
    with_fusion: bool = False,
) -> Plan:
    """Make the plan of a gallery.

    While the active release's space may lack items, the rollouts direct and dual search two spaces.
    With cutover the old space answers until the flip.

    A previous space of a retired release is left out. A staging space that no activation fills, as
    after a rollback, is left out, too. With a canary, the new space is also embedded for and tried.
    Puts embed for the active space's release, then for previous ones in the order of `spaces`, then
    for the staging one.

    Args:
        spaces: the gallery's spaces; exactly one is active.
        state: the gateway's state.
        manifests: published releases by number.
        answerer_of: makes the plan's answerer.
        users: counts the calls that use the plan.
        rollout: rollout of the staging space; CANARY_KEY once that is complete; None without one.
        epoch: the gallery's epoch.
        has_source: items can be re-embedded from a source.
        with_fusion: the previous model helps to rank migrated items; it does so only without a
            source, a canary and a second searched space, and if the release has weights.

    Raises:
        KeyError: a space belongs to a release that `manifests` lacks; those that are left out do
            not count.
        StopIteration: no space is active.
        Exception: any error of `answerer_of`.
    """
    active = next(info.spec for info in spaces if info.state == "active")
    previous = [
        info.spec
        for info in spaces
        if info.state == "previous" and info.spec.release not in state.retired
    ]
    native = own_part(manifests[active.release])
    available = [native, *(own_part(manifests[spec.release]) for spec in previous)]
    parts: tuple[PlanPart, ...] = (native,)
    staged = _staged_part(spaces, state, manifests)
    if staged is not None:
        available.append(staged)
        if staged.query_manifest.release == state.active and rollout in ("direct", "dual"):
            make = direct_part if rollout == "direct" else old_model_part
            parts = (staged, make(staged.query_manifest, native.query_manifest))
    single_parts = {part.space: part for part in available if part is not staged}
    accepts = frozenset({*single_parts, parts[0].space})
    writes = tuple(part.query_manifest for part in available)
    on_trial = rollout == CANARY_KEY and len(parts) == 1 and _is_on_trial(state, staged)
    canary = staged if on_trial else None
    is_own_model = native.query_manifest.embedder.vectors_of is None
    heals = native.space if has_source and is_own_model and staged is None else None
    uses_both = with_fusion and len(parts) == 1 and canary is None and heals is None
    fusion = _newest_fusion(native.query_manifest, available[1:]) if uses_both else None
    return Plan(
        parts, single_parts, writes, accepts, answerer_of, users, canary, epoch, heals, fusion
    )


def _newest_fusion(new: Manifest, previous: Sequence[PlanPart]) -> RankFusion | None:
    """Return the newest previous space for which `new` has weights, by the route with the best
    quality.
    """
    for part in sorted(previous, key=lambda part: -part.release):
        routes = [route for route in new.routes if route.releases[0] == part.release]
        for route in sorted(routes, key=lambda route: -route.retention):
            if weights := route.both:
                return RankFusion(part, JointDistance(weights.new, weights.old, weights.offset))
    return None


def _is_on_trial(state: State, staged: PlanPart | None) -> bool:
    record = state.activation
    if record is None or record.canary is None or staged is None:
        return False
    return record.release != state.active and staged.query_manifest.release == record.release


def _staged_part(
    spaces: Sequence[SpaceInfo], state: State, manifests: Mapping[int, Manifest]
) -> PlanPart | None:
    """Return the part of the space that is being filled; None for one that a rollback left."""
    releases = {state.active, state.activation.release if state.activation else None}
    for info in spaces:
        if info.state == "staging" and info.spec.release in releases:
            return own_part(manifests[info.spec.release])
    return None
