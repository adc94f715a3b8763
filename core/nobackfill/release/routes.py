"""Routes: which upgrades lead a gallery from one release's space to another's.

An upgrade M->N is an edge of a graph without cycles (M < N always). A route is direct (1->3) or
chained (1->2->3); which is better is measured when a release is published (RouteEvidence).
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nobackfill.errors import InvalidInputError, NotFoundError, few
from nobackfill.release.manifest import Manifest, SpaceId, Upgrade
from nobackfill.release.models import Files, Upgraded, UpgradeModel, open_upgrade
from nobackfill.vectors import Vectors

Steps = tuple[tuple[Manifest, Upgrade], ...]
# Releases on the way, source first.
Chain = tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """Upgrades in order, each with the manifest that published it; empty where nothing is to do.

    `kept` is the share of new/new mAP that is left, None where nobody knows; `measured`: from end
    to end, not as a product of its measured parts.
    """

    steps: Steps
    kept: float | None
    measured: bool

    @property
    def releases(self) -> Chain:
        """Releases on the way, source first; empty for an empty route."""
        if not self.steps:
            return ()
        return (self.steps[0][1].from_release, *(manifest.release for manifest, _ in self.steps))

    @property
    def reads_side(self) -> bool:
        """Whether only items with side-information of their own can go this way: the one rule,
        which galleries, devices, gateways and the gate ask.

        A later step reads it too, where the steps before have carried it; a step that maps makes
        new side-information for every item, and one that drops leaves none to read.
        """
        for _, upgrade in self.steps:
            if upgrade.reads_side:
                return True
            if upgrade.side != "carries":
                return False
        return False

    @property
    def quantised(self) -> bool:
        """Whether a step has an int8 twin."""
        return any(upgrade.int8_file is not None for _, upgrade in self.steps)


# Where nothing is to do.
_STAY = Route((), 1.0, True)


def route_along(manifests: Mapping[int, Manifest], releases: Chain) -> Route:
    """The route whose releases are named, source first; empty for one release.

    Raises NotFoundError where an upgrade on the way does not exist.
    """
    steps = []
    for source, target in itertools.pairwise(releases):
        manifest = manifests.get(target)
        upgrade = None if manifest is None else manifest.upgrade_from(source)
        if manifest is None or upgrade is None:
            raise NotFoundError(f"no upgrade leads from release {source} to release {target}")
        steps.append((manifest, upgrade))
    return _route(tuple(steps), kept_by_chain(manifests)) if steps else _STAY


def plan_route(
    manifests: Mapping[int, Manifest],
    from_release: int,
    to_release: int,
    side: str | None,
    *,
    directly: SpaceId | None = None,
) -> Route | None:
    """The best route, or None if there is none. A gallery can be taken over exactly where there is
    one: devices, gateways and the report ask here.

    `manifests` are the releases that may be used; the source's own may be missing. Best is the
    largest share kept, measurements and products of parts alike; routes of unknown quality
    come last; then the fewest steps. `side` is the space of the side-information at hand, None for
    none; `directly`, the space of vectors that may stay as they are: where no upgrade leads on and
    the target searches it directly, the route is empty. Raises NotFoundError if `to_release` is not
    among them.
    """
    if to_release not in manifests:
        raise NotFoundError(
            f"release {to_release} is not known; known: "
            f"{few(sorted(manifests, reverse=True)) or 'none'}"
        )
    if from_release == to_release:
        return _STAY
    search = _Search(manifests, from_release, to_release)
    found = search.best(side, measured=True) or search.best(side, measured=False)
    target = manifests[to_release]
    if found is None and directly is not None and target.searches(directly):
        kept = target.kept_directly(from_release)
        return Route((), kept, kept is not None)
    return found


def every_route(
    manifests: Mapping[int, Manifest], from_release: int, to_release: int, side: str | None
) -> Iterator[Route]:
    """All routes whose upgrades find the side-information that they read, the shortest first.

    There can be exponentially many: take some, and leave the choice of one to `plan_route`.
    """
    kept = kept_by_chain(manifests)
    begun: deque[tuple[int, Steps, str | None]] = deque([(from_release, (), side)])
    while begun:
        at, steps, held = begun.popleft()
        for step, then in _steps(manifests, at, to_release, held):
            if step[0].release == to_release:
                yield _route((*steps, step), kept)
            else:
                begun.append((step[0].release, (*steps, step), then))


def kept_by_chain(manifests: Mapping[int, Manifest]) -> dict[Chain, float]:
    """The share kept that was measured for each chain of releases, direct or longer."""
    kept: dict[Chain, float] = {}
    for manifest in manifests.values():
        for route in manifest.routes:
            kept.setdefault(route.releases, route.kept)
    return kept


class RouteRunner:
    """The models of a route, run one after the other. Made by `open_route`."""

    def __init__(self, models: tuple[UpgradeModel, ...], *, reads_side: bool) -> None:
        self._models = models
        # As Route.reads_side says.
        self.reads_side = reads_side

    def run(self, embedding: Vectors, side: Vectors | None) -> Upgraded:
        """Embeddings [n,from_dim] and their side-information into the target's space.

        Uncertainties of the steps add up, like the variances they stand for. Raises like
        UpgradeModel.run.
        """
        uncertainty: Vectors | None = None
        for model in self._models:
            step = model.run(embedding, side)
            embedding, side = step.embedding, step.side
            if step.uncertainty is not None:
                uncertainty = (
                    step.uncertainty if uncertainty is None else uncertainty + step.uncertainty
                )
        return Upgraded(embedding, side, uncertainty)


def open_route(files: Files, route: Route, threads: int = 1, *, int8: bool = False) -> RouteRunner:
    """Load a route's models on the CPU, with `int8` the quantised twin of each that has one.

    Raises VerificationError; InvalidInputError for an empty route.
    """
    if not route.steps:
        raise InvalidInputError("expected a route with at least one upgrade")
    models = tuple(
        open_upgrade(
            files, manifest, upgrade, int8=int8 and upgrade.int8_file is not None, threads=threads
        )
        for manifest, upgrade in route.steps
    )
    return RouteRunner(models, reads_side=route.reads_side)


def _steps(
    manifests: Mapping[int, Manifest], at: int, to: int, side: str | None
) -> Iterator[tuple[tuple[Manifest, Upgrade], str | None]]:
    """The upgrades out of release `at` that find what they read, each with the space of the
    side-information after it, by the release they lead to."""
    source = manifests.get(at)
    for number in sorted(manifests):
        manifest = manifests[number]
        upgrade = manifest.upgrade_from(at) if at < number <= to else None
        if upgrade is None or (source is not None and source.space != upgrade.from_space):
            continue
        if upgrade.reads_side and upgrade.from_side_space != side:
            continue
        after = {"maps": manifest.side_space, "carries": side, "drops": None}
        yield (manifest, upgrade), after[upgrade.side]


def _route(steps: Steps, kept: Mapping[Chain, float]) -> Route:
    chain = (steps[0][1].from_release, *(manifest.release for manifest, _ in steps))
    if chain in kept:
        return Route(steps, kept[chain], True)
    product = 1.0
    for pair in itertools.pairwise(chain):
        if pair not in kept:
            return Route(steps, None, False)
        product *= kept[pair]
    return Route(steps, product, False)


class _Way(NamedTuple):
    """The beginning of a route: what is kept so far, None where a part was not measured."""

    chain: Chain
    steps: Steps
    side: str | None
    kept: float | None


class _Search:
    """Dynamic programming over releases: of all beginnings that lead to one release with the same
    side-information, only the best can be part of the best route. Beginnings of chains that were
    measured whole are kept apart, as their product says nothing of their end."""

    def __init__(self, manifests: Mapping[int, Manifest], start: int, end: int) -> None:
        self._manifests = manifests
        self._start, self._end = start, end
        self._kept = kept_by_chain(manifests)
        whole = (chain for chain in self._kept if (chain[0], chain[-1]) == (start, end))
        self._begun = {chain[:n] for chain in whole for n in range(1, len(chain))} - {(start, end)}

    def best(self, side: str | None, *, measured: bool) -> Route | None:
        """The route that keeps most of those that were `measured`, whole or in parts; else, of all
        routes, the shortest. Ties go to the shorter one, then to the older releases."""

        def rank(way: _Way) -> tuple[float, int, Chain]:
            return -(way.kept or 0) if measured else 0, len(way.chain), way.chain

        ways: dict[int, dict[tuple[str | None, Chain | None], _Way]] = {
            self._start: {(side, None): _Way((self._start,), (), side, 1.0)}
        }
        for release in sorted({self._start, *self._manifests}):
            if release == self._end:
                break
            for way in ways.pop(release, {}).values():
                for further in self._onward(way):
                    apart = measured and further.chain in self._begun
                    if measured and further.kept is None and not apart:
                        continue
                    rivals = ways.setdefault(further.chain[-1], {})
                    key = (further.side, further.chain if apart else None)
                    rivals[key] = min(further, rivals.get(key, further), key=rank)
        best = min(ways.get(self._end, {}).values(), key=rank, default=None)
        return None if best is None else _route(best.steps, self._kept)

    def _onward(self, way: _Way) -> Iterator[_Way]:
        for step, side in _steps(self._manifests, way.chain[-1], self._end, way.side):
            chain = (*way.chain, step[0].release)
            part = self._kept.get(chain[-2:])
            kept = None if part is None or way.kept is None else way.kept * part
            if chain[-1] == self._end:
                kept = self._kept.get(chain, kept)
            yield _Way(chain, (*way.steps, step), side, kept)


def twin_of(manifest: Manifest, others: Iterable[Manifest]) -> str | None:
    """Why a release cannot be used beside `others`: one has its space; None if none has.

    What is stored of a space is one release's: the older keeps it.
    """
    for other in others:
        if other.space == manifest.space and other.release < manifest.release:
            return (
                f"release {manifest.release} has the space of release {other.release}; no two may "
                "share one: publish a changed embedder"
            )
    return None
