"""The manifest `release-N.json`: everything a reader must know about release N.

Unknown keys are refused at every level. Cells of the evidence are named query/gallery, as in the
compatibility matrix. The manifest is a TUF target like the files it lists, so who holds a verified
manifest holds verified digests.
"""

import itertools
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nobackfill.digests import side_space_id
from nobackfill.errors import NoEncoderError, few
from nobackfill.framing import Frame
from nobackfill.release import paths
from nobackfill.release.encoders import (
    Embedder,
    Format,
    PublishedFile,
    ReleaseNumber,
    Sha256,
    SideEncoder,
    Strict,
    TextEncoder,
    format_of,
    space_of,
    trouble,
)
from nobackfill.release.evidence import Cell, HealingEvidence, RouteEvidence, Unlabelled
from nobackfill.vectors import Origin

SpaceId = Annotated[str, Field(pattern=r"^sp-[0-9a-f]{64}$")]
SideSpaceId = Annotated[str, Field(pattern=r"^ss-[0-9a-f]{64}$")]

__all__ = [
    "Cell", "Embedder", "HealingEvidence", "Manifest", "PublishedFile", "ReleaseNumber",
    "RouteEvidence", "Sha256", "SideEncoder", "TextEncoder", "Unlabelled", "Upgrade",
    "space_of",
]  # fmt: skip


class Upgrade(Strict):
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


class Calibration(Strict):
    """Distance -> probability of a match, for one (query space, gallery space, origin).

    `distances` are strictly increasing, `probabilities` strictly decreasing: nearer is likelier.
    `scale`: slope and offset of `nobackfill.release.calibration.Scale`; None: vectors of this
    origin are ranked by their distances beside native ones, as they are.
    """

    query_space: SpaceId
    gallery_space: SpaceId
    origin: Origin
    distances: tuple[float, ...] = Field(min_length=2)
    probabilities: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(min_length=2)
    # Size of the gallery it was fitted on.
    items: int = Field(ge=1)
    scale: tuple[Annotated[float, Field(gt=0)], float] | None = Field(
        None, exclude_if=lambda scale: scale is None
    )

    @model_validator(mode="after")
    def _monotone(self) -> Self:
        d, p = self.distances, self.probabilities
        if len(d) != len(p):
            raise ValueError(f"expected one probability a distance, got {len(p)} for {len(d)}")
        if any(b <= a for a, b in itertools.pairwise(d)):
            raise ValueError("expected strictly increasing distances")
        if any(b >= a for a, b in itertools.pairwise(p)):
            raise ValueError("expected strictly decreasing probabilities")
        if self.scale is not None and self.origin != "upgraded":
            raise ValueError(f"expected a scale of upgraded vectors, got one of {self.origin} ones")
        return self


class GateVerdict(Strict):
    """Whether M(new, served old) > M(old, old) held (BCT Eq. 2), on the exported files."""

    # first: no predecessor to beat; not_measured and failed only with `forced`.
    verdict: Literal["first", "passed", "failed", "not_measured"]
    forced: bool = False
    # Lower bounds of the paired bootstrap of new/served - old/old.
    map_gain_low: float | None = None
    cmc1_gain_low: float | None = None
    detail: str = ""


class Probes(Strict):
    """Golden probes: `probes-N.npz` holds inputs and the outputs they must give on any machine.

    Arrays: `image` uint8 [p,H,W,3], `embedding` [p,dim], `side` [p,side_dim]; with a text encoder
    `text` uint8 (JSON: p texts), `text/query` and `text/document` [p,dim]; for each upgrade from M
    `upgrade_M/embedding`, `upgrade_M/side`, `upgrade_M/upgraded`, and `upgrade_M/upgraded_side`.
    An output agrees when every |difference| <= tolerance * max(1, |expected|); int8 files use
    `int8_tolerance`.
    """

    file: PublishedFile
    tolerance: float = Field(gt=0, le=0.1)
    int8_tolerance: float = Field(gt=0, le=10)


