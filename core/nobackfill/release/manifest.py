"""Define the manifests: `release-N.json` for releases, `converter-N.json` for converters.

A manifest holds everything that a reader must know of a release. A converter is a signed map
between the spaces of two models that others trained. Unknown keys are refused at every level. Cells
of the evidence are named query/gallery, as in the compatibility matrix. A manifest is a TUF target
like the files it lists, so that a verified manifest gives verified digests.

Files of release N have fixed names. The folder of a model has the name of its Triton model and
holds only version 1: a release is immutable, so a new model gets a new name.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from nobackfill.digests import sha256_bytes, side_space_id, space_id
from nobackfill.errors import NoEncoderError, UnfitError, join_few
from nobackfill.framing import Fit, Frame, Interpolation
from nobackfill.release.paths import NEWEST_FORMAT
from nobackfill.vectors import Metric, Origin

_PLAIN = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)*")


def is_plain_path(path: str) -> bool:
    """Check whether a path may be that of a published file: relative, not hidden, without `..`.
    Letters must be lower case a to z; an empty path is refused."""
    return _PLAIN.fullmatch(path) is not None and ".." not in path


def embedder_model_name(release: int) -> str:
    """Return Triton's name of the image embedder phi_N."""
    return f"embedder_{release}"


def side_encoder_model_name(release: int) -> str:
    """Return Triton's name of the side-information encoder psi_N."""
    return f"side_encoder_{release}"


def text_encoder_model_name(release: int) -> str:
    """Return Triton's name of the text encoder."""
    return f"text_encoder_{release}"


def query_encoder_model_name(release: int) -> str:
    """Return Triton's name of the query encoder, for releases with a separate model for queries."""
    return f"query_encoder_{release}"


def upgrade_model_name(from_release: int, to_release: int) -> str:
    """Return Triton's name of the upgrade M->N."""
    return f"upgrade_{from_release}_to_{to_release}"


def embedder_path(release: int) -> str:
    """Return the published path of the image embedder's ONNX file."""
    return f"{embedder_model_name(release)}/1/model.onnx"


def side_encoder_path(release: int) -> str:
    """Return the published path of the side-information encoder's ONNX file."""
    return f"{side_encoder_model_name(release)}/1/model.onnx"


def text_encoder_path(release: int) -> str:
    """Return the published path of the text encoder's ONNX file."""
    return f"{text_encoder_model_name(release)}/1/model.onnx"


def query_encoder_path(release: int) -> str:
    """Return the published path of the query encoder's ONNX file."""
    return f"{query_encoder_model_name(release)}/1/model.onnx"


def tokenizer_path(release: int) -> str:
    """Return the published path of the tokenizer, in the text encoder's folder."""
    return f"{text_encoder_model_name(release)}/1/tokenizer.json"


def upgrade_path(from_release: int, to_release: int) -> str:
    """Return the published path of the float32 ONNX file of the upgrade M->N."""
    return f"{upgrade_model_name(from_release, to_release)}/1/model.onnx"


def upgrade_int8_path(from_release: int, to_release: int) -> str:
    """Return the published path of the quantised twin of the upgrade M->N."""
    return f"{upgrade_model_name(from_release, to_release)}/1/model.int8.onnx"


def adapter_model_name(from_release: int, to_release: int) -> str:
    """Return Triton's name of the query adapter N->M, where M is the older release."""
    return f"adapter_{from_release}_to_{to_release}"


def adapter_path(from_release: int, to_release: int) -> str:
    """Return the published path of the ONNX file of the query adapter N->M."""
    return f"{adapter_model_name(from_release, to_release)}/1/model.onnx"


def config_path(model: str) -> str:
    """Return the published path of a model's Triton configuration, by its Triton name."""
    return f"{model}/config.pbtxt"


def probes_path(release: int) -> str:
    """Return the published path of the golden probes of a release."""
    return f"probes-{release}.npz"


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ReleaseNumber = Annotated[int, Field(ge=1, le=1_000_000)]
# Asymmetric models embed queries and documents differently.
TextRole = Literal["query", "document"]
TEXT_ROLES: tuple[TextRole, ...] = ("query", "document")
LARGEST_LENGTH = 8192
# The last format is NEWEST_FORMAT.
Format = Literal[1, 2, 3, 4, 5]
# Name, dtype (uint8, int64 or float32) and shape of one item; None is the length of a text. The
# batch axis comes first.
Tensor = tuple[str, str, tuple[int | None, ...]]
# The inputs and outputs of a model.
ModelInterface = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
# Triton's largest batch.
_LARGEST_BATCH = 256
_TRITON_TYPES = {"uint8": "TYPE_UINT8", "int64": "TYPE_INT64", "float32": "TYPE_FP32"}


def _plain_path(path: str) -> str:
    if not is_plain_path(path):
        raise ValueError(f"expected a plain relative path of a-z, 0-9, '_', '-', '.', got {path!r}")
    return path


