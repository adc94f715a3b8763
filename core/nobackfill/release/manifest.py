"""The manifests: `release-N.json`, what a reader must know of release N, and `converter-N.json`.

A converter is a signed map between the spaces of two models that others made. Unknown keys are
refused at every level. Cells of the evidence are named query/gallery, as in the compatibility
matrix. A manifest is a TUF target like the files it lists, so who holds a verified manifest holds
verified digests.

Files of release N have fixed names. A model's folder is called like its Triton model and holds
version 1 only: a release is immutable, so a new model is a new name.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from nobackfill.digests import sha256_bytes, side_space_id, space_id
from nobackfill.errors import NoEncoderError, UnfitError, few
from nobackfill.framing import Fit, Frame, Interpolation
from nobackfill.release.paths import NEWEST_FORMAT
from nobackfill.vectors import Metric, Origin

_PLAIN = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)*")


def is_plain(path: str) -> bool:
    """Whether a name can be a file of a publication: relative, nothing hidden, no way up."""
    return _PLAIN.fullmatch(path) is not None and ".." not in path


def embedder_model(release: int) -> str:
    """Triton's name of phi_N."""
    return f"embedder_{release}"


def side_encoder_model(release: int) -> str:
    """Triton's name of psi_N."""
    return f"side_encoder_{release}"


def text_encoder_model(release: int) -> str:
    """Triton's name of the text encoder of release N."""
    return f"text_encoder_{release}"


def query_encoder_model(release: int) -> str:
    """Triton's name of what reads queries, where release N has a model of its own for them."""
    return f"query_encoder_{release}"


def upgrade_model(from_release: int, to_release: int) -> str:
    """Triton's name of the upgrade M->N."""
    return f"upgrade_{from_release}_to_{to_release}"


def embedder_path(release: int) -> str:
    """phi_N's ONNX file."""
    return f"{embedder_model(release)}/1/model.onnx"


def side_encoder_path(release: int) -> str:
    """psi_N's ONNX file."""
    return f"{side_encoder_model(release)}/1/model.onnx"


def text_encoder_path(release: int) -> str:
    """The text encoder's ONNX file."""
    return f"{text_encoder_model(release)}/1/model.onnx"


def query_encoder_path(release: int) -> str:
    """The ONNX file of what reads queries."""
    return f"{query_encoder_model(release)}/1/model.onnx"


def tokenizer_path(release: int) -> str:
    """The text encoder's tokenizer, beside its ONNX file."""
    return f"{text_encoder_model(release)}/1/tokenizer.json"


def upgrade_path(from_release: int, to_release: int) -> str:
    """The fp32 ONNX file of the upgrade M->N."""
    return f"{upgrade_model(from_release, to_release)}/1/model.onnx"


def upgrade_int8_path(from_release: int, to_release: int) -> str:
    """The quantised twin of the upgrade M->N."""
    return f"{upgrade_model(from_release, to_release)}/1/model.int8.onnx"


def config_path(model: str) -> str:
    """Triton's configuration of a model."""
    return f"{model}/config.pbtxt"


def probes_path(release: int) -> str:
    """The golden probes of release N."""
    return f"probes-{release}.npz"


# The manifests: `release-N.json`, all that a reader must know of it, and `converter-N.json`.
#
# A converter is a signed map between the spaces of two models that others made. Unknown keys are
# refused at every level. Cells of the evidence are named query/gallery, as in the compatibility
# matrix. A manifest is a TUF target like the files it lists, so who holds a verified manifest holds
# verified digests.

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ReleaseNumber = Annotated[int, Field(ge=1, le=1_000_000)]
# Who asks, and what is found: asymmetric models read them differently.
TextRole = Literal["query", "document"]
TEXT_ROLES: tuple[TextRole, ...] = ("query", "document")
LARGEST_LENGTH = 8192
# The last is NEWEST_FORMAT.
Format = Literal[1, 2, 3, 4]
# name, dtype ("uint8", "int64" or "float32"), shape of one item (None: as long as a text); the
# number of items stands before it.
Tensor = tuple[str, str, tuple[int | None, ...]]
# The inputs and outputs of a model.
Ends = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
# Of Triton.
_LARGEST_BATCH = 256
_TRITON_TYPES = {"uint8": "TYPE_UINT8", "int64": "TYPE_INT64", "float32": "TYPE_FP32"}


