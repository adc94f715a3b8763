"""Routes: which upgrades lead a gallery from one release's space to another's.

An upgrade M->N is an edge of a graph without cycles (M < N always). A route is direct (1->3) or
chained (1->2->3); which is better is measured when a release is published (RouteEvidence).
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from release.errors import InvalidInputError, NotFoundError
from release.manifest import Manifest, Upgrade
from release.models import Files, Upgraded, UpgradeModel, open_upgrade
from release.vectors import Vectors


@dataclass(frozen=True)
class Route:
    """Upgrades in order, each with the manifest that published it; empty where nothing is to do.

    `kept` is the share of new/new mAP that is left, None where nobody knows; `measured` tells a
    measurement of the whole route from a product of its measured parts.
    """

    steps: tuple[tuple[Manifest, Upgrade], ...]
    kept: float | None
    measured: bool

    @property
    def releases(self) -> tuple[int, ...]:
        """Releases on the way, source first; empty for an empty route."""
        if not self.steps:
            return ()
        return (self.steps[0][1].from_release, *(manifest.release for manifest, _ in self.steps))


def plan_route(
    manifests: Mapping[int, Manifest], from_release: int, to_release: int, has_side: bool
) -> Route | None:
    """The best route, or None if there is none.

    `manifests` are the releases that may be used; the source's own may be missing. Best is the
    largest share kept, whole measurements and products of parts alike; routes of unknown quality
    come last; then the fewest steps. `has_side` says whether side-information of `from_release` is
    at hand. Raises NotFoundError if `to_release` is not among them.
    """
    if to_release not in manifests:
        raise NotFoundError(f"release {to_release} is not known; known: {sorted(manifests)}")
    if from_release == to_release:
        return Route((), 1.0, True)
    source = manifests.get(from_release)
    side_space = source.side_space if source is not None and has_side else None
    known = source is not None or not has_side
    routes = [
        Route(steps, *_kept(manifests, steps))
        for steps in _paths(manifests, from_release, to_release, side_space, known)
    ]
    return min(routes, key=lambda r: (r.kept is None, -(r.kept or 0), len(r.steps)), default=None)


class RouteRunner:
    """The models of a route, run one after the other. Made by `open_route`."""

    def __init__(self, models: tuple[UpgradeModel, ...]) -> None:
        self._models = models

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
    return RouteRunner(
        tuple(
            open_upgrade(
                files,
                manifest,
                upgrade,
                int8=int8 and upgrade.int8_file is not None,
                threads=threads,
            )
            for manifest, upgrade in route.steps
        )
    )


_Steps = tuple[tuple[Manifest, Upgrade], ...]


def _paths(
    manifests: Mapping[int, Manifest], at: int, to: int, side_space: str | None, known: bool
) -> Iterator[_Steps]:
    """Every way from `at` to `to` whose upgrades find the side-information that they read.

    `known` is False where side-information is there but nobody can tell its space.
    """
    for number in sorted(manifests):
        upgrade = manifests[number].upgrade_from(at) if at < number <= to else None
        if upgrade is None or not _fits(manifests, upgrade, side_space, known):
            continue
        step = (manifests[number], upgrade)
        if number == to:
            yield (step,)
            continue
        if upgrade.side == "maps":
            rest = _paths(manifests, number, to, manifests[number].side_space, True)
        elif upgrade.side == "carries":
            rest = _paths(manifests, number, to, side_space, known)
        else:
            rest = _paths(manifests, number, to, None, True)
        for further in rest:
            yield (step, *further)


def _fits(
    manifests: Mapping[int, Manifest], upgrade: Upgrade, side_space: str | None, known: bool
) -> bool:
    source = manifests.get(upgrade.from_release)
    if source is not None and source.space != upgrade.from_space:
        return False
    if upgrade.from_side_space is None or not known:
        return True
    return upgrade.from_side_space == side_space


def _kept(manifests: Mapping[int, Manifest], steps: _Steps) -> tuple[float | None, bool]:
    chain = (steps[0][1].from_release, *(manifest.release for manifest, _ in steps))
    whole = _measured(manifests, chain)
    if whole is not None:
        return whole, True
    product = 1.0
    for pair in itertools.pairwise(chain):
        part = _measured(manifests, pair)
        if part is None:
            return None, False
        product *= part
    return product, False


def _measured(manifests: Mapping[int, Manifest], chain: tuple[int, ...]) -> float | None:
    evidence = manifests[chain[-1]].routes
    return next((route.kept for route in evidence if route.releases == chain), None)