class Manifest(Strict):
    """Release N. Raises pydantic.ValidationError; files are read by `parse_manifest`."""

    # What its readers must know: encoders.format_of.
    format: Format = 1
    release: ReleaseNumber
    space: SpaceId
    embedder: Embedder
    text_encoder: TextEncoder | None = Field(None, exclude_if=lambda encoder: encoder is None)
    side_space: SideSpaceId | None
    side_encoder: SideEncoder | None
    upgrades: tuple[Upgrade, ...] = ()
    # Spaces of older releases whose vectors this release's queries may meet as they are.
    searches_directly: tuple[SpaceId, ...] = ()
    routes: tuple[RouteEvidence, ...] = ()
    evidence: tuple[Cell, ...] = ()
    # The same of images that are asked for by texts, where it embeds both.
    evidence_by_text: tuple[Cell, ...] = Field((), exclude_if=lambda cells: not cells)
    # What needs no labels, beside the classes of `evidence`.
    unlabelled: tuple[Unlabelled, ...] = Field((), exclude_if=lambda cells: not cells)
    calibration: tuple[Calibration, ...] = ()
    gate: GateVerdict
    probes: Probes
    # How it was trained: method and the recipe as configured, for people and for reports.
    method: str
    recipe: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    created: str

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.side_space is None) != (self.side_encoder is None):
            raise ValueError("expected side_space and side_encoder together, or neither")
        if self.side_encoder is not None and self.embedder.file is None:
            raise ValueError("expected no side encoder without an embedder of images")
        if problem := trouble(self.embedder, self.text_encoder):
            raise ValueError(problem)
        if self.format != (known := format_of(self.embedder, self.text_encoder)):
            raise ValueError(f"expected format {known} of what it has, got {self.format}")
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
        expected = space_of(self.embedder, self.text_encoder)
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
        if self.embedder.file is not None:
            yield paths.embedder_path(self.release), self.embedder.file
        if self.text_encoder is not None:
            yield paths.text_encoder_path(self.release), self.text_encoder.file
            yield paths.tokenizer_path(self.release), self.text_encoder.tokenizer
            if self.text_encoder.query_file is not None:
                yield paths.query_encoder_path(self.release), self.text_encoder.query_file
        yield paths.probes_path(self.release), self.probes.file
        if self.side_encoder is not None:
            yield paths.side_encoder_path(self.side_encoder.origin_release), self.side_encoder.file
        for upgrade in self.upgrades:
            yield paths.upgrade_path(upgrade.from_release, self.release), upgrade.file
            if upgrade.int8_file is not None:
                int8_path = paths.upgrade_int8_path(upgrade.from_release, self.release)
                yield int8_path, upgrade.int8_file

    @property
    def frame(self) -> Frame:
        """The pixels that its models read of an image. Raises NoEncoderError."""
        spec = self.embedder
        if spec.height is None or spec.width is None:
            raise self.no_images()
        return Frame(spec.height, spec.width, spec.fit, spec.shortest, spec.interpolation)

    @property
    def reads_text(self) -> TextEncoder:
        """What it says of texts. Raises NoEncoderError."""
        if self.text_encoder is None:
            raise self.no_texts()
        return self.text_encoder

    def no_images(self) -> NoEncoderError:
        """The refusal of an image by a release that embeds none."""
        return NoEncoderError(
            f"release {self.release} embeds no images; send "
            f"{'a text, or ' if self.text_encoder else ''}an embedding of its space"
        )

    def no_texts(self) -> NoEncoderError:
        """The refusal of a text by a release that embeds none."""
        return NoEncoderError(
            f"release {self.release} embeds no texts; send "
            f"{'an image, or ' if self.embedder.file else ''}an embedding of its space"
        )

    def embedding_files(self) -> tuple[PublishedFile, ...]:
        """What it takes to embed in its space."""
        text, side = self.text_encoder, self.side_encoder
        files = (
            self.embedder.file,
            None if text is None else text.file,
            None if text is None else text.query_file,
            None if text is None else text.tokenizer,
            None if side is None else side.file,
        )
        return tuple(file for file in files if file is not None)

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
