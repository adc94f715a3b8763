"""What is in a store of vectors, before anybody fits or carries anything."""

from dataclasses import dataclass

import numpy as np

from nobackfill.adopt.pairs import WINDOW
from nobackfill.adopt.sources.source import Dimensioned, Facts, Source
from nobackfill.errors import InvalidInputError, few
from nobackfill.ridge import Doubles
from nobackfill.vectors import Vectors

# Rows at either end of the order of keys that drift is told from.
ENDS = 2000


@dataclass(frozen=True)
class Inspection:
    """`norms`: smallest, mean and largest; `duplicates`: rows whose vector an earlier row has;
    `unusable`: rows with NaN or infinity; `drift`: the squared distance between the means of the
    first and the last rows by key, over what chance gives (about 1 where nothing has changed), None
    where there are too few. `refusals`: windows that cannot be read, in words."""

    facts: Facts
    count: int
    dim: int | None
    norms: tuple[float, float, float] | None
    duplicates: int
    unusable: int
    zeros: int
    drift: float | None
    refusals: list[str]

    @property
    def sentences(self) -> list[str]:
        """What a person should know, one line each."""
        metric = self.facts.metric or "not said; cosine is taken"
        lines = [
            f"{self.facts.name}: {self.count} vectors"
            + (f" of dimension {self.dim}" if self.dim else ""),
            f"metric: {metric}; model: {self.facts.model or 'not said'}",
        ]
        if self.norms is not None:
            low, mean, high = self.norms
            unit = ", all 1" if abs(low - 1) < 1e-3 and abs(high - 1) < 1e-3 else ""
            lines.append(f"norms: {low:.3f} to {high:.3f}, mean {mean:.3f}{unit}")
            lines.append(f"duplicates: {self.duplicates}")
        if self.unusable or self.zeros:
            lines.append(
                f"NaN or infinity in {self.unusable} rows, zeros only in {self.zeros}: mend or "
                "delete these items before anything is carried"
            )
        if self.drift is not None:
            lines.append(
                f"drift between the first and the last rows: {self.drift:.1f} times chance"
                + ("; take the sample from all of them" if self.drift > 5 else "")
            )
        return lines + self.refusals


def inspect(source: Source) -> Inspection:
    """Read every vector once."""
    facts = source.facts()
    if isinstance(source, Dimensioned) and len(mixed := source.dims()) > 1:
        each = few(f"{dim} in {rows} rows" for dim, rows in mixed.items())
        why = (
            f"vectors of several dimensions: {each}; a column is carried whole, so give each "
            "model's rows a table of their own (CREATE TABLE … AS SELECT … WHERE vector_dims(…) = "
            "…, with its key)"
        )
        return Inspection(facts, sum(mixed.values()), None, None, 0, 0, 0, None, [why])
    seen: set[int] = set()
    count = duplicates = unusable = zeros = 0
    low, high, total = np.inf, 0.0, 0.0
    dims: dict[int, str] = {}
    first: list[Vectors] = []
    last: list[Vectors] = []
    refusals = []
    for window in source.windows(WINDOW):
        try:
            rows = source.read(window)
        except InvalidInputError as error:
            refusals.append(str(error))
            continue
        if not len(rows):
            continue
        count += len(rows)
        dims.setdefault(rows.vectors.shape[1], rows.ids[0])
        good = rows.vectors[np.isfinite(rows.vectors).all(1)]
        unusable += len(rows) - len(good)
        for vector in good:
            digest = hash(vector.tobytes())
            duplicates += digest in seen
            seen.add(digest)
        norms = np.linalg.norm(good.astype(np.float64), axis=1)
        zeros += int((norms == 0).sum())
        if len(norms):
            low, high = min(low, float(norms.min())), max(high, float(norms.max()))
            total += float(norms.sum())
        if sum(map(len, first)) < ENDS:
            first.append(good)
        last = [*last, good] if sum(map(len, last)) < ENDS else [last[-1], good]
    if len(dims) > 1:
        found = ", ".join(f"{dim} from {name!r} on" for dim, name in dims.items())
        refusals.append(f"vectors of several dimensions: {found}; are these two models' vectors?")
    usable = count - unusable
    return Inspection(
        facts=facts,
        count=count,
        dim=next(iter(dims)) if len(dims) == 1 else None,
        norms=(low, total / usable, high) if usable else None,
        duplicates=duplicates,
        unusable=unusable,
        zeros=zeros,
        drift=_drift(first, last, usable) if len(dims) == 1 else None,
        refusals=refusals,
    )


def _drift(first: list[Vectors], last: list[Vectors], count: int) -> float | None:
    """|mean - mean|² over (1/n + 1/m) times the variance within the two ends."""
    if count < 200 or not first or not last:
        return None
    size = min(ENDS, count // 2)
    ends = [np.concatenate(first)[:size], np.concatenate(last)[-size:]]
    means: list[Doubles] = [end.mean(0, np.float64) for end in ends]
    within = sum(float(end.var(0, np.float64).sum()) for end in ends) / 2
    apart = float(np.square(means[0] - means[1]).sum())
    chance = within * (1 / len(ends[0]) + 1 / len(ends[1]))
    return apart / chance if chance > 0 else None
