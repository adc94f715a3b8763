"""How a gallery is ranked by two models, fitted on relevance, and the file that keeps it."""

import io
import json
from dataclasses import astuple
from pathlib import Path
from typing import get_args

import numpy as np

from nobackfill.adopt.maps import read_arrays, written_by
from nobackfill.durable import write_file
from nobackfill.metrics.distances import Metric
from nobackfill.serving.fusion import Block, Joining, OddsLine
from nobackfill.vectors import check_vectors

# Formats of the file: format 2 keeps no share, format 4 names another metric than cosine.
FORMAT, OTHERWISE, FORMATS = 3, 4, (2, 3, 4)
# Values of the many that are no match on which a line is fitted.
_MOST_OTHERS = 200_000
_ROUNDS = 30


def fit_line(matches: Block, rest: Block, seed: int = 0) -> OddsLine:
    """Logistic regression on the nearness of matches [m, 1] and of all else [n, 1], by Newton's
    method; [m, 2] and [n, 2] with their nearness as carried items.

    Among all items, so that lines of two origins speak of the same odds; of the rest, 200,000 drawn
    by `seed` stand for all.
    """
    count = matches.shape[1]
    if not len(matches) or not len(rest):
        return OddsLine()
    weight, others = 1.0, rest
    if len(rest) > _MOST_OTHERS:
        weight = len(rest) / _MOST_OTHERS
        others = rest[np.random.default_rng(seed).choice(len(rest), _MOST_OTHERS, replace=False)]
    x = np.concatenate([matches, others]).astype(np.float64)
    rows = np.concatenate([x, np.ones((len(x), 1))], 1)
    truth = np.arange(len(x)) < len(matches)
    weights = np.where(truth, 1.0, weight)
    # A slope of 1 is expected with a deviation of 10: perfect separation has no other end.
    prior, precision = np.eye(count + 1)[0], np.array([*[0.01] * count, 1e-9])
    line = prior + np.eye(count + 1)[-1] * np.log(len(matches) / len(rest))
    for _ in range(_ROUNDS):
        odds = 1 / (1 + np.exp(-np.clip(rows @ line, -30, 30)))
        slope = rows.T @ (weights * (truth - odds)) - precision * (line - prior)
        curve = (rows * (weights * odds * (1 - odds))[:, None]).T @ rows + np.diag(precision)
        step = np.linalg.solve(curve, slope)
        line = line + step * min(1.0, 4.0 / max(1e-12, float(np.abs(step).max())))
        if np.abs(step).max() < 1e-6:
            break
    # A nearer item is never less likely.
    found = OddsLine(
        max(1e-3, float(line[0])), float(line[-1]), float(line[1]) if count == 2 else 0.0
    )
    return found if found.share >= 0 else fit_line(matches[:, :1], rest[:, :1], seed)


def save_joining(path: Path, found: Joining) -> None:
    """Write it as arrays and a line of JSON. Raises CannotWriteError."""
    lines = {name: [line.slope, line.intercept, line.share] for name, line in _lines(found)}
    header = {"format": FORMAT, "weight": found.weight, "mark": found.mark, **lines}
    if found.metric != "cosine":
        header |= {"format": OTHERWISE, "metric": found.metric}
    buffer = io.BytesIO()
    text = np.array(json.dumps(header, sort_keys=True))
    np.savez(
        buffer, header=text, old=found.old, carried=found.carried, new=found.new, crowd=found.crowd
    )
    write_file(path, buffer.getvalue(), 0o600)


def load_joining(path: Path) -> Joining:
    """Read what `save_joining` wrote. Raises NotFoundError, InvalidInputError for another file."""
    with written_by(path, "nobackfill fit --joining"):
        header, arrays = read_arrays(path)
        if header["format"] not in FORMATS:
            raise ValueError(f"format {header['format']}")
        old, carried, new, crowd = (
            check_vectors(arrays[name], arrays[name].shape[1], what=name)
            for name in ("old", "carried", "new", "crowd")
        )
        if not len(old) == len(carried) == len(new) > 0 or 0 in (old.shape[1], new.shape[1]):
            raise ValueError(f"anchors {old.shape}, {carried.shape} and {new.shape}")
        if carried.shape != new.shape or (len(crowd) and crowd.shape[1] != new.shape[1]):
            raise ValueError(f"vectors of dimensions {carried.shape}, {new.shape}, {crowd.shape}")
        joined, native = (OddsLine(*map(float, header[name])) for name in ("joined", "native"))
        weight, metric = float(header["weight"]), header.get("metric", "cosine")
        numbers = (weight, *astuple(joined), *astuple(native))
        if metric not in get_args(Metric) or not np.isfinite(numbers).all():
            raise ValueError(f"metric {metric!r}, numbers {numbers}")
        return Joining(
            weight, joined, native, old, carried, new, str(header["mark"]), crowd, metric
        )


def _lines(found: Joining) -> list[tuple[str, OddsLine]]:
    return [("joined", found.joined), ("native", found.native)]