def _plain_path(path: str) -> str:
    if not is_plain(path):
        raise ValueError(f"expected a plain relative path of a-z, 0-9, '_', '-', '.', got {path!r}")
    return path


class Strict(BaseModel):
    """A part of a manifest: unknown keys are refused."""

    # A number that is none passes every comparison by which it would be refused.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PublishedFile(Strict):
    """A file of the publication folder."""

    path: Annotated[str, AfterValidator(_plain_path)]
    sha256: Sha256
    length: int = Field(ge=1)


class PublishedEmbedder(Strict):
    """phi_N: the space that it embeds into, and the model of images, where there is one.

    ONNX input `image` uint8 [n,H,W,3], output `embedding` float32 [n,dim]. `file`, `height` and
    `width` are None where no image is embedded: by texts alone, or by nothing that is published.
    """

    file: PublishedFile | None = None
    height: int | None = Field(None, ge=1, le=2048)
    width: int | None = Field(None, ge=1, le=2048)
    dim: int = Field(ge=1, le=65536)
    metric: Metric
    # True: the graph's outputs have norm 1, and every vector of the space is checked for it.
    unit: bool
    # How a picture of another aspect becomes height x width pixels: nobackfill.images.Frame.
    fit: Fit = Field("stretch", exclude_if=lambda fit: fit == "stretch")
    # With `crop`: the pixels that its shortest side is brought to, before the middle is cut out.
    shortest: int | None = Field(None, ge=1, le=4096, exclude_if=lambda side: side is None)
    interpolation: Interpolation = Field("bilinear", exclude_if=lambda name: name == "bilinear")
    # What made the vectors, where no model of it is published: two names are two spaces.
    vectors_of: str | None = Field(
        None, min_length=1, max_length=256, exclude_if=lambda name: name is None
    )


class TextEncoder(Strict):
    """Texts into the embedder's space. ONNX inputs `inputs` int64 [n,t], output `embedding` float32
    [n,dim]; what makes one vector of the tokens', and its norm, are inside the graph.

    `tokenizer`: a tokenizer.json. A text is its prefix and itself, cut after `length` tokens.
    `query_file`: reads those that ask, where that is another model of the same form.
    """

    file: PublishedFile
    query_file: PublishedFile | None = Field(None, exclude_if=lambda file: file is None)
    tokenizer: PublishedFile
    inputs: tuple[Literal["input_ids", "attention_mask", "token_type_ids"], ...] = Field(
        min_length=1, max_length=3
    )
    length: int = Field(ge=1, le=LARGEST_LENGTH)
    query_prefix: str = Field("", max_length=1024)
    document_prefix: str = Field("", max_length=1024)
    # How it was made from the tokens' vectors: for people.
    pooling: Literal["mean", "cls", "none"]

    def prefix(self, role: TextRole) -> str:
        """What stands before a text of that role."""
        return self.query_prefix if role == "query" else self.document_prefix

    def read_by(self, role: TextRole) -> PublishedFile:
        """The model that reads texts of that role."""
        return self.query_file if role == "query" and self.query_file else self.file


class PublishedSideEncoder(Strict):
    """psi_N. ONNX input `image` uint8 [n,H,W,3] at the embedder's size, output `side` float32
    [n,dim].

    `origin_release` is the release that first published these weights: a release may keep its
    predecessor's encoder (same file, same side space), then side-information is carried unchanged.
    """

    file: PublishedFile
    dim: int = Field(ge=1, le=65536)
    origin_release: ReleaseNumber


def space_of(embedder: PublishedEmbedder, text: TextEncoder | None = None) -> str:
    """The id of the space that a release embeds into."""
    return space_id(
        None if embedder.file is None else embedder.file.sha256,
        height=embedder.height,
        width=embedder.width,
        dim=embedder.dim,
        metric=embedder.metric,
        unit=embedder.unit,
        more=dict(_beside(embedder, text)),
    )


def trouble(embedder: PublishedEmbedder, text: TextEncoder | None) -> str | None:
    """Why the two cannot be one release's; None if they can."""
    parts = (embedder.file, embedder.height, embedder.width)
    if any(part is None for part in parts) and parts != (None, None, None):
        return "expected an embedder's file, height and width together, or none of them"
    published = embedder.file is not None or text is not None
    if published == (embedder.vectors_of is not None):
        return "expected models, or with vectors_of the name of what made the vectors, not both"
    if (embedder.shortest is not None) != (embedder.fit == "crop"):
        return "expected shortest with fit crop, and with nothing else"
    if embedder.height is None or embedder.width is None:
        plain = (embedder.fit, embedder.interpolation) == ("stretch", "bilinear")
        return None if plain else "expected no fit or interpolation without a model of images"
    if embedder.shortest is not None and embedder.shortest < max(embedder.height, embedder.width):
        return "expected shortest to reach over the pixels that are cut out"
    return None


