"""Hits as the bytes of their messages: what a hit says of its item is made once, and its distance
and score are put between."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from nobackfill.gallery.store import Item
from nobackfill.server.galleries.ranking import Score
from nobackfill.v1 import search_pb2 as pb
from nobackfill.v1 import types_pb2 as types
from nobackfill.wire.values import ORIGINS, fill_value

# Fields 2 and 3 of Hit, each a tag and a float: a distance is written even where it is 0.
_DISTANCE, _SCORED = struct.Struct("<Bf"), struct.Struct("<BfBf")
_DISTANCE_TAG, _SCORE_TAG = 0x15, 0x1D
# Field 7 of Hit, set.
_BEYOND = b"\x38\x01"
# Field 1 of SearchResponse, with a length.
_HITS_TAG = b"\x0a"


class HitBytes(NamedTuple):
    """One item's hit in one space: `scored`, or `plain` without a score, then distance and score,
    then `rest`. `origin` as the wire names it. `beyond`: in place of `scored` where the hit lies
    beyond the calibration, which it ends with."""

    scored: bytes
    plain: bytes
    rest: bytes
    origin: types.Origin
    beyond: bytes


def hit_bytes(item: Item, release: int) -> HitBytes | None:
    """Of an item whose vector `release` made; None if it has no vector now."""
    if item.origin is None:
        return None
    head = pb.Hit(id=item.id).SerializeToString()
    message = pb.Hit(release=release, origin=ORIGINS[item.origin])
    for key, value in item.metadata.items():
        fill_value(value, message.metadata[key])
    # Fields come in the order of their numbers, so that a parser meets what it expects.
    rest = message.SerializeToString(deterministic=True)
    size = len(head) + len(rest)
    return HitBytes(
        _HITS_TAG + _varint(size + _SCORED.size) + head,
        _HITS_TAG + _varint(size + _DISTANCE.size) + head,
        rest,
        ORIGINS[item.origin],
        _HITS_TAG + _varint(size + _SCORED.size + len(_BEYOND)) + head,
    )


def joined(
    hits: Sequence[HitBytes], distances: Sequence[float], scores: Sequence[Score | None]
) -> bytes:
    """`hits` of a SearchResponse, in this order."""
    parts: list[bytes] = []
    for hit, distance, score in zip(hits, distances, scores, strict=True):
        if score is None:
            parts += (hit.plain, _DISTANCE.pack(_DISTANCE_TAG, distance), hit.rest)
        else:
            told = _SCORED.pack(_DISTANCE_TAG, distance, _SCORE_TAG, score.value)
            if score.beyond:
                parts += (hit.beyond, told, hit.rest, _BEYOND)
            else:
                parts += (hit.scored, told, hit.rest)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    """Of a length, as protobuf writes it."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
