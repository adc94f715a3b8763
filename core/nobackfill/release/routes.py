"""Find the upgrades that lead a gallery from one release's space to another's.

Upgrades M->N are the edges of a graph without cycles, since M < N. A route is direct (1->3) or
chained (1->2->3). Publishing measures which is better (RouteEvidence).
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nobackfill.errors import InvalidInputError, NotFoundError, join_few
from nobackfill.release.manifest import Manifest, SpaceId, Upgrade
from nobackfill.release.models import Files, Upgraded, UpgradeModel, open_upgrade
from nobackfill.vectors import Vectors

Steps = tuple[tuple[Manifest, Upgrade], ...]
# Releases of a route, source first.
Chain = tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """Upgrades in order, each with the manifest that published it.

    Attributes:
        steps: Empty if nothing has to be done.
        retention: Share of new/new mAP that is preserved; None if it is unknown.
        is_measured_end_to_end: Whether `retention` was measured end to end. Otherwise it is the
            product of measured parts.
    """

    steps: Steps
    retention: float | None
    is_measured_end_to_end: bool

    @property
    def releases(self) -> Chain:
        """Return the releases of the route, source first; empty for an empty route."""
        if not self.steps:
            return ()
        return (self.steps[0][1].from_release, *(manifest.release for manifest, _ in self.steps))

    @property
    def reads_side(self) -> bool:
        """Tell whether only items with side-information can take this route.

        Galleries, devices, gateways and the gate all use this rule. A later step may read
        side-information that earlier steps carry. A step that maps makes new side-information for
        every item, and a step that drops leaves none. An empty route reads none.
        """
        for _, upgrade in self.steps:
            if upgrade.reads_side:
                return True
            if upgrade.side != "carries":
                return False
        return False

    @property
    def has_int8(self) -> bool:
        """Tell whether a step of the route has an int8 twin; False for an empty route."""
        return any(upgrade.int8_file is not None for _, upgrade in self.steps)


# The route of a gallery that stays.
_STAY = Route((), 1.0, True)


def route_along(manifests: Mapping[int, Manifest], chain: Chain) -> Route:
    """Return the route through given releases.

    Args:
        manifests: The releases that may be used.
        chain: Source first. One release or none gives an empty route with retention 1, without a
            look at `manifests`. Whether the spaces of the steps fit is not checked. Whether items
            have the side-information that it reads is not checked.

    Raises:
        NotFoundError: An upgrade of the route, or the release that would publish it, is not among
            the manifests.
    """
    steps = []
    for source, target in itertools.pairwise(chain):
        manifest = manifests.get(target)
        upgrade = None if manifest is None else manifest.upgrade_from(source)
        if manifest is None or upgrade is None:
            raise NotFoundError(
                f"no published upgrade leads from release {source} to release {target}; use "
                "another route, or publish such an upgrade"
            )
        steps.append((manifest, upgrade))
    return _route(tuple(steps), retention_by_chain(manifests)) if steps else _STAY


def plan_route(
    manifests: Mapping[int, Manifest],
    from_release: int,
    to_release: int,
    side_space: str | None,
    *,
    direct_search_space: SpaceId | None = None,
) -> Route | None:
    """Find the best route from one release to another.

    The best route keeps the largest share of mAP, whether measured or a product of parts. Routes of
    unknown quality come last; then fewer steps win, then older releases. A gallery can be migrated
    if and only if this returns a route.

    Args:
        manifests: The releases that may be used; the source may be missing, and its upgrades count
            then, whatever their space. An upgrade from a source of another space is passed over.
        from_release: The source.
        to_release: The target.
        side_space: Space of the stored side-information; None without any.
        direct_search_space: Space of the stored vectors, if they may stay: without upgrades, the
            route is empty if the target can search this space directly. None: they may not stay.

    Returns:
        None if there is no route, also to an older release. The same release twice gives an empty
        route with retention 1.

    Raises:
        NotFoundError: `to_release` is not among the manifests.
    """
    if to_release not in manifests:
        raise NotFoundError(
            f"release {to_release} is not among the published releases "
            f"({join_few(sorted(manifests, reverse=True)) or 'there are none'}); name one of these"
        )
    if from_release == to_release:
        return _STAY
    search = _Search(manifests, from_release, to_release)
    route = search.best(side_space, by_retention=True) or search.best(
        side_space, by_retention=False
    )
    target = manifests[to_release]
    if (
        route is None
        and direct_search_space is not None
        and target.searches_space_directly(direct_search_space)
    ):
        retention = target.direct_retention(from_release)
        return Route((), retention, retention is not None)
    return route


def iterate_routes(
    manifests: Mapping[int, Manifest], from_release: int, to_release: int, side_space: str | None
) -> Iterator[Route]:
    """Yield all routes whose upgrades have the side-information that they read, the shortest first.

    There can be exponentially many: take only a few. Use `plan_route` to choose one. Equally long
    routes come in the order of their releases. An upgrade from a source of another space is passed
    over.

    Args:
        manifests: The releases that may be used; the source may be missing.
        from_release: The source.
        to_release: The target.
        side_space: Space of the stored side-information; None without any.

    Yields:
        Routes with at least one step, each once; none if `to_release` is unknown or not newer.
    """
    retention = retention_by_chain(manifests)
    queue: deque[tuple[int, Steps, str | None]] = deque([(from_release, (), side_space)])
    while queue:
        release, steps, side_space = queue.popleft()
        for step, next_side in _steps(manifests, release, to_release, side_space):
            if step[0].release == to_release:
                yield _route((*steps, step), retention)
            else:
                queue.append((step[0].release, (*steps, step), next_side))


def retention_by_chain(manifests: Mapping[int, Manifest]) -> dict[Chain, float]:
    """Return the measured share of mAP of each chain of releases, direct or longer. Empty without
    evidence.

    If several manifests measured one chain, the first in the mapping counts.
    """
    retention: dict[Chain, float] = {}
    for manifest in manifests.values():
        for route in manifest.routes:
            retention.setdefault(route.releases, route.retention)
    return retention


class RouteRunner:
    """The models of a route, run one after the other; opened by `open_route`.

    Attributes:
        reads_side: See Route.reads_side.
    """

    def __init__(self, models: tuple[UpgradeModel, ...], *, reads_side: bool) -> None:
        self._models = models
        self.reads_side = reads_side

    def run(self, embedding: Vectors, side: Vectors | None) -> Upgraded:
        """Upgrade embeddings along the route.

        All n rows pass each step in one call, so memory grows with n. Threads may call it at the
        same time.

        Args:
            embedding: float32 or float64 [n, from_dim], n at least 1.
            side: Side-information, float32 [n, from_side_dim]; None allowed if the route does not
                read it.

        Returns:
            n rows in the order of `embedding`. `side_information` is that of the last step. The
            uncertainties of the steps are added, like the variances that they stand for; None if no
            step predicts any.

        Raises:
            InvalidInputError: Another shape or dtype, a value that is not finite
                (UnusableRowsError, which lists the rows), or missing side-information.
            VerificationError: onnxruntime cannot run a step, its output has another shape, or an
                uncertainty is not finite.
            UnusableOutputError: Some outputs are no vectors of a step's space; the error lists the
                rows.
        """
        uncertainty: Vectors | None = None
        for model in self._models:
            step = model.run(embedding, side)
            embedding, side = step.embedding, step.side_information
            if step.uncertainty is not None:
                uncertainty = (
                    step.uncertainty if uncertainty is None else uncertainty + step.uncertainty
                )
        return Upgraded(embedding, side, uncertainty)


def open_route(files: Files, route: Route, threads: int = 1, *, int8: bool = False) -> RouteRunner:
    """Load the models of a route on the CPU.

    Nothing needs to be closed.

    Args:
        files: The publication folder or the draft's files.
        route: The route.
        threads: Threads of each session, at least 1.
        int8: Use the quantised twin of each step that has one; float32 for the others.

    Raises:
        VerificationError: A file is missing, cannot be read, differs from its manifest's, or cannot
            be loaded.
        InvalidInputError: The route is empty.
    """
    if not route.steps:
        raise InvalidInputError(
            "route: expected at least one upgrade, got none; without an upgrade, leave the "
            "vectors as they are"
        )
    models = tuple(
        open_upgrade(
            files, manifest, upgrade, int8=int8 and upgrade.int8_file is not None, threads=threads
        )
        for manifest, upgrade in route.steps
    )
    return RouteRunner(models, reads_side=route.reads_side)


def _steps(
    manifests: Mapping[int, Manifest], release: int, last: int, side: str | None
) -> Iterator[tuple[tuple[Manifest, Upgrade], str | None]]:
    """Yield the upgrades out of a release that have the side-information that they read.

    Each comes with the space of the side-information after it. The order is by target release.
    """
    source = manifests.get(release)
    for number in sorted(manifests):
        manifest = manifests[number]
        upgrade = manifest.upgrade_from(release) if release < number <= last else None
        if upgrade is None or (source is not None and source.space != upgrade.from_space):
            continue
        if upgrade.reads_side and upgrade.from_side_space != side:
            continue
        side_after = {"maps": manifest.side_space, "carries": side, "drops": None}
        yield (manifest, upgrade), side_after[upgrade.side]


def _route(steps: Steps, retention: Mapping[Chain, float]) -> Route:
    chain = (steps[0][1].from_release, *(manifest.release for manifest, _ in steps))
    if chain in retention:
        return Route(steps, retention[chain], True)
    product = 1.0
    for pair in itertools.pairwise(chain):
        if pair not in retention:
            return Route(steps, None, False)
        product *= retention[pair]
    return Route(steps, product, False)


class _Way(NamedTuple):
    """The beginning of a route; `retention` is None where a part was not measured."""

    chain: Chain
    steps: Steps
    side: str | None
    retention: float | None


class _Search:
    """Dynamic programming over releases.

    Among beginnings that reach one release with the same side-information, only the best can be
    part of the best route. Beginnings of chains that were measured end to end are tracked
    separately, since their product does not predict the measured end.
    """

    def __init__(self, manifests: Mapping[int, Manifest], start: int, end: int) -> None:
        self._manifests = manifests
        self._start, self._end = start, end
        self._retention = retention_by_chain(manifests)
        end_to_end = (chain for chain in self._retention if (chain[0], chain[-1]) == (start, end))
        self._prefixes = {chain[:n] for chain in end_to_end for n in range(1, len(chain))} - {
            (start, end)
        }

    def best(self, side: str | None, *, by_retention: bool) -> Route | None:
        """Return the best route.

        Args:
            side: Space of the stored side-information.
            by_retention: Consider only routes that are measured, end to end or in parts, and take
                the one with the largest retention. Otherwise take the shortest. Ties go to the
                shorter route, then to older releases.

        Returns:
            None if no such route leads to the target.
        """

        def rank(way: _Way) -> tuple[float, int, Chain]:
            return -(way.retention or 0) if by_retention else 0, len(way.chain), way.chain

        ways: dict[int, dict[tuple[str | None, Chain | None], _Way]] = {
            self._start: {(side, None): _Way((self._start,), (), side, 1.0)}
        }
        for release in sorted({self._start, *self._manifests}):
            if release == self._end:
                break
            for way in ways.pop(release, {}).values():
                for extension in self._onward(way):
                    is_prefix = by_retention and extension.chain in self._prefixes
                    if by_retention and extension.retention is None and not is_prefix:
                        continue
                    rivals = ways.setdefault(extension.chain[-1], {})
                    key = (extension.side, extension.chain if is_prefix else None)
                    rivals[key] = min(extension, rivals.get(key, extension), key=rank)
        best = min(ways.get(self._end, {}).values(), key=rank, default=None)
        return None if best is None else _route(best.steps, self._retention)

    def _onward(self, way: _Way) -> Iterator[_Way]:
        for step, side in _steps(self._manifests, way.chain[-1], self._end, way.side):
            chain = (*way.chain, step[0].release)
            part = self._retention.get(chain[-2:])
            retention = None if part is None or way.retention is None else way.retention * part
            if chain[-1] == self._end:
                retention = self._retention.get(chain, retention)
            yield _Way(chain, (*way.steps, step), side, retention)


def explain_duplicate_space(manifest: Manifest, others: Iterable[Manifest]) -> str | None:
    """Explain why a release cannot be used: an older release has the same space.

    Stored data of a space belong to one release; the older one wins.

    Args:
        manifest: The release.
        others: Other releases, older or newer, in any order; newer ones do not count.

    Returns:
        A sentence that names the first such release; None if the release may be used.
    """
    for other in others:
        if other.space == manifest.space and other.release < manifest.release:
            return (
                f"release {manifest.release} has the same space as release {other.release}, and "
                "two releases must not share a space; publish a release with a changed embedder"
            )
    return None