class ManifestPart(BaseModel):
    """A part of a manifest; unknown keys are refused."""

    # NaN would pass every comparison that checks a bound.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True
    )


class PublishedFile(ManifestPart):
    """A file of the publication folder."""

    path: Annotated[str, AfterValidator(_plain_path)]
    sha256: Sha256
    length: int = Field(ge=1)


class PublishedEmbedder(ManifestPart):
    """The space of a release, and its image embedder phi_N if it has one.

    The ONNX file has the input `image` uint8 [n,H,W,3] and the output `embedding` float32 [n,dim].
    `file`, `height` and `width` are None if the release embeds only texts, or nothing.
    """

    file: PublishedFile | None = None
    height: int | None = Field(None, ge=1, le=2048)
    width: int | None = Field(None, ge=1, le=2048)
    dim: int = Field(ge=1, le=65536)
    metric: Metric
    # True: the outputs have norm 1, and every vector of the space is checked for it.
    unit: bool
    # How a picture is resized to height x width pixels: nobackfill.framing.Frame.
    fit: Fit = Field("stretch", exclude_if=lambda fit: fit == "stretch")
    # With `crop`: length of the shorter side before the crop, in pixels.
    shortest: int | None = Field(None, ge=1, le=4096, exclude_if=lambda side: side is None)
    interpolation: Interpolation = Field("bilinear", exclude_if=lambda name: name == "bilinear")
    # The name of the model of the vectors, if it is not published: two names are two spaces.
    vectors_of: str | None = Field(
        None, min_length=1, max_length=256, exclude_if=lambda name: name is None
    )


class TextEncoder(ManifestPart):
    """The text encoder of a release, into the embedder's space.

    The ONNX file has the inputs `inputs` int64 [n,t] and the output `embedding` float32 [n,dim];
    pooling and normalisation are inside the graph.

    Attributes:
        file: The ONNX file.
        query_file: The ONNX file for queries, if it differs; it has the same inputs and output.
        tokenizer: A tokenizer.json.
        inputs: Names of the ONNX inputs.
        length: Tokens after which a text with its prefix is truncated.
        query_prefix: Text before each query.
        document_prefix: Text before each document.
        pooling: How the graph pools tokens, for people.
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
    pooling: Literal["mean", "cls", "none"]

    def prefix(self, role: TextRole) -> str:
        """Return the text that is put before each text of a role; empty for none."""
        return self.query_prefix if role == "query" else self.document_prefix

    def model_file(self, role: TextRole) -> PublishedFile:
        """Return the ONNX file that embeds texts of a role. For queries that is the query
        encoder's, where there is one."""
        return self.query_file if role == "query" and self.query_file else self.file


class PublishedSideEncoder(ManifestPart):
    """The side-information encoder psi_N of a release.

    The ONNX file has the input `image` uint8 [n,H,W,3] of the embedder's size and the output `side`
    float32 [n,dim].

    Attributes:
        file: The ONNX file.
        dim: Dimension of the side-information.
        origin_release: The release that first published these weights. A release may reuse its
            predecessor's encoder; then side-information stays valid.
    """

    file: PublishedFile
    dim: int = Field(ge=1, le=65536)
    origin_release: ReleaseNumber


def release_space_id(embedder: PublishedEmbedder, text: TextEncoder | None = None) -> str:
    """Return the id of the space of a release.

    Two releases with equal files and settings have one id.

    Args:
        embedder: Its embedder.
        text: Its text encoder, None without one.

    Returns:
        "sp-" and 64 hex digits.

    Raises:
        InvalidInputError: The digest of the embedder's file is not 64 lower-case hex digits.
    """
    return space_id(
        None if embedder.file is None else embedder.file.sha256,
        height=embedder.height,
        width=embedder.width,
        dim=embedder.dim,
        metric=embedder.metric,
        unit_norm=embedder.unit,
        more_fields=dict(_space_fields(embedder, text)),
    )


def explain_contradiction(embedder: PublishedEmbedder, text: TextEncoder | None) -> str | None:
    """Explain why an embedder and a text encoder cannot belong to one release.

    The checks cover which fields stand together and the crop; files are not read.

    Args:
        embedder: The embedder.
        text: The text encoder, None without one.

    Returns:
        One sentence on the first contradiction; None if there is none.
    """
    parts = (embedder.file, embedder.height, embedder.width)
    if any(part is None for part in parts) and parts != (None, None, None):
        return "embedder: expected file, height and width together, or none of them"
    published = embedder.file is not None or text is not None
    if published == (embedder.vectors_of is not None):
        return (
            "embedder: expected either a published image or text model, or in vectors_of the name "
            "of an unpublished model"
        )
    if (embedder.shortest is not None) != (embedder.fit == "crop"):
        return "embedder: expected the key shortest if and only if fit is crop"
    if embedder.height is None or embedder.width is None:
        plain = (embedder.fit, embedder.interpolation) == ("stretch", "bilinear")
        return None if plain else "embedder: expected no fit or interpolation without a file"
    if embedder.shortest is not None and embedder.shortest < max(embedder.height, embedder.width):
        return (
            f"embedder: expected shortest of at least {max(embedder.height, embedder.width)}, the "
            f"longer side of the crop, got {embedder.shortest}"
        )
    return None


