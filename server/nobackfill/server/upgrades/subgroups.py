"""Whom an upgrade serves worse: search quality by the values of a metadata key, as served now."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nobackfill.errors import InvalidInputError, ReleaseRetiredError
from nobackfill.gallery.listing import MetadataGroup
from nobackfill.gallery.spec import MetadataValue
from nobackfill.server.galleries.answering import Searching
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import Plan

# Items asked as queries, shared evenly among the groups; more groups than this say nothing.
_PROBES = 2000
_MOST_GROUPS = 200
_AT_ONCE = 64


@dataclass(frozen=True)
class Subgroup:
    """The items of one value.

    `cmc1`: share of `probes` of them whose nearest other item in the gallery has the value, 0 to 1;
    None without a probe. `before`: the same of the same probes, as the release before answers them;
    None where there is none.
    """

    value: MetadataValue
    items: int
    re_embedded: int
    probes: int
    cmc1: float | None
    before: float | None


# An item's vectors as bytes, by the spaces they live in.
_Query = Mapping[str, bytes]


def subgroups(hosted: Hosted, searching: Searching, key: str) -> list[Subgroup]:
    """Every value of metadata `key`, the worst served first.

    Probes are stored vectors, searched as a query by embedding is: through the gallery's plan, with
    each item's vectors of the spaces that answer now. Raises InvalidInputError for a key that no
    item has, or with more than 200 values.
    """
    plan = hosted.plan
    groups = hosted.store.groups(key, plan.query.space)
    if not 0 < len(groups) <= _MOST_GROUPS:
        raise InvalidInputError(
            f"metadata {key[:64]!r} has {len(groups)} values in gallery {hosted.name!r}; "
            f"name one with 1 to {_MOST_GROUPS}"
        )
    measuring = _Measuring(hosted, searching, key, plan, _PROBES // len(groups))
    found = [measuring.group(group) for group in groups]
    return sorted(found, key=lambda one: 2.0 if one.cmc1 is None else one.cmc1)


class _Measuring:
    """One look at a gallery, with at most `most` probes a group."""

    def __init__(
        self, hosted: Hosted, searching: Searching, key: str, plan: Plan, most: int
    ) -> None:
        self._hosted = hosted
        self._searching = searching
        self._key = key
        self._most = most
        self._now = {part.query.space for part in plan.parts}
        # The newest release that answered before the one that does now, where it is kept.
        older = {
            part.release: space
            for space, part in plan.single_parts.items()
            if part.release < plan.query.release
        }
        self._old = {older[max(older)]} if older else set[str]()

    def group(self, group: MetadataGroup) -> Subgroup:
        # An item that is alone has no other to find.
        share = min(len(group.labels), self._most) if len(group.labels) > 1 else 0
        places = np.linspace(0, len(group.labels) - 1, share).astype(int)
        probes = {}
        for label in group.labels[places].tolist():
            vectors = self._vectors(label)
            if len(vectors) == len(self._now | self._old):
                probes[label] = vectors
        return Subgroup(
            group.value,
            group.items,
            group.re_embedded,
            len(probes),
            self._cmc1(group.value, probes, self._now),
            self._cmc1(group.value, probes, self._old),
        )

    def _vectors(self, label: int) -> _Query:
        """An item's vectors in the spaces that are asked."""
        stored = {s: self._hosted.store.vector(label, s) for s in self._now | self._old}
        return {s: v.astype("<f4").tobytes() for s, v in stored.items() if v is not None}

    def _cmc1(
        self, value: MetadataValue, probes: Mapping[int, _Query], spaces: set[str]
    ) -> float | None:
        """Share of the probes whose nearest other item has `value`, asked in `spaces`."""
        if not probes or not spaces:
            return None
        labels = list(probes)
        queries = [{space: probes[label][space] for space in spaces} for label in labels]
        right = 0
        for start in range(0, len(labels), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            try:
                answers = self._searching.batch(self._hosted, queries[some], 2, None, heal=False)
            except ReleaseRetiredError:
                return None
            for label, answer in zip(labels[some], answers, strict=True):
                if isinstance(answer, InvalidInputError):
                    raise answer
                others = [hit.item for hit in answer.hits if hit.item.label != label]
                right += bool(others) and others[0].metadata.get(self._key) == value
        return right / len(labels)
