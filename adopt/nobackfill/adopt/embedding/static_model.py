"""Run a model of static embeddings: the mean of a table's rows, one for each token of a text.

sentence-transformers (StaticEmbedding) and model2vec save such models. Neither torch nor an ONNX
file is needed.
"""

import json
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field

from nobackfill.adopt.embedding.text_files import fingerprint_and_role, finish_vectors
from nobackfill.errors import InvalidInputError, UnusableItemsError
from nobackfill.release.publishing.declaration import Declaration
from nobackfill.release.publishing.sentence_head import WEIGHTS, read_model_file
from nobackfill.release.publishing.sentence_modules import parse_model_file
from nobackfill.release.publishing.text_folder import RoleFiles, TextFiles, read_embedding_table
from nobackfill.text import BagTokenizer
from nobackfill.vectors import InputKind, Vectors


class Model2vecConfig(BaseModel):
    """The config.json of model2vec, with its defaults.

    Attributes:
        normalize: Whether vectors are scaled to norm 1.
        max_length: Tokens after which a text is truncated; None: no limit.
    """

    normalize: bool = False
    max_length: int | None = Field(512, ge=1)


class StaticModel:
    """The Embedder of a table with a vector for each token.

    Args:
        files: The files of both roles; the first of the weights is the table's.
        queries: Whether the texts are queries.
        model2vec: The settings of a folder that model2vec saved. Texts are then read as model2vec
            reads them: truncated, and without their unknown tokens. None: as sentence-transformers
            reads them.

    Raises:
        InvalidInputError: A file is missing or cannot be read, or the tokenizer has tokens that the
            table does not have.
        ConfigurationError: An extra is not installed.
        OSError: A file of the model cannot be read.
    """

    input_kind: InputKind | None = "text"

    def __init__(
        self, files: RoleFiles, *, queries: bool, model2vec: Model2vecConfig | None = None
    ) -> None:
        own = files["query" if queries else "document"]
        self._declared = own.declaration
        self._table_file = own.weights[0]
        self._table = read_embedding_table(self._table_file)
        data = read_model_file(own.tokenizer)
        self._tokenizer = BagTokenizer(data, str(own.tokenizer))
        self._unknown: int | None = None
        self._characters: int | None = None
        vocabulary = self._tokenizer.vocabulary()
        if model2vec is not None:
            self._unknown = _unknown_token(data, vocabulary)
            self._tokenizer.truncate_at(model2vec.max_length)
            if model2vec.max_length is not None and vocabulary:
                # model2vec also cuts a text before it looks for tokens.
                median = int(np.median([len(token) for token in vocabulary]))
                self._characters = model2vec.max_length * median
        largest = max(vocabulary.values(), default=-1)
        if largest >= len(self._table):
            raise InvalidInputError(
                f"{self._table_file}: expected a row for each token of {own.tokenizer}, whose "
                f"largest id is {largest}, got {len(self._table)} rows; copy both files from one "
                "model"
            )
        self._layers = [layer.open() for layer in self._declared.layers]
        self._prefix = self._declared.prefix_of_queries if queries else self._declared.prefix
        self.fingerprint, self.text_role = fingerprint_and_role(files, queries=queries)

    @property
    def declared(self) -> dict[str, object]:
        """Return the fields of the declaration, which the fingerprint covers besides the files."""
        return self._declared.model_dump()

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        """Embed texts.

        A text without a known token gets a vector of zeros, as by the library. One bad text refuses
        all.

        Args:
            items: n texts, at least one.

        Returns:
            float32 [n, dim], finite, in the order of `items`.

        Raises:
            UnusableItemsError: A text cannot be tokenized, or a vector holds NaN or infinity.
            InvalidInputError: Declared modules behind the table do not fit its vectors.
        """
        texts = [(self._prefix + str(item))[: self._characters] for item in items]
        try:
            tokens = self._tokenizer.token_ids(texts)
        except InvalidInputError as error:
            raise UnusableItemsError(str(error)) from error
        vectors = np.zeros((len(texts), self._table.shape[1]), np.float32)
        for row, ids in enumerate(tokens):
            known = ids if self._unknown is None else ids[ids != self._unknown]
            if len(known):
                vectors[row] = self._table[known].mean(0)
        return finish_vectors(vectors, self._layers, self._declared, self._table_file)


def _unknown_token(tokenizer: bytes, vocabulary: dict[str, int]) -> int | None:
    """Return the id of the token that stands for unknown words; None if there is none."""
    model = json.loads(tokenizer)["model"]
    if "unk_token" in model:
        return vocabulary.get(model["unk_token"])
    # A Unigram model names its id.
    found = model.get("unk_id")
    return found if isinstance(found, int) else None


def open_model2vec(folder: Path, *, queries: bool) -> StaticModel:
    """Open a folder that model2vec saved.

    Args:
        folder: The folder, with config.json, tokenizer.json and model.safetensors.
        queries: Whether the texts are queries.

    Raises:
        InvalidInputError: A file cannot be read, or the tokenizer has tokens that the table does
            not have.
        ConfigurationError: An extra is not installed.
        OSError: A file of the model cannot be read.
    """
    file = folder / "config.json"
    config = parse_model_file(file, Model2vecConfig)
    declared = Declaration(pooling="none", normalise=config.normalize)
    files = TextFiles((folder / WEIGHTS, file), declared, folder / "tokenizer.json")
    both: RoleFiles = {"document": files, "query": files}
    return StaticModel(both, queries=queries, model2vec=config)