def lowest_manifest_format(
    embedder: PublishedEmbedder, text: TextEncoder | None, *, has_query_adapter: bool = False
) -> Format:
    """Return the lowest format whose readers understand a release.

    Format 5 has a query adapter. Otherwise format 4 has an interpolation other than bilinear.
    Otherwise format 3 has a separate model for queries. Otherwise format 2 has texts, a fit other
    than stretch, or no image embedder. Everything else has format 1.

    Args:
        embedder: Its embedder.
        text: Its text encoder, None without one.
        has_query_adapter: Whether it has a query adapter.
    """
    if has_query_adapter:
        return 5
    if embedder.interpolation != "bilinear":
        return 4
    if text is not None and text.query_file is not None:
        return 3
    new = text is not None or embedder.file is None or embedder.fit != "stretch"
    return 2 if new else 1


def _space_fields(
    embedder: PublishedEmbedder, text: TextEncoder | None
) -> Iterator[tuple[str, str | int]]:
    """Yield what changes the meaning of a vector, besides the image embedder.

    A release without any of it keeps the space id that it had before these fields existed.
    """
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
        # Digests, so that no two pairs of prefixes are confused.
        yield "query_prefix", sha256_bytes(text.query_prefix.encode())
        yield "document_prefix", sha256_bytes(text.document_prefix.encode())


class LazyReembeddingEvidence(ManifestPart):
    """Quality while 0, 10 ... 100 % of the items are re-embedded, in random order.

    Attributes:
        map: mAP, all items ranked by distance.
        cmc1: CMC-1, all items ranked by distance.
        scaled_map: mAP, with distances of migrated items converted to the scale of native ones.
        scaled_cmc1: CMC-1, with converted distances.
    """

    map: tuple[float, ...] = Field(min_length=2)
    cmc1: tuple[float, ...] = Field(min_length=2)
    scaled_map: tuple[float, ...] = Field(min_length=2)
    scaled_cmc1: tuple[float, ...] = Field(min_length=2)

    @property
    def valley_depth(self) -> float:
        """Return how far mAP or CMC-1 by distance falls below the lower of its ends, at most; 0 if
        it never does."""
        return max(_depth(self.map), _depth(self.cmc1))

    @property
    def scaled_valley_depth(self) -> float:
        """Return how far mAP or CMC-1 by converted distances falls below the lower of its ends, at
        most; 0 if it never does."""
        return max(_depth(self.scaled_map), _depth(self.scaled_cmc1))


def _depth(curve: tuple[float, ...]) -> float:
    return max(0.0, min(curve[0], curve[-1]) - min(curve))


class RankFusionEvidence(ManifestPart):
    """Quality of rank fusion, where both models rank what a route has migrated.

    The weights of `nobackfill.release.calibration.JointDistance` are fitted on one half of the
    held-out items. The figures are measured on the other half; rank fusion is kept only where it is
    worse than neither model.

    Attributes:
        new: Weight of the new model's distance.
        old: Weight of the old model's distance.
        offset: Added to the weighted sum.
        map: mAP of queries by both models.
        cmc1: CMC-1 of queries by both models.
        map_gain_low: Lower bound of the paired bootstrap of the gain in mAP over old/old.
        cmc1_gain_low: Lower bound of the paired bootstrap of the gain in CMC-1 over old/old.
    """

    new: float = Field(ge=0)
    old: float = Field(gt=0)
    offset: float
    map: float = Field(ge=0, le=1)
    cmc1: float = Field(ge=0, le=1)
    map_gain_low: float
    cmc1_gain_low: float


class RouteEvidence(ManifestPart):
    """Quality of a route into this release, measured on the exported files.

    Attributes:
        releases: Releases of the route, source first: [1, 3], or chained [1, 2, 3].
        map: mAP with float32 files only.
        cmc1: CMC-1 with float32 files only.
        int8_map: mAP with int8 files, where they exist.
        retention: mAP as served (with int8 files, where they exist) as a share of new/new mAP.
        healing: Quality during lazy re-embedding.
        both: Quality of rank fusion.
    """

    releases: tuple[ReleaseNumber, ...] = Field(min_length=2)
    map: float = Field(ge=0, le=1)
    cmc1: float = Field(ge=0, le=1)
    int8_map: float | None = None
    retention: float = Field(alias="kept", ge=0)
    healing: LazyReembeddingEvidence | None = Field(
        None, exclude_if=lambda healing: healing is None
    )
    both: RankFusionEvidence | None = Field(None, exclude_if=lambda both: both is None)