def format_of(embedder: PublishedEmbedder, text: TextEncoder | None) -> Format:
    """The lowest format whose readers understand it: 2 has texts, another fit than stretch, or no
    model of images; 3 has a model of its own for queries; 4 another interpolation than bilinear."""
    if embedder.interpolation != "bilinear":
        return 4
    if text is not None and text.query_file is not None:
        return 3
    new = text is not None or embedder.file is None or embedder.fit != "stretch"
    return 2 if new else 1


def _beside(
    embedder: PublishedEmbedder, text: TextEncoder | None
) -> Iterator[tuple[str, str | int]]:
    """What changes a vector's meaning, beside the model of images: of releases that have none of
    it, the space's id stays what it was."""
    if embedder.fit != "stretch":
        yield "fit", embedder.fit
        yield "shortest", embedder.shortest or 0
    if embedder.interpolation != "bilinear":
        yield "interpolation", embedder.interpolation
    if embedder.vectors_of is not None:
        yield "vectors_of", sha256_bytes(embedder.vectors_of.encode())
    if text is not None:
        yield "text_encoder", text.file.sha256
        if text.query_file is not None:
            yield "query_encoder", text.query_file.sha256
        yield "tokenizer", text.tokenizer.sha256
        yield "length", text.length
        # Digests: no two prefixes can be taken for two others.
        yield "query_prefix", sha256_bytes(text.query_prefix.encode())
        yield "document_prefix", sha256_bytes(text.document_prefix.encode())


class HealingEvidence(Strict):
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
        """How far mAP or CMC-1 by distance falls below the lower of its ends, at most."""
        return max(_fall(self.map), _fall(self.cmc1))

    @property
    def scaled_valley(self) -> float:
        """The same of what is brought to one scale."""
        return max(_fall(self.scaled_map), _fall(self.scaled_cmc1))


def _fall(curve: tuple[float, ...]) -> float:
    return max(0.0, min(curve[0], curve[-1]) - min(curve))


class BothEvidence(Strict):
    """How both models together rank what a route has carried, where that is worse than neither.

    Numbers of `nobackfill.release.calibration.Joint`, fitted on one half of the held-out items;
    shares of the other, of queries by both models, with the lower bounds of the paired bootstrap of
    what they gain over staying (old/old).
    """

    new: float = Field(ge=0)
    old: float = Field(gt=0)
    offset: float
    map: float = Field(ge=0, le=1)
    cmc1: float = Field(ge=0, le=1)
    map_gain_low: float
    cmc1_gain_low: float


class RouteEvidence(Strict):
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
    healing: HealingEvidence | None = Field(None, exclude_if=lambda healing: healing is None)
    both: BothEvidence | None = Field(None, exclude_if=lambda both: both is None)


class Unlabelled(Strict):
    """A cell by what needs no labels, where there are classes, beside staying (old/old): shares.

    A second view of a picture, or a part of a text, asks for what it is of (`recall1`, `mrr`);
    `agreement`: of its ten nearest with those of new/new. `similar`, `very_item`: whether the
    verdict holds for either kind of search, too.
    """

    query: str
    gallery: str
    agreement: float = Field(ge=0, le=1)
    stayed_agreement: float = Field(ge=0, le=1)
    recall1: float = Field(ge=0, le=1)
    stayed_recall1: float = Field(ge=0, le=1)
    mrr: float = Field(ge=0, le=1)
    stayed_mrr: float = Field(ge=0, le=1)
    similar: bool
    very_item: bool
    queries: int = Field(ge=1)
    items: int = Field(ge=1)

    @property
    def name(self) -> str:
        """As in `2/1>2`."""
        return f"{self.query}/{self.gallery}"


class Cell(Strict):
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


