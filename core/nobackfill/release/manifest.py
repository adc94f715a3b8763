"""The manifest `release-N.json`: everything a reader must know about release N.

Unknown keys are refused at every level. Cells of the evidence are named query/gallery, as in the
compatibility matrix. The manifest is a TUF target like the files it lists, so who holds a verified
manifest holds verified digests.
"""

import itertools
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from nobackfill.digests import side_space_id, space_id
from nobackfill.errors import few
from nobackfill.release import paths
from nobackfill.vectors import Metric, Origin

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SpaceId = Annotated[str, Field(pattern=r"^sp-[0-9a-f]{64}$")]
SideSpaceId = Annotated[str, Field(pattern=r"^ss-[0-9a-f]{64}$")]
ReleaseNumber = Annotated[int, Field(ge=1, le=1_000_000)]


def _plain_path(path: str) -> str:
    if not paths.is_plain(path):
        raise ValueError(f"expected a plain relative path of a-z, 0-9, '_', '-', '.', got {path!r}")
    return path


class _Strict(BaseModel):
    # A number that is none passes every comparison by which it would be refused.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PublishedFile(_Strict):
    """A file of the publication folder."""

    path: Annotated[str, AfterValidator(_plain_path)]
    sha256: Sha256
    length: int = Field(ge=1)


class Embedder(_Strict):
    """phi_N. ONNX input `image` uint8 [n,H,W,3], output `embedding` float32 [n,dim]."""

    file: PublishedFile
    height: int = Field(ge=1, le=2048)
    width: int = Field(ge=1, le=2048)
    dim: int = Field(ge=1, le=65536)
    metric: Metric
    # True: the graph's outputs have norm 1, and every vector of the space is checked for it.
    unit: bool


class SideEncoder(_Strict):
    """psi_N. ONNX input `image` uint8 [n,H,W,3] at the embedder's size, output `side` float32
    [n,dim].

    `origin_release` is the release that first published these weights: a release may keep its
    predecessor's encoder (same file, same side space), then side-information is carried unchanged.
    """

    file: PublishedFile
    dim: int = Field(ge=1, le=65536)
    origin_release: ReleaseNumber


class Upgrade(_Strict):
    """An upgrade into this release.

    ONNX inputs `embedding` float32 [n,from_dim] and, where it reads side-information, `side`
    float32 [n,from_side_dim]; outputs `upgraded` float32 [n,dim], then `upgraded_side` float32
    [n,side_dim] where `side` is "maps", and `uncertainty` float32 [n] (larger is less certain)
    where `predicts_uncertainty`.
    """

    from_release: ReleaseNumber
    from_space: SpaceId
    from_dim: int = Field(ge=1)
    # None: reads no side-information.
    from_side_space: SideSpaceId | None
    from_side_dim: int = Field(ge=0)
    method: str
    file: PublishedFile
    # A quantised twin, published only when its measured loss is within the release's tolerance.
    int8_file: PublishedFile | None = None
    # maps: writes this release's side-information; carries: the old one stays valid;
    # drops: none is left.
    side: Literal["maps", "carries", "drops"]
    predicts_uncertainty: bool

    @property
    def reads_side(self) -> bool:
        """Whether the graph has the input `side`. A route asks each of its steps."""
        return self.from_side_space is not None


class HealingEvidence(_Strict):
    """Quality while 0, 10 … 100 % of the items are embedded again, in a random order.

    `map`, `cmc1`: all ranked by distance; `scaled_map`, `scaled_cmc1`: the distances of carried
    items brought to where they mean what those of embedded ones do.
    """

    map: tuple[float, ...] = Field(min_length=2)
    cmc1: tuple[float, ...] = Field(min_length=2)
    scaled_map: tuple[float, ...] = Field(min_length=2)
    scaled_cmc1: tuple[float, ...] = Field(min_length=2)

    @property
    def valley(self) -> float:
        """How far mAP by distance falls below the lower of its ends."""
        return max(0.0, min(self.map[0], self.map[-1]) - min(self.map))


class RouteEvidence(_Strict):
    """What a route into this release keeps, measured on the exported files."""

    # Releases on the way, from the first one's space to this one's: [1, 3], or chained [1, 2, 3].
    releases: tuple[ReleaseNumber, ...] = Field(min_length=2)
    # Of float32 files alone.
    map: float = Field(ge=0, le=1)
    cmc1: float = Field(ge=0, le=1)
    # mAP of the same route with int8 files, where they exist.
    int8_map: float | None = None
    # Share of new/new mAP that is left as it is served: with int8 files, where they exist.
    kept: float = Field(ge=0)
    healing: HealingEvidence | None = None


class Cell(_Strict):
    """One cell of the compatibility matrix, shares between 0 and 1."""

    query: str
    gallery: str
    cmc1: float = Field(ge=0, le=1)
    cmc5: float = Field(ge=0, le=1)
    map: float = Field(ge=0, le=1)
    queries: int = Field(ge=1)
    items: int = Field(ge=1)

    @property
    def name(self) -> str:
        """As in `2/1>2`."""
        return f"{self.query}/{self.gallery}"