class UnlabelledCell(ManifestPart):
    """A cell of the compatibility matrix, measured without labels, and the figures of staying with
    the old model.

    All figures are shares. A second view of a picture, or a part of a text, is the query for its
    own item.

    Attributes:
        query: The query model.
        gallery: How the gallery's vectors were made.
        agreement: Share of the ten nearest items of new/new among the ten nearest here.
        stayed_agreement: The same of old/old.
        recall1: Share of queries whose own item is the first hit.
        stayed_recall1: The same of old/old.
        mrr: Mean reciprocal rank of the own item.
        stayed_mrr: The same of old/old.
        similar: Whether the verdict holds for a search for similar items.
        very_item: Whether the verdict holds for known-item search.
        queries: Number of queries.
        items: Number of items.
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
        """Return the name of the cell, such as `2/1>2`."""
        return f"{self.query}/{self.gallery}"


class Cell(ManifestPart):
    """A cell of the compatibility matrix; its figures are shares between 0 and 1."""

    query: str
    gallery: str
    cmc1: float = Field(ge=0, le=1)
    cmc5: float = Field(ge=0, le=1)
    map: float = Field(ge=0, le=1)
    queries: int = Field(ge=1)
    items: int = Field(ge=1)

    @property
    def name(self) -> str:
        """Return the name of the cell, such as `2/1>2`."""
        return f"{self.query}/{self.gallery}"


SpaceId = Annotated[str, Field(pattern=r"^sp-[0-9a-f]{64}$")]
SideSpaceId = Annotated[str, Field(pattern=r"^ss-[0-9a-f]{64}$")]


class Upgrade(ManifestPart):
    """An upgrade into this release.

    The ONNX file has the inputs `embedding` float32 [n,from_dim] and, if it reads side-information,
    `side` float32 [n,from_side_dim]. Its outputs are `upgraded` float32 [n,dim], `upgraded_side`
    float32 [n,side_dim] if `side` is maps, and `uncertainty` float32 [n] (larger is less certain)
    if `predicts_uncertainty`.
    """

    from_release: ReleaseNumber
    from_space: SpaceId
    from_dim: int = Field(ge=1)
    # None: the upgrade reads no side-information.
    from_side_space: SideSpaceId | None
    from_side_dim: int = Field(ge=0)
    method: str
    file: PublishedFile
    # A quantised twin, published only if its measured loss is within the release's tolerance.
    int8_file: PublishedFile | None = None
    # maps: the upgrade writes this release's side-information. carries: the old one stays valid.
    # drops: the item has none afterwards.
    side: Literal["maps", "carries", "drops"]
    predicts_uncertainty: bool

    @property
    def reads_side(self) -> bool:
        """Tell whether the graph has the input `side`; for a whole route, use Route.reads_side."""
        return self.from_side_space is not None


class QueryAdapter(ManifestPart):
    """A map of this release's queries to the space of an older release.

    So queries of this release search vectors of the older one, which stay as they are. The ONNX
    file has the input `embedding` float32 [n, dim] and the output `adapted` float32 [n, to_dim].

    Attributes:
        to_release: The older release.
        to_space: Id of its space.
        to_dim: Dimension of its vectors.
        to_unit: Whether its vectors have norm 1; each output is checked for it.
        method: How the map was fitted, for people.
        file: The ONNX file.
    """

    to_release: ReleaseNumber
    to_space: SpaceId
    to_dim: int = Field(ge=1, le=65536)
    to_unit: bool
    method: str
    file: PublishedFile


class Calibration(ManifestPart):
    """The curve from distance to probability of a match, for (query space, gallery space, origin).

    Attributes:
        query_space: Id of the query's space.
        gallery_space: Id of the gallery's space.
        origin: How the gallery's vectors were made.
        distances: Strictly increasing.
        probabilities: Strictly decreasing: a smaller distance is a likelier match.
        items: Size of the gallery that it was fitted on.
        scale: Slope and offset of `nobackfill.release.calibration.DistanceScale`; None: vectors of
            this origin are ranked by their distances among native ones.
    """

    query_space: SpaceId
    gallery_space: SpaceId
    origin: Origin
    distances: tuple[float, ...] = Field(min_length=2)
    probabilities: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(min_length=2)
    items: int = Field(ge=1)
    scale: tuple[Annotated[float, Field(gt=0)], float] | None = Field(
        None, exclude_if=lambda scale: scale is None
    )

    @model_validator(mode="after")
    def _monotone(self) -> Self:
        d, p = self.distances, self.probabilities
        if len(d) != len(p):
            raise ValueError(
                f"calibration: expected one probability for each distance, got {len(p)} for "
                f"{len(d)}"
            )
        if any(b <= a for a, b in itertools.pairwise(d)):
            raise ValueError(
                "calibration: expected strictly increasing distances, got one that repeats or falls"
            )
        if any(b >= a for a, b in itertools.pairwise(p)):
            raise ValueError(
                "calibration: expected strictly decreasing probabilities, got one that repeats or "
                "rises"
            )
        if self.scale is not None and self.origin != "upgraded":
            raise ValueError(
                "calibration: expected a scale only for upgraded vectors, got one for "
                f"{self.origin} vectors"
            )
        return self


class GateVerdict(ManifestPart):
    """The verdict of the gate: whether M(new, served old) > M(old, old) held (BCT Eq. 2).

    It is measured on the exported files.

    Attributes:
        verdict: first means that there is no predecessor; failed and not_measured need `forced`.
        forced: Whether the publisher overruled the gate.
        map_gain_low: Lower bound of the paired bootstrap of the gain in mAP over old/old.
        cmc1_gain_low: Lower bound of the paired bootstrap of the gain in CMC-1 over old/old.
        detail: An explanation for people.
    """

    verdict: Literal["first", "passed", "failed", "not_measured"]
    forced: bool = False
    map_gain_low: float | None = None
    cmc1_gain_low: float | None = None
    detail: str = ""


class Probes(ManifestPart):
    """The golden probes of a release: inputs, and the outputs that they must give on every machine.

    The file is `probes-N.npz`. Its arrays: `image` uint8 [p,H,W,3], `embedding` [p,dim], `side`
    [p,side_dim]; with a text encoder `text` uint8 (JSON: p texts), `text/query` and `text/document`
    [p,dim]; for each upgrade from M `upgrade_M/embedding`, `upgrade_M/side`, `upgrade_M/upgraded`
    and `upgrade_M/upgraded_side`; for each query adapter to M `adapter_M/embedding` and
    `adapter_M/adapted`.

    An output is right if every |difference| <= tolerance * max(1, |expected|); int8 files use
    `int8_tolerance`.
    """

    file: PublishedFile
    tolerance: float = Field(gt=0, le=0.1)
    int8_tolerance: float = Field(gt=0, le=10)


class Manifest(ManifestPart):
    """The manifest of a release; `parse_manifest` reads its file.

    Raises:
        pydantic.ValidationError: A rule is broken.
    """

    # See `lowest_manifest_format`.
    format: Format = 1
    release: ReleaseNumber
    space: SpaceId
    embedder: PublishedEmbedder
    text_encoder: TextEncoder | None = Field(None, exclude_if=lambda encoder: encoder is None)
    side_space: SideSpaceId | None
    side_encoder: PublishedSideEncoder | None
    upgrades: tuple[Upgrade, ...] = ()
    # Spaces of older releases that this release's queries can search directly.
    searches_directly: tuple[SpaceId, ...] = ()
    # Query adapters to spaces of older releases, which are none of `searches_directly`.
    adapters: tuple[QueryAdapter, ...] = Field((), exclude_if=lambda adapters: not adapters)
    routes: tuple[RouteEvidence, ...] = ()
    evidence: tuple[Cell, ...] = ()
    # Evidence for text queries on images, if the release embeds both.
    evidence_by_text: tuple[Cell, ...] = Field((), exclude_if=lambda cells: not cells)
    # Evidence without labels, where `evidence` has classes.
    unlabelled: tuple[UnlabelledCell, ...] = Field((), exclude_if=lambda cells: not cells)
    calibration: tuple[Calibration, ...] = ()
    gate: GateVerdict
    probes: Probes
    # How it was trained, for people and reports: the method and the recipe as configured.
    method: str
    recipe: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    created: str

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.side_space is None) != (self.side_encoder is None):
            raise ValueError(
                "expected side_space and side_encoder together, or neither; got one of them"
            )
        if self.side_encoder is not None and self.embedder.file is None:
            raise ValueError(
                "expected no side_encoder, because the release has no embedder of images; got one"
            )
        if problem := explain_contradiction(self.embedder, self.text_encoder):
            raise ValueError(problem)
        lowest = lowest_manifest_format(
            self.embedder, self.text_encoder, has_query_adapter=bool(self.adapters)
        )
        if self.format != lowest:
            raise ValueError(
                f"format: expected {lowest}, the lowest that has the features of this release, got "
                f"{self.format}"
            )
        sources = [upgrade.from_release for upgrade in self.upgrades]
        if len(set(sources)) != len(sources) or any(m >= self.release for m in sources):
            raise ValueError(
                "upgrades: expected each to start from another older release, got "
                f"{join_few(sources)}"
            )
        targets = [adapter.to_release for adapter in self.adapters]
        if len(set(targets)) != len(targets) or any(m >= self.release for m in targets):
            raise ValueError(
                f"adapters: expected each to lead to another older release, got {join_few(targets)}"
            )
        spaces = [adapter.to_space for adapter in self.adapters]
        if len(set(spaces)) != len(spaces) or set(spaces) & {self.space, *self.searches_directly}:
            raise ValueError(
                "adapters: expected each to lead to another space, and none to the "
                "release's own space or one in searches_directly"
            )
        if any(route.releases[-1] != self.release for route in self.routes):
            others = [route.releases[-1] for route in self.routes]
            raise ValueError(
                f"routes: expected upgrade routes that end in this release, {self.release}, got "
                f"routes that end in {join_few(others)}"
            )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        """Check that spaces are digests and that each file has the path of its role.

        So no two releases share a name, and no file replaces one with another role.
        """
        expected = release_space_id(self.embedder, self.text_encoder)
        if self.space != expected:
            raise ValueError(
                f"space: expected {expected}, the digest of the embedder, got {self.space}"
            )
        encoder = self.side_encoder
        if encoder is not None and self.side_space != (
            digest := side_space_id(encoder.file.sha256)
        ):
            raise ValueError(
                f"side_space: expected {digest}, the digest of the side encoder, got "
                f"{self.side_space}"
            )
        for path, file in self._places():
            if file.path != path:
                raise ValueError(f"expected the file {path}, got {file.path}")
        return self

    def _places(self) -> Iterator[tuple[str, PublishedFile]]:
        """Yield the path that each file must have, and its entry in the manifest."""
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
        for adapter in self.adapters:
            yield adapter_path(self.release, adapter.to_release), adapter.file

    @property
    def frame(self) -> Frame:
        """Return the pixels that its models read of an image.

        Raises:
            NoEncoderError: It embeds no images.
        """
        spec = self.embedder
        if spec.height is None or spec.width is None:
            raise self.no_images_error()
        return Frame(spec.height, spec.width, spec.fit, spec.shortest, spec.interpolation)

    @property
    def reads_text(self) -> TextEncoder:
        """Return its text encoder.

        Raises:
            NoEncoderError: It embeds no texts.
        """
        if self.text_encoder is None:
            raise self.no_texts_error()
        return self.text_encoder

    def no_images_error(self) -> NoEncoderError:
        """Return, without raising it, the error for an image that is sent to a release that embeds
        none."""
        return NoEncoderError(
            f"release {self.release} embeds no images; send "
            f"{'a text, or ' if self.text_encoder else ''}an embedding in the release's space"
        )

    def no_texts_error(self) -> NoEncoderError:
        """Return, without raising it, the error for a text that is sent to a release that embeds
        none."""
        return NoEncoderError(
            f"release {self.release} embeds no texts; send "
            f"{'an image, or ' if self.embedder.file else ''}an embedding in the release's space"
        )

    def embedding_files(self) -> tuple[PublishedFile, ...]:
        """Return the files that are needed to embed in its space: every encoder and the
        tokenizer.

        A side encoder of an older release is among them; upgrades, query adapters and probes are
        not. Empty if the release publishes no model. The order is image, text and query encoder,
        tokenizer, side encoder.
        """
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
        """Return the upgrade from an older release into this one, or None if it publishes none."""
        return next((u for u in self.upgrades if u.from_release == release), None)

    def searches_space_directly(self, space: SpaceId) -> bool:
        """Tell whether queries of this release can search vectors of an older space as they are.

        The queries are used unchanged, or pass a query adapter (`adapter_to`). The manifest
        declares these spaces; its own is not among them.
        """
        return space in self.searches_directly or self.adapter_to(space) is not None

    def adapter_to(self, space: SpaceId) -> QueryAdapter | None:
        """Return the query adapter to an older space, or None if it publishes none."""
        return next((adapter for adapter in self.adapters if adapter.to_space == space), None)

    def direct_retention(self, release: int) -> float | None:
        """Return mAP of this release's queries on vectors of an older release, as a share of
        new/new mAP.

        Returns:
            At least 0, and above 1 if the old vectors answer better. None if a cell was not
            measured, or new/new mAP is 0.
        """
        maps = {(cell.query, cell.gallery): cell.map for cell in self.evidence}
        new = str(self.release)
        old, best = maps.get((new, str(release))), maps.get((new, new))
        return None if old is None or not best else old / best

    def files(self) -> tuple[PublishedFile, ...]:
        """Return every ONNX, tokenizer and probe file that the manifest names.

        A side encoder that an older release published is among them; the manifest itself is not.
        """
        return tuple(file for _, file in self._places())

    def embedder_interface(self) -> ModelInterface:
        """Return the ONNX inputs and outputs of the image embedder.

        Raises:
            NoEncoderError: The release embeds no images.
        """
        return (self._image(),), (_vector("embedding", self.embedder.dim),)

    def text_encoder_interface(self, encoder: TextEncoder) -> ModelInterface:
        """Return the ONNX inputs and outputs of the text encoder. The query encoder has the
        same."""
        tokens = tuple((name, "int64", (None,)) for name in encoder.inputs)
        return tokens, (_vector("embedding", self.embedder.dim),)

    def side_encoder_interface(self, encoder: PublishedSideEncoder) -> ModelInterface:
        """Return the ONNX inputs and outputs of the side-information encoder.

        Raises:
            NoEncoderError: The release embeds no images.
        """
        return (self._image(),), (_vector("side", encoder.dim),)

    def upgrade_interface(self, upgrade: Upgrade) -> ModelInterface:
        """Return the ONNX inputs and outputs of an upgrade of this release. The int8 twin has the
        same."""
        inputs = [_vector("embedding", upgrade.from_dim)]
        outputs = [_vector("upgraded", self.embedder.dim)]
        if upgrade.reads_side:
            inputs.append(_vector("side", upgrade.from_side_dim))
        if upgrade.side == "maps" and self.side_encoder is not None:
            outputs.append(_vector("upgraded_side", self.side_encoder.dim))
        if upgrade.predicts_uncertainty:
            outputs.append(("uncertainty", "float32", ()))
        return tuple(inputs), tuple(outputs)

    def adapter_interface(self, adapter: QueryAdapter) -> ModelInterface:
        """Return the ONNX inputs and outputs of a query adapter of this release."""
        return (_vector("embedding", self.embedder.dim),), (_vector("adapted", adapter.to_dim),)

    def triton_configs(self) -> dict[str, str]:
        """Return the Triton configuration of each model that this release publishes, by published
        path. A side encoder that an older release published is not among them, and no int8 twin."""
        models: dict[str, ModelInterface] = {}
        if self.embedder.file is not None:
            models[embedder_model_name(self.release)] = self.embedder_interface()
        if (text := self.text_encoder) is not None:
            models[text_encoder_model_name(self.release)] = self.text_encoder_interface(text)
            if text.query_file is not None:
                models[query_encoder_model_name(self.release)] = self.text_encoder_interface(text)
        encoder = self.side_encoder
        if encoder is not None and encoder.origin_release == self.release:
            models[side_encoder_model_name(self.release)] = self.side_encoder_interface(encoder)
        for upgrade in self.upgrades:
            name = upgrade_model_name(upgrade.from_release, self.release)
            models[name] = self.upgrade_interface(upgrade)
        for adapter in self.adapters:
            name = adapter_model_name(self.release, adapter.to_release)
            models[name] = self.adapter_interface(adapter)
        return {config_path(name): _config(name, ends) for name, ends in models.items()}

    def _image(self) -> Tensor:
        return "image", "uint8", (self.frame.height, self.frame.width, 3)


def _vector(name: str, dim: int) -> Tensor:
    return name, "float32", (dim,)


def parse_manifest(text: str | bytes, release: int | None = None) -> Manifest:
    """Parse a manifest.

    Args:
        text: The JSON, in UTF-8.
        release: The number that it must have; None for any.

    Raises:
        UnfitError: It is no JSON, needs a newer version of this program (another format, or unknown
            keys), breaks a rule, or has another number. The message is one line. It is a
            VerificationError.
    """
    name = "this release" if release is None else f"release {release}"
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise UnfitError(_refusal(name, error)) from error
    if release not in (None, manifest.release):
        raise UnfitError(
            f"{name}: its manifest has the number of another release, {manifest.release}; its "
            "publisher must publish a new release"
        )
    return manifest


def _refusal(name: str, error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False)
    keys = {".".join(map(str, problem["loc"])): problem for problem in problems}
    kind = keys.get("format")
    if kind is not None and isinstance(kind["input"], int) and kind["input"] > NEWEST_FORMAT:
        return (
            f"{name} needs a newer nobackfill: its manifest has format {kind['input']}, and this "
            f"version reads formats up to {NEWEST_FORMAT}"
        )
    if all(problem["type"] == "extra_forbidden" for problem in problems):
        return (
            f"{name} needs a newer nobackfill: its manifest has keys that this version does not "
            f"know, {join_few(keys)}"
        )
    return (
        f"{name}: its manifest cannot be used ({join_validation_problems(error)}); its publisher "
        "must publish a new release"
    )


def join_validation_problems(error: ValidationError) -> str:
    """Join up to three problems of a validation in one line, each behind the path of its key.

    If a key has several problems, the last counts. Longer lists end with the number of the others.
    """
    problems = error.errors(include_url=False, include_context=False)
    messages = {
        ".".join(map(str, problem["loc"])): problem["msg"].removeprefix("Value error, ")
        for problem in problems
    }
    return join_few(f"{key}: {message}".removeprefix(": ") for key, message in messages.items())


# The manifest `converter-N.json`: a signed map between the spaces of two models that others
# trained.
# Neither model is in the publication. A fingerprint names each, and vectors of another model are
# refused, since the same dimension does not mean the same space. The map is `converter-N.onnx`,
# with the input `embedding` float32 [n, old.dim] and the output `upgraded` float32 [n, new.dim].

_MANIFEST = re.compile(r"converter-([1-9][0-9]{0,6})\.json")
_Share = Annotated[float, Field(ge=0, le=1)]


class ModelCard(ManifestPart):
    """One of the two models of a converter.

    Attributes:
        name: Its name.
        licence: Its licence.
        fingerprint: Digest of everything that determines its vectors: weights, tokenizer, pooling,
            prefix, length.
        dim: Dimension of its vectors.
        unit: Whether its vectors have norm 1.
        weights: SHA-256 of its weights, if known.
        declared: The declared facts, if known.
    """

    name: str = Field(min_length=1)
    licence: str = Field(min_length=1)
    fingerprint: Sha256
    dim: int = Field(ge=1, le=65536)
    unit: bool
    weights: Sha256 | None = None
    declared: dict[str, str] = Field(default_factory=dict)


class ConverterEvidence(ManifestPart):
    """Quality of a converter, measured on pairs that the map was not fitted on.

    Attributes:
        corpus: Name of the data.
        corpus_licence: Licence of the data.
        pairs: Number of pairs.
        search: The kind of search: similar items, or a known item.
        judged_by: How right hits are recognised.
        way: The recommended option.
        ways: The figures of each option by name, `stay` among them.
        healing: Each figure with 0, 10 ... 100 % of the items re-embedded, ranked by calibrated
            scores.
        raw: The same, ranked by distance.
    """

    corpus: str = Field(min_length=1)
    corpus_licence: str = Field(min_length=1)
    pairs: int = Field(ge=2)
    search: str
    judged_by: str
    way: str
    ways: dict[str, dict[str, _Share]]
    healing: dict[str, tuple[_Share, ...]]
    raw: dict[str, tuple[_Share, ...]]


class Converter(ManifestPart):
    """The manifest of a converter; `parse_converter` reads its file.

    Raises:
        pydantic.ValidationError: A rule is broken.
    """

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
            raise ValueError(
                f"expected the file {converter_path(self.converter)}, got {self.file.path}"
            )
        if self.old.fingerprint == self.new.fingerprint:
            raise ValueError(
                "expected two different models, an old and a new one, got the same fingerprint "
                "for both"
            )
        return self


def converter_path(converter_number: int) -> str:
    """Return the published path of a converter's ONNX file."""
    return f"converter-{converter_number}.onnx"