SpaceId = Annotated[str, Field(pattern=r"^sp-[0-9a-f]{64}$")]
SideSpaceId = Annotated[str, Field(pattern=r"^ss-[0-9a-f]{64}$")]


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
    embedder: PublishedEmbedder
    text_encoder: TextEncoder | None = Field(None, exclude_if=lambda encoder: encoder is None)
    side_space: SideSpaceId | None
    side_encoder: PublishedSideEncoder | None
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
            yield embedder_path(self.release), self.embedder.file
        if self.text_encoder is not None:
            yield text_encoder_path(self.release), self.text_encoder.file
            yield tokenizer_path(self.release), self.text_encoder.tokenizer
            if self.text_encoder.query_file is not None:
                yield query_encoder_path(self.release), self.text_encoder.query_file
        yield probes_path(self.release), self.probes.file
        if self.side_encoder is not None:
            yield side_encoder_path(self.side_encoder.origin_release), self.side_encoder.file
        for upgrade in self.upgrades:
            yield upgrade_path(upgrade.from_release, self.release), upgrade.file
            if upgrade.int8_file is not None:
                int8_path = upgrade_int8_path(upgrade.from_release, self.release)
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

    def embedder_ends(self) -> Ends:
        """phi_N: uint8 [n,H,W,3] to float32 [n,dim]."""
        return (self._image(),), (_vector("embedding", self.embedder.dim),)

    def text_encoder_ends(self, encoder: TextEncoder) -> Ends:
        """The text encoder: tokens int64 [n,t] to float32 [n,dim]."""
        tokens = tuple((name, "int64", (None,)) for name in encoder.inputs)
        return tokens, (_vector("embedding", self.embedder.dim),)

    def side_encoder_ends(self, encoder: PublishedSideEncoder) -> Ends:
        """psi_N: uint8 [n,H,W,3] to float32 [n,side_dim]."""
        return (self._image(),), (_vector("side", encoder.dim),)

    def upgrade_ends(self, upgrade: Upgrade) -> Ends:
        """The upgrade M->N: embeddings, with side-information where it is read and written."""
        inputs = [_vector("embedding", upgrade.from_dim)]
        outputs = [_vector("upgraded", self.embedder.dim)]
        if upgrade.reads_side:
            inputs.append(_vector("side", upgrade.from_side_dim))
        if upgrade.side == "maps" and self.side_encoder is not None:
            outputs.append(_vector("upgraded_side", self.side_encoder.dim))
        if upgrade.predicts_uncertainty:
            outputs.append(("uncertainty", "float32", ()))
        return tuple(inputs), tuple(outputs)

    def triton_configs(self) -> dict[str, str]:
        """Triton's `config.pbtxt` by published path, for each model that the release itself
        publishes, with exact dimensions."""
        models: dict[str, Ends] = {}
        if self.embedder.file is not None:
            models[embedder_model(self.release)] = self.embedder_ends()
        if (text := self.text_encoder) is not None:
            models[text_encoder_model(self.release)] = self.text_encoder_ends(text)
            if text.query_file is not None:
                models[query_encoder_model(self.release)] = self.text_encoder_ends(text)
        encoder = self.side_encoder
        if encoder is not None and encoder.origin_release == self.release:
            models[side_encoder_model(self.release)] = self.side_encoder_ends(encoder)
        for upgrade in self.upgrades:
            name = upgrade_model(upgrade.from_release, self.release)
            models[name] = self.upgrade_ends(upgrade)
        return {config_path(name): _config(name, ends) for name, ends in models.items()}

    def _image(self) -> Tensor:
        return "image", "uint8", (self.frame.height, self.frame.width, 3)


def _vector(name: str, dim: int) -> Tensor:
    return name, "float32", (dim,)


def parse_manifest(text: str | bytes, release: int | None = None) -> Manifest:
    """Read a manifest, of `release` where one is expected.

    Raises UnfitError in one line: it needs a newer version of this program (another format, or keys
    that this one does not know), or it breaks the rules.
    """
    name = "this release" if release is None else f"release {release}"
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise UnfitError(_refusal(name, error)) from error
    if release not in (None, manifest.release):
        raise UnfitError(f"{name}: its manifest says it is release {manifest.release}")
    return manifest


def _refusal(name: str, error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False)
    keys = {".".join(map(str, problem["loc"])): problem for problem in problems}
    kind = keys.get("format")
    if kind is not None and isinstance(kind["input"], int) and kind["input"] > NEWEST_FORMAT:
        return (
            f"{name} needs a newer nobackfill: its manifest is of format {kind['input']}, not "
            f"{NEWEST_FORMAT}"
        )
    if all(problem["type"] == "extra_forbidden" for problem in problems):
        return f"{name} needs a newer nobackfill: its manifest has the new keys {few(keys)}"
    wrong = (f"{key}: {problem['msg']}".removeprefix(": ") for key, problem in keys.items())
    return f"{name}: its manifest cannot be used ({few(wrong)})"