class Calibration(_Strict):
    """Distance -> probability of a match, for one (query space, gallery space, origin).

    `distances` are strictly increasing, `probabilities` strictly decreasing: nearer is likelier.
    """

    query_space: SpaceId
    gallery_space: SpaceId
    origin: Origin
    distances: tuple[float, ...] = Field(min_length=2)
    probabilities: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(min_length=2)
    # Size of the gallery it was fitted on.
    items: int = Field(ge=1)

    @model_validator(mode="after")
    def _monotone(self) -> Self:
        d, p = self.distances, self.probabilities
        if len(d) != len(p):
            raise ValueError(f"expected one probability a distance, got {len(p)} for {len(d)}")
        if any(b <= a for a, b in itertools.pairwise(d)):
            raise ValueError("expected strictly increasing distances")
        if any(b >= a for a, b in itertools.pairwise(p)):
            raise ValueError("expected strictly decreasing probabilities")
        return self


class GateVerdict(_Strict):
    """Whether M(new, served old) > M(old, old) held (BCT Eq. 2), on the exported files."""

    # first: no predecessor to beat; not_measured and failed only with `forced`.
    verdict: Literal["first", "passed", "failed", "not_measured"]
    forced: bool = False
    # Lower bounds of the paired bootstrap of new/served - old/old.
    map_gain_low: float | None = None
    cmc1_gain_low: float | None = None
    detail: str = ""


class Probes(_Strict):
    """Golden probes: `probes-N.npz` holds inputs and the outputs they must give on any machine.

    Arrays: `image` uint8 [p,H,W,3], `embedding` [p,dim], `side` [p,side_dim]; for each upgrade from
    M `upgrade_M/embedding`, `upgrade_M/side`, `upgrade_M/upgraded`, and `upgrade_M/upgraded_side`.
    An output agrees when every |difference| <= tolerance * max(1, |expected|); int8 files use
    `int8_tolerance`.
    """

    file: PublishedFile
    tolerance: float = Field(gt=0, le=0.1)
    int8_tolerance: float = Field(gt=0, le=10)


class Manifest(_Strict):
    """Release N. Raises pydantic.ValidationError; files are read by `parse_manifest`."""

    format: Literal[1] = 1
    release: ReleaseNumber
    space: SpaceId
    embedder: Embedder
    side_space: SideSpaceId | None
    side_encoder: SideEncoder | None
    upgrades: tuple[Upgrade, ...] = ()
    # Spaces of older releases whose vectors this release's queries may meet as they are.
    searches_directly: tuple[SpaceId, ...] = ()
    routes: tuple[RouteEvidence, ...] = ()
    evidence: tuple[Cell, ...] = ()
    calibration: tuple[Calibration, ...] = ()
    gate: GateVerdict
    probes: Probes
    # How it was trained: method and the recipe as configured, for people and for reports.
    method: str
    recipe: dict[str, str | int | float | bool | None] = {}
    created: str

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.side_space is None) != (self.side_encoder is None):
            raise ValueError("expected side_space and side_encoder together, or neither")
        sources = [upgrade.from_release for upgrade in self.upgrades]
        if len(set(sources)) != len(sources) or any(m >= self.release for m in sources):
            raise ValueError(f"expected upgrades from distinct older releases, got {few(sources)}")
        if any(route.releases[-1] != self.release for route in self.routes):
            raise ValueError(f"expected routes that end in release {self.release}")
        return self

    @model_validator(mode="after")
    def _means_what_it_says(self) -> Self:
        """Spaces are digests, and every file lies where its meaning is known: no two releases can
        share a name, and none can take that of a file of ours."""
        expected = space_of(self.embedder)
        if self.space != expected:
            raise ValueError(f"expected space {expected}, got {self.space}")
        encoder = self.side_encoder
        if encoder is not None and self.side_space != side_space_id(encoder.file.sha256):
            raise ValueError("side_space is not the digest of its side encoder")
        for path, file in self._places():
            if file.path != path:
                raise ValueError(f"expected {path}, got {file.path}")
        return self

    def _places(self) -> Iterator[tuple[str, PublishedFile]]:
        """Where each file belongs, and what the manifest says of it."""
        yield paths.embedder_path(self.release), self.embedder.file
        yield paths.probes_path(self.release), self.probes.file
        if self.side_encoder is not None:
            yield paths.side_encoder_path(self.side_encoder.origin_release), self.side_encoder.file
        for upgrade in self.upgrades:
            yield paths.upgrade_path(upgrade.from_release, self.release), upgrade.file
            if upgrade.int8_file is not None:
                int8_path = paths.upgrade_int8_path(upgrade.from_release, self.release)
                yield int8_path, upgrade.int8_file

    def upgrade_from(self, release: int) -> Upgrade | None:
        """The upgrade from `release` into this one, or None."""
        return next((u for u in self.upgrades if u.from_release == release), None)

    def searches(self, space: SpaceId) -> bool:
        """Whether queries of this release may meet vectors of an older `space` as they are."""
        return space in self.searches_directly

    def kept_directly(self, release: int) -> float | None:
        """The share of new/new mAP that this release's queries keep on the vectors of an older one
        as they are; None where nobody measured it."""
        maps = {(cell.query, cell.gallery): cell.map for cell in self.evidence}
        new = str(self.release)
        old, best = maps.get((new, str(release))), maps.get((new, new))
        return None if old is None or not best else old / best

    def files(self) -> tuple[PublishedFile, ...]:
        """Every ONNX and probe file that the manifest names."""
        return tuple(file for _, file in self._places())


def space_of(embedder: Embedder) -> str:
    """The id of the space that an embedder embeds into."""
    return space_id(
        embedder.file.sha256,
        height=embedder.height,
        width=embedder.width,
        dim=embedder.dim,
        metric=embedder.metric,
        unit=embedder.unit,
    )