def converter_manifest_path(converter_number: int) -> str:
    """Return the published path of a converter's manifest."""
    return f"converter-{converter_number}.json"


def parse_converter_number(path: str) -> int | None:
    """Return N of `converter-N.json`, None for every other path. Zero, leading zeros and more than
    seven digits give None."""
    match = _MANIFEST.fullmatch(path)
    return int(match[1]) if match is not None else None


def parse_converter(text: str | bytes, converter_number: int) -> Converter:
    """Parse the manifest of a converter.

    Args:
        text: The JSON, in UTF-8.
        converter_number: The number that it must have, as the file's name says.

    Raises:
        UnfitError: It is no JSON, breaks a rule, has another number, or may need a newer version of
            this program. The message is one line.
    """
    try:
        manifest = Converter.model_validate_json(text)
    except ValidationError as error:
        raise UnfitError(
            f"converter {converter_number}: its manifest cannot be used "
            f"({join_validation_problems(error)}); it may need a newer nobackfill"
        ) from error
    if manifest.converter != converter_number:
        raise UnfitError(
            f"converter {converter_number}: its manifest has the number of another converter, "
            f"{manifest.converter}; its publisher must publish it again"
        )
    return manifest


def _config(name: str, ends: ModelInterface) -> str:
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {_LARGEST_BATCH}"]
    for direction, tensors in zip(("input", "output"), ends, strict=True):
        for tensor, dtype, shape in tensors:
            # Triton has no tensors without dimensions; `reshape` expresses one number for each
            # item.
            dims = ", ".join(str(-1 if size is None else size) for size in shape or (1,))
            reshape = "" if shape else " reshape { shape: [ ] }"
            kind = _TRITON_TYPES[dtype]
            lines.append(
                f'{direction} {{ name: "{tensor}" data_type: {kind} dims: [ {dims} ]{reshape} }}'
            )
    # No queue delay: it would be half of the latency of a single client (measured 500 us of 1 ms).
    lines.append("dynamic_batching { }")
    # Triton's default on a CPU is two instances: twice the memory and twice the start time.
    lines.append("instance_group [ { count: 1 } ]")
    return "\n".join(lines) + "\n"