# The manifest `converter-N.json`: a signed map between the spaces of two models that others made.
#
# Neither model is in the publication: a fingerprint names each, and vectors of another one are
# refused, as the same dimension is not the same space. The map is `converter-N.onnx`, input
# `embedding` float32 [n, old.dim], output `upgraded` float32 [n, new.dim].

_MANIFEST = re.compile(r"converter-([1-9][0-9]{0,6})\.json")
_Share = Annotated[float, Field(ge=0, le=1)]


class ModelCard(Strict):
    """One of the two models. `fingerprint` is the digest of all that makes its vectors: weights,
    tokenizer, pooling, prefix, length; `weights` and `declared` say it in parts, where they are
    known. `unit`: its vectors have norm 1."""

    name: str = Field(min_length=1)
    licence: str = Field(min_length=1)
    fingerprint: Sha256
    dim: int = Field(ge=1, le=65536)
    unit: bool
    weights: Sha256 | None = None
    declared: dict[str, str] = Field(default_factory=dict)


class ConverterEvidence(Strict):
    """What was measured on pairs that the map was fitted without. `ways`: figures of each way to go
    on by its name, `stay` among them; `way` is the recommended one. `healing`: each figure
    by name with 0, 10 … 100 % of the items embedded again, ranked by calibrated scores; `raw`: the
    same, by distance."""

    corpus: str = Field(min_length=1)
    corpus_licence: str = Field(min_length=1)
    pairs: int = Field(ge=2)
    search: str
    judged_by: str
    way: str
    ways: dict[str, dict[str, _Share]]
    healing: dict[str, tuple[_Share, ...]]
    raw: dict[str, tuple[_Share, ...]]


class Converter(Strict):
    """Converter N. Raises pydantic.ValidationError; files are read by `parse_converter`."""

    format: Literal[1] = 1
    converter: int = Field(ge=1, le=1_000_000)
    kind: str
    file: PublishedFile
    old: ModelCard
    new: ModelCard
    evidence: ConverterEvidence
    created: str

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.file.path != converter_path(self.converter):
            raise ValueError(f"expected {converter_path(self.converter)}, got {self.file.path}")
        if self.old.fingerprint == self.new.fingerprint:
            raise ValueError("expected two models, got one fingerprint twice")
        return self


def converter_path(number: int) -> str:
    """The ONNX file of converter N."""
    return f"converter-{number}.onnx"


def converter_manifest_path(number: int) -> str:
    """The manifest of converter N."""
    return f"converter-{number}.json"


def number_of_converter(path: str) -> int | None:
    """N of `converter-N.json`, None for every other path."""
    named = _MANIFEST.fullmatch(path)
    return int(named[1]) if named is not None else None


def parse_converter(text: str | bytes, number: int) -> Converter:
    """Read a manifest. Raises UnfitError in one line."""
    try:
        found = Converter.model_validate_json(text)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problems)
        raise UnfitError(
            f"converter {number}: its manifest cannot be used ({few(wrong)}); it may need a newer "
            "nobackfill"
        ) from error
    if found.converter != number:
        raise UnfitError(f"converter {number}: its manifest says it is {found.converter}")
    return found


def _config(name: str, ends: Ends) -> str:
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {_LARGEST_BATCH}"]
    for direction, tensors in zip(("input", "output"), ends, strict=True):
        for tensor, dtype, shape in tensors:
            # Triton knows no tensor without dimensions; one number an item is said by a reshape.
            dims = ", ".join(str(-1 if size is None else size) for size in shape or (1,))
            reshape = "" if shape else " reshape { shape: [ ] }"
            kind = _TRITON_TYPES[dtype]
            lines.append(
                f'{direction} {{ name: "{tensor}" data_type: {kind} dims: [ {dims} ]{reshape} }}'
            )
    # No queue delay: it would be half of a single client's latency (measured 500 us of 1 ms).
    lines.append("dynamic_batching { }")
    # Triton's default on a CPU is two instances: twice the memory, and twice the time to come back.
    lines.append("instance_group [ { count: 1 } ]")
    return "\n".join(lines) + "\n"
