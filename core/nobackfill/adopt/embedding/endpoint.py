"""An HTTP endpoint in the shape of OpenAI's embeddings: `POST {"model", "input"}`."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import urllib3
from pydantic import BaseModel, Field, ValidationError

from nobackfill.adopt.sources.source import even
from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    InvalidInputError,
    NotPermittedError,
    UnavailableError,
)
from nobackfill.items.kind import Kind
from nobackfill.loopback import is_loopback
from nobackfill.vectors import Vectors, check_vectors

# The variable that holds the bearer's key.
KEY = "NOBACKFILL_ENDPOINT_KEY"
# Statuses after which the same request may be answered later.
_LATER = {408, 409, 429, 500, 502, 503, 504}
# Of an answer, for each text: 16,000 dimensions as decimal numbers take half of it.
_MOST_BYTES = 1 << 20
_PIECE = 1 << 16
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 30.0


class _Vector(BaseModel):
    index: int
    embedding: list[float] = Field(min_length=1)


class _Answer(BaseModel):
    data: list[_Vector]


class Endpoint:
    """Texts by an endpoint, `model` its name there; asked again after 429 and faults of the server
    for at most `patience` seconds a batch. Texts go over TLS, or to this machine."""

    kind: Kind | None = "text"
    reads = ""

    def __init__(
        self, url: str, model: str, *, patience: float = 120.0, timeout: float = 60.0
    ) -> None:
        try:
            parsed = urllib3.util.parse_url(url)
        except urllib3.exceptions.LocationParseError:
            parsed = urllib3.util.Url()
        if parsed.host is None or parsed.auth is not None:
            raise ConfigurationError(
                f"--with: expected https://HOST/PATH, and the key in {KEY}; it is not repeated here"
            )
        # Without what may be a secret.
        self._name = url.partition("?")[0]
        if parsed.scheme != "https" and not is_loopback(parsed.host or ""):
            raise ConfigurationError(f"{self._name}: expected https://; texts are private")
        self._url, self._model, self._patience = url, model, patience
        self._http = urllib3.PoolManager(retries=False, timeout=timeout)
        self._timeout = timeout
        self._dim: int | None = None
        # The weights are out of sight: their name is all that can be told.
        self.fingerprint = hashlib.sha256(f"{url}\n{model}".encode()).hexdigest()

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        answer = self._asked({"model": self._model, "input": [str(item) for item in items]})
        if sorted(one.index for one in answer.data) != list(range(len(items))):
            raise InvalidInputError(
                f"{self._name}: expected {len(items)} vectors, got {len(answer.data)}"
            )
        ordered = [one.embedding for one in sorted(answer.data, key=lambda one: one.index)]
        vectors = even(ordered, [str(n) for n in range(len(items))], self._name)
        if self._dim is not None and vectors.shape[1] != self._dim:
            raise InvalidInputError(
                f"{self._name}: expected vectors of dimension {self._dim} as before, got "
                f"{vectors.shape[1]}; does {self._model!r} name one model?"
            )
        self._dim = vectors.shape[1]
        return check_vectors(vectors, self._dim, what=self._name)

    def _asked(self, body: dict[str, Any]) -> _Answer:
        deadline, wait = time.monotonic() + self._patience, _FIRST_WAIT
        while True:
            said, after = self._once(body)
            if isinstance(said, _Answer):
                return said
            wait = min(_LONGEST_WAIT, after if after is not None else 2 * wait)
            if time.monotonic() + wait > deadline:
                raise said
            time.sleep(wait)

    def _once(
        self, body: dict[str, Any]
    ) -> tuple[_Answer | BusyError | UnavailableError, float | None]:
        """An answer, or what to raise when patience ends and the seconds the server asks for."""
        key = os.environ.get(KEY)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            got = self._http.request(
                "POST", self._url, json=body, headers=headers, redirect=False, preload_content=False
            )
            data = self._read(got, _MOST_BYTES * (1 + len(body["input"])))
        except urllib3.exceptions.HTTPError as error:
            return UnavailableError(f"{self._name}: does not answer ({error})"), None
        if got.status in (401, 403):
            raise NotPermittedError(f"{self._name}: refuses the key; set {KEY}")
        if got.status in _LATER:
            after = got.headers.get("Retry-After", "")
            kind = BusyError if got.status == 429 else UnavailableError
            refusal = kind(f"{self._name}: still answers {got.status} after {self._patience:g} s")
            return refusal, float(after) if after.replace(".", "", 1).isdecimal() else None
        if got.status != 200:
            raise InvalidInputError(f"{self._name}: answers {got.status}: {data[:200]!r}")
        try:
            return _Answer.model_validate_json(data), None
        except ValidationError as error:
            raise InvalidInputError(
                f"{self._name}: expected an answer in the shape of OpenAI's embeddings "
                f"({error.errors()[0]['msg']})"
            ) from error

    def _read(self, got: urllib3.BaseHTTPResponse, most: int) -> bytes:
        """The body, which no server can make endless. Raises InvalidInputError, HTTPError."""
        end, data = time.monotonic() + self._timeout, bytearray()
        while piece := got.read1(_PIECE):
            data += piece
            if len(data) > most:
                got.close()
                raise InvalidInputError(f"{self._name}: expected at most {most} bytes, got more")
            if time.monotonic() > end:
                got.close()
                raise urllib3.exceptions.TimeoutError("the answer does not end")
        return bytes(data)
