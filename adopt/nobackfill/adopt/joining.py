"""Fit the lines of a rank fusion to matches, and save and load the file of a rank fusion.

A line turns the nearness of an item to a query into the log-odds of a match, so that items with
vectors of two origins can be ranked together.
"""

import io
import json
from dataclasses import astuple
from pathlib import Path
from typing import get_args

import numpy as np

from nobackfill.adopt.maps import name_file_in_errors, read_arrays
from nobackfill.durable import write_file
from nobackfill.metrics.distances import Metric
from nobackfill.serving.fusion import Block, FittedRankFusion, OddsLine
from nobackfill.vectors import check_vectors

# Formats of the file: 2 has no share in its lines, 4 names a metric other than cosine.
FORMAT, OTHER_METRIC_FORMAT, FORMATS = 3, 4, (2, 3, 4)
# Largest number of items without a match that a line is fitted to.
_MOST_OTHERS = 200_000
_ROUNDS = 30


def fit_odds_line(matches: Block, others: Block, seed: int = 0) -> OddsLine:
    """Fit log-odds of a match to nearness: logistic regression by Newton's method.

    The odds are those among all items, so that lines of two origins are comparable.

    All values must be finite; they are not checked.

    Args:
        matches: Nearness of the m matches to their queries, larger is nearer: float [m, 1]; or
            [m, 2] with the nearness of their migrated vectors as the second column.
        others: The same for the n items that are no match, [n, 1] or [n, 2]. A random sample of
            200,000 stands for more, with a weight.
        seed: Seed of that sample.

    Returns:
        A line whose slope is above 0 and whose share (the weight of the second column) is 0 or
        more. If `matches` or `others` is empty, the line that returns nearness unchanged. Where the
        share would be negative, the line is fitted again to the first column alone.

    Raises:
        ValueError: The two arrays have different widths, and neither is empty.
        IndexError: `matches` has one dimension.
    """
    count = matches.shape[1]
    if not len(matches) or not len(others):
        return OddsLine()
    weight, sample = 1.0, others
    if len(others) > _MOST_OTHERS:
        weight = len(others) / _MOST_OTHERS
        numbers = np.random.default_rng(seed).choice(len(others), _MOST_OTHERS, replace=False)
        sample = others[numbers]
    x = np.concatenate([matches, sample]).astype(np.float64)
    rows = np.concatenate([x, np.ones((len(x), 1))], 1)
    truth = np.arange(len(x)) < len(matches)
    weights = np.where(truth, 1.0, weight)
    # A prior slope of 1 with a deviation of 10: without it the slope is unbounded where a threshold
    # separates all matches.
    prior, precision = np.eye(count + 1)[0], np.array([*[0.01] * count, 1e-9])
    line = prior + np.eye(count + 1)[-1] * np.log(len(matches) / len(others))
    for _ in range(_ROUNDS):
        odds = 1 / (1 + np.exp(-np.clip(rows @ line, -30, 30)))
        slope = rows.T @ (weights * (truth - odds)) - precision * (line - prior)
        curve = (rows * (weights * odds * (1 - odds))[:, None]).T @ rows + np.diag(precision)
        step = np.linalg.solve(curve, slope)
        line = line + step * min(1.0, 4.0 / max(1e-12, float(np.abs(step).max())))
        if np.abs(step).max() < 1e-6:
            break
    # A nearer item is never less likely.
    fitted = OddsLine(
        max(1e-3, float(line[0])), float(line[-1]), float(line[1]) if count == 2 else 0.0
    )
    return (
        fitted
        if fitted.migrated_weight >= 0
        else fit_odds_line(matches[:, :1], others[:, :1], seed)
    )


def save_rank_fusion(path: Path, joining: FittedRankFusion) -> None:
    """Write a rank fusion as a numpy archive with a JSON header, with mode 0600.

    An existing file is replaced in one step.

    Raises:
        CannotWriteError: The file cannot be written. Its folder does not exist.
    """
    lines = {
        name: [line.slope, line.intercept, line.migrated_weight] for name, line in _lines(joining)
    }
    header = {"format": FORMAT, "weight": joining.new_weight, "mark": joining.map_digest, **lines}
    if joining.metric != "cosine":
        header |= {"format": OTHER_METRIC_FORMAT, "metric": joining.metric}
    buffer = io.BytesIO()
    text = np.array(json.dumps(header, sort_keys=True))
    np.savez(
        buffer,
        header=text,
        old=joining.old_anchors,
        carried=joining.migrated_anchors,
        new=joining.new_anchors,
        crowd=joining.hub_queries,
    )
    write_file(path, buffer.getvalue(), 0o600)


def load_rank_fusion(path: Path) -> FittedRankFusion:
    """Read a rank fusion that `save_rank_fusion` wrote, of this version or an earlier one.

    The file may be hostile: nothing in it is run. Without a metric, the file is of cosine.

    Raises:
        NotFoundError: There is no such file, or it is a folder.
        InvalidInputError: The file cannot be read, is damaged, larger than 2 GiB, or no file of a
            rank fusion.
    """
    with name_file_in_errors(path, "nobackfill fit --joining"):
        header, arrays = read_arrays(path)
        if header["format"] not in FORMATS:
            raise ValueError(
                f"it has the format {header['format']!r}, which this version of nobackfill does "
                "not know"
            )
        old, carried, new, crowd = (
            check_vectors(arrays[name], arrays[name].shape[1], error_name=name)
            for name in ("old", "carried", "new", "crowd")
        )
        if not len(old) == len(carried) == len(new) > 0 or 0 in (old.shape[1], new.shape[1]):
            raise ValueError(
                "its arrays old, carried and new must have the same number of rows, but have the "
                f"shapes {old.shape}, {carried.shape} and {new.shape}"
            )
        if carried.shape != new.shape or (len(crowd) and crowd.shape[1] != new.shape[1]):
            raise ValueError(
                "its arrays carried, new and crowd must have the same number of columns, but "
                f"have the shapes {carried.shape}, {new.shape} and {crowd.shape}"
            )
        joined, native = (OddsLine(*map(float, header[name])) for name in ("joined", "native"))
        weight, metric = float(header["weight"]), header.get("metric", "cosine")
        numbers = (weight, *astuple(joined), *astuple(native))
        if metric not in get_args(Metric) or not np.isfinite(numbers).all():
            raise ValueError(
                f"it has the unknown metric {metric!r}, or a weight that is not finite"
            )
        return FittedRankFusion(
            weight, joined, native, old, carried, new, str(header["mark"]), crowd, metric
        )


def _lines(joining: FittedRankFusion) -> list[tuple[str, OddsLine]]:
    return [("joined", joining.migrated_line), ("native", joining.native_line)]
