"""Measure search quality by the values of a metadata key, to find items that an upgrade serves
worse.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nobackfill.errors import InvalidInputError, ReleaseRetiredError
from nobackfill.gallery.listing import MetadataGroup
from nobackfill.gallery.spec import MetadataValue
from nobackfill.server.galleries.answering import GallerySearcher
from nobackfill.server.galleries.hosted import HostedGallery
from nobackfill.server.galleries.plan import Plan

# Items used as queries, divided evenly among the groups; more groups than this are refused.
_PROBES = 2000
_MAX_GROUPS = 200
_BATCH = 64


@dataclass(frozen=True)
class Subgroup:
    """Report the quality for one value.

    Attributes:
        value: the value.
        item_count: items that have it.
        re_embedded_count: items among them that were re-embedded.
        probe_count: items among them that were used as queries.
        cmc1: share of probes whose nearest other item has the value, 0 to 1; None without a probe.
        old_space_cmc1: `cmc1` in the previous release's space; None without such a space, a probe,
            or once queries of that space have ended.
    """

    value: MetadataValue
    item_count: int
    re_embedded_count: int
    probe_count: int
    cmc1: float | None
    old_space_cmc1: float | None


# An item's vectors as bytes, by space.
_Query = Mapping[str, bytes]


def measure_subgroups(
    hosted: HostedGallery, searching: GallerySearcher, key: str
) -> list[Subgroup]:
    """Measure the quality for every value of a key, the worst first.

    Probes are stored vectors, about 2000 in total, at equal distances in each group. They are
    searched like queries by embedding, through the gallery's plan. An item is a probe only if it
    has a vector in each searched space. Values of fewer than two items have no probes, and come
    last. An item with a list has each of its texts. Equal qualities keep the order of
    `group_by_value`. It takes seconds.

    Args:
        hosted: the gallery.
        searching: answers the queries.
        key: the metadata key.

    Raises:
        InvalidInputError: no item has the key, or it has more than 200 values.
        DeadlineError: the call's time is over.
        CancelledError: the caller has cancelled the call.
        IncompatibleSpaceError: a space was deleted meanwhile.
        NotFoundError: the gallery was deleted.
        BusyError, UnavailableError: the store is busy, or does not answer.
        VerificationError: the store is damaged.
        CannotWriteError: the file cannot be opened, or the disk fails.
        NeedsImageError: the plan has changed meanwhile, and needs a vector of another space.
        ConfigurationError: the database refuses the statement, as without rights.
    """
    plan = hosted.plan
    groups = hosted.store.group_by_value(key, plan.query_manifest.space)
    if not 0 < len(groups) <= _MAX_GROUPS:
        raise InvalidInputError(
            f"metadata key {key[:64]!r} has {len(groups)} values in gallery {hosted.name!r}; "
            f"expected a key with 1 to {_MAX_GROUPS} values; name another key"
        )
    measurement = _Measurement(hosted, searching, key, plan, _PROBES // len(groups))
    measured = [measurement.group(group) for group in groups]
    return sorted(measured, key=lambda group: 2.0 if group.cmc1 is None else group.cmc1)


class _Measurement:
    """Measure one gallery, with at most `most` probes for each group."""

    def __init__(
        self, hosted: HostedGallery, searching: GallerySearcher, key: str, plan: Plan, limit: int
    ) -> None:
        self._hosted = hosted
        self._searching = searching
        self._key = key
        self._limit = limit
        self._present = {part.query_manifest.space for part in plan.parts}
        # The newest older release whose space is kept.
        older = {
            part.release: space
            for space, part in plan.single_parts.items()
            if part.release < plan.query_manifest.release
        }
        self._previous = {older[max(older)]} if older else set[str]()

    def group(self, group: MetadataGroup) -> Subgroup:
        # A group of one item has no other item to find.
        share = min(len(group.labels), self._limit) if len(group.labels) > 1 else 0
        places = np.linspace(0, len(group.labels) - 1, share).astype(int)
        probes = {}
        for label in group.labels[places].tolist():
            vectors = self._vectors(label)
            if len(vectors) == len(self._present | self._previous):
                probes[label] = vectors
        now = self._cmc1(group.value, probes, self._present)
        before = self._cmc1(group.value, probes, self._previous)
        return Subgroup(
            group.value, group.item_count, group.reembedded_count, len(probes), now, before
        )

    def _vectors(self, label: int) -> _Query:
        """Return an item's vectors in the searched spaces."""
        stored = {
            space: self._hosted.store.vector(label, space)
            for space in self._present | self._previous
        }
        return {
            space: vector.astype("<f4").tobytes()
            for space, vector in stored.items()
            if vector is not None
        }

    def _cmc1(
        self, value: MetadataValue, probes: Mapping[int, _Query], spaces: set[str]
    ) -> float | None:
        """Return the share of probes whose nearest other item has the value."""
        if not probes or not spaces:
            return None
        labels = list(probes)
        queries = [{space: probes[label][space] for space in spaces} for label in labels]
        correct = 0
        for start in range(0, len(labels), _BATCH):
            batch = slice(start, start + _BATCH)
            try:
                answers = self._searching.search_batch(
                    self._hosted, queries[batch], 2, None, may_reembed=False
                )
            except ReleaseRetiredError:
                return None
            for label, answer in zip(labels[batch], answers, strict=True):
                if isinstance(answer, InvalidInputError):
                    raise answer
                others = [hit.item for hit in answer.hits if hit.item.label != label]
                correct += bool(others) and _has_value(others[0].metadata.get(self._key), value)
        return correct / len(labels)


def _has_value(present: MetadataValue | None, value: MetadataValue) -> bool:
    """Tell whether an item belongs to the group of a value: a list belongs to that of each text.

    Numbers and flags are different values, although True == 1.
    """
    values = [present] if present is None or isinstance(present, str | int | float) else present
    return any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in values)
