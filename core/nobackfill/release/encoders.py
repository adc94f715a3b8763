"""What a manifest says of the models that embed: images, texts, side-information; or of none."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from nobackfill.digests import sha256_bytes, space_id
from nobackfill.framing import Fit, Interpolation
from nobackfill.release import paths
from nobackfill.vectors import Metric

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ReleaseNumber = Annotated[int, Field(ge=1, le=1_000_000)]
# Who asks, and what is found: asymmetric models read them differently.
TextRole = Literal["query", "document"]
TEXT_ROLES: tuple[TextRole, ...] = ("query", "document")
LARGEST_LENGTH = 8192
# Of manifests; the last is paths.NEWEST_FORMAT.
Format = Literal[1, 2, 3, 4]


def _plain_path(path: str) -> str:
    if not paths.is_plain(path):
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


class Embedder(Strict):
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


class SideEncoder(Strict):
    """psi_N. ONNX input `image` uint8 [n,H,W,3] at the embedder's size, output `side` float32
    [n,dim].

    `origin_release` is the release that first published these weights: a release may keep its
    predecessor's encoder (same file, same side space), then side-information is carried unchanged.
    """

    file: PublishedFile
    dim: int = Field(ge=1, le=65536)
    origin_release: ReleaseNumber


def space_of(embedder: Embedder, text: TextEncoder | None = None) -> str:
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


def trouble(embedder: Embedder, text: TextEncoder | None) -> str | None:
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


def format_of(embedder: Embedder, text: TextEncoder | None) -> Format:
    """The lowest format whose readers understand it: 2 has texts, another fit than stretch, or no
    model of images; 3 has a model of its own for queries; 4 another interpolation than bilinear."""
    if embedder.interpolation != "bilinear":
        return 4
    if text is not None and text.query_file is not None:
        return 3
    new = text is not None or embedder.file is None or embedder.fit != "stretch"
    return 2 if new else 1


def _beside(embedder: Embedder, text: TextEncoder | None) -> Iterator[tuple[str, str | int]]:
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
