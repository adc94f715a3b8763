"""Run the text encoder of a release: tokenizer, ONNX file, checks of every output."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from nobackfill.errors import InvalidInputError, VerificationError
from nobackfill.release.manifest import Manifest, TextRole
from nobackfill.release.models import Files, Session, check_output, open_session, read_verified_file
from nobackfill.text import BatchTokenizer, Tokens
from nobackfill.vectors import Vectors


class TextReader:
    """Turn texts into the inputs of a release's text encoder: prefix, then tokens."""

    def __init__(self, files: Files, manifest: Manifest) -> None:
        """Load the tokenizer of a release.

        Raises:
            NoEncoderError: The release embeds no texts.
            VerificationError: The tokenizer's file is missing, cannot be read, differs from the
                manifest's, is no tokenizer, crashes, or leaves no room for text.
            ConfigurationError: The extra `text` is not installed.
        """
        self._spec = manifest.reads_text
        path = self._spec.tokenizer.path
        try:
            self._tokenizing = BatchTokenizer(
                read_verified_file(files, self._spec.tokenizer), self._spec.length, path
            )
        except InvalidInputError as error:
            raise VerificationError(
                f"release {manifest.release}: its tokenizer is unusable ({error}), so the release "
                "is not used; its publisher must publish it again"
            ) from error

    def tokenize(self, texts: Sequence[str], role: TextRole) -> Tokens:
        """Tokenize texts for the encoder.

        Sizes and blank texts are not checked here; `nobackfill.text.check_text` does that. Texts
        beyond the encoder's length are truncated.

        Args:
            texts: n texts.
            role: query or document; it decides the prefix.

        Returns:
            Each input of the encoder, int64 [n, t]; t is the length of the longest text in tokens.
            Without texts each has shape [0].

        Raises:
            InvalidInputError: The tokenizer refuses a text.
            DefectiveTokenizerError: The tokenizer crashes on a text.
        """
        prefix = self._spec.prefix(role)
        return self._select_inputs(self._tokenizing.tokenize([prefix + text for text in texts]))

    @cached_property
    def largest_token_inputs(self) -> Tokens:
        """Return the inputs for one text of one token, the one with the largest id, each int64 [1,
        1].

        They are computed once.
        """
        one = np.full((1, 1), self._tokenizing.largest_token_id(), np.int64)
        mask, types = np.ones_like(one), np.zeros_like(one)
        return self._select_inputs(
            {"input_ids": one, "attention_mask": mask, "token_type_ids": types}
        )

    def _select_inputs(self, tokens: Tokens) -> Tokens:
        return {name: tokens[name] for name in self._spec.inputs}


class TextModel:
    """The text encoder of a release; opened by `open_text_encoder`."""

    def __init__(
        self, sessions: Mapping[TextRole, Session], reader: TextReader, manifest: Manifest
    ) -> None:
        self._sessions = sessions
        self.reader = reader
        self._spec = manifest.embedder

    def run(self, texts: Sequence[str], role: TextRole) -> Vectors:
        """Embed texts.

        Longer ones are truncated to the encoder's length without an error. Threads may call it at
        the same time.

        Args:
            texts: At least one text; `nobackfill.text.check_text` is not called here.
            role: query or document; it decides the prefix and the model. A release without a query
                model uses one model for both.

        Returns:
            float32 [n, dim], in the order of `texts`.

        Raises:
            InvalidInputError: The tokenizer refuses a text, or crashes on it
                (DefectiveTokenizerError).
            VerificationError: There are no texts, onnxruntime cannot run the model, or its output
                has another shape.
            UnusableOutputError: Some outputs are no vectors of the space; the error lists the rows.
            KeyError: Another role.
        """
        return self.embed(self.reader.tokenize(texts, role), role)

    def embed(self, tokens: Tokens, role: TextRole) -> Vectors:
        """Embed tokens with the model of a role.

        Threads may call it at the same time. Tokens of no text are refused with VerificationError.

        Args:
            tokens: The inputs of the encoder, from `TextReader.tokenize`, each int64 [n, t].
            role: query or document; it decides the model. The prefix is in the tokens already.

        Returns:
            float32 [n, dim], in the order of the texts.

        Raises:
            UnusableOutputError: The model returns no usable vector for some texts; the error lists
                the rows.
            VerificationError: onnxruntime cannot run the model, or its output has another shape.
            KeyError: Another role, or tokens without `input_ids`.
        """
        (embedding,) = self._sessions[role].run(dict(tokens), ["embedding"])
        count = len(tokens["input_ids"])
        return check_output(
            embedding, count, self._spec.dim, "embedding", unit_norm=self._spec.unit
        )


def open_text_encoder(files: Files, manifest: Manifest, threads: int = 1) -> TextModel:
    """Load the text encoder of a release on the CPU.

    A release with a model for queries opens two sessions. They need no closing.

    Args:
        files: The publication folder or the draft's files.
        manifest: The release.
        threads: Threads of each session, at least 1.

    Raises:
        NoEncoderError: The release embeds no texts.
        VerificationError: A file is missing, cannot be read, differs from the manifest's, or cannot
            be loaded.
        ConfigurationError: The extra `text` is not installed.
    """
    reader = TextReader(files, manifest)
    text = manifest.reads_text
    documents = open_session(files, text.file, threads)
    queries = documents
    if text.query_file is not None:
        queries = open_session(files, text.query_file, threads)
    return TextModel({"document": documents, "query": queries}, reader, manifest)


def no_text_vector_error(manifest: Manifest) -> InvalidInputError:
    """Return, without raising it, the error for a text of which the release's model makes no usable
    vector."""
    return InvalidInputError(
        f"text: the model of release {manifest.release} returns no usable vector for this text "
        "(zero, or not finite); leave the text out"
    )
