"""Running a release's text encoder: tokenizer, ONNX file, then every output checked."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from nobackfill.errors import InvalidInputError, VerificationError
from nobackfill.release.manifest import Manifest, TextRole
from nobackfill.release.models import Files, Session, checked_output, open_session, read_verified
from nobackfill.text import Tokenizing, Tokens
from nobackfill.vectors import Vectors


class TextReader:
    """Texts to what the encoder takes: prefix, tokens, and of those the inputs that it has."""

    def __init__(self, files: Files, manifest: Manifest) -> None:
        """Raises NoEncoderError, VerificationError, ConfigurationError without the extra `text`."""
        self._spec = manifest.reads_text
        path = self._spec.tokenizer.path
        try:
            self._tokenizing = Tokenizing(
                read_verified(files, self._spec.tokenizer), self._spec.length, path
            )
        except InvalidInputError as error:
            raise VerificationError(f"{error}; refused") from error

    def feed(self, texts: Sequence[str], role: TextRole) -> Tokens:
        """Each input int64 [n,t]. Raises InvalidInputError."""
        prefix = self._spec.prefix(role)
        return self._taken(self._tokenizing.tokens([prefix + text for text in texts]))

    @cached_property
    def outermost(self) -> Tokens:
        """One text of one token, that of the largest id."""
        one = np.full((1, 1), self._tokenizing.largest(), np.int64)
        mask, types = np.ones_like(one), np.zeros_like(one)
        return self._taken({"input_ids": one, "attention_mask": mask, "token_type_ids": types})

    def _taken(self, tokens: Tokens) -> Tokens:
        return {name: tokens[name] for name in self._spec.inputs}


class TextModel:
    """Texts to embeddings. Made by `open_text_encoder`."""

    def __init__(
        self, sessions: Mapping[TextRole, Session], reader: TextReader, manifest: Manifest
    ) -> None:
        self._sessions = sessions
        self.reader = reader
        self._spec = manifest.embedder

    def run(self, texts: Sequence[str], role: TextRole) -> Vectors:
        """Texts, at least one, to float32 [n,dim].

        Raises InvalidInputError for texts that cannot be read, VerificationError for outputs that
        are no vectors of the release's space, UnusableOutputError where only some are none.
        """
        return self.embed(self.reader.feed(texts, role), role)

    def embed(self, tokens: Tokens, role: TextRole) -> Vectors:
        """The same, of tokens."""
        (embedding,) = self._sessions[role].run(dict(tokens), ["embedding"])
        count = len(tokens["input_ids"])
        return checked_output(embedding, count, self._spec.dim, "embedding", unit=self._spec.unit)


def open_text_encoder(files: Files, manifest: Manifest, threads: int = 1) -> TextModel:
    """Load a release's text encoder on the CPU. Raises NoEncoderError, VerificationError,
    ConfigurationError without the extra `text`."""
    reader = TextReader(files, manifest)
    text = manifest.reads_text
    documents = open_session(files, text.file, threads)
    queries = documents
    if text.query_file is not None:
        queries = open_session(files, text.query_file, threads)
    return TextModel({"document": documents, "query": queries}, reader, manifest)


def no_text_vector(manifest: Manifest) -> InvalidInputError:
    """The refusal of a text that a release's model turns into nothing that can be compared."""
    return InvalidInputError(
        f"text: the model of release {manifest.release} makes no vector of it (zero, or not finite)"
    )
