"""Embed texts by an HTTP endpoint like that of OpenAI's embeddings: `POST {"model", "input"}`."""

import hashlib
import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import urllib3
from pydantic import BaseModel, Field, ValidationError

from nobackfill.adopt.sources.source import stack_vectors
from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    InvalidInputError,
    NobackfillError,
    NotPermittedError,
    UnavailableError,
    UnusableItemsError,
    UnusableRowsError,
)
from nobackfill.loopback import is_loopback
from nobackfill.vectors import InputKind, Vectors, check_vectors

# The variable that holds the bearer's key.
KEY_VARIABLE = "NOBACKFILL_ENDPOINT_KEY"
# Statuses after which a retry may succeed; 52x is the status of a proxy whose server timed out.
_LATER = {408, 409, 425, 429, 500, 502, 503, 504, *range(520, 525), 529}
# Statuses that may be due to a text, or to the number of texts.
_OF_ITEMS = {400, 413, 422}
# After so many tries, a plain text shows whether these texts cause the server's fault.
_TRIES = 3
# A text that every model can embed.
_PLAIN = "text"
# The most bytes of an answer for each text; 16,000 dimensions as decimal numbers take half.
_MOST_BYTES = 1 << 20
_PIECE = 1 << 16
_DIMENSIONS = re.compile(r"dimensions=([1-9][0-9]{0,5})")
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 30.0


class _Vector(BaseModel):
    index: int
    embedding: list[float] = Field(min_length=1)


class _Answer(BaseModel):
    data: list[_Vector]


class _Fault(BaseModel):
    message: str = ""
    code: int | str | None = None


class _Failed(BaseModel):
    """An error that an endpoint reports instead of an answer, also with status 200."""

    error: _Fault | str


class Endpoint:
    """The Embedder of an HTTP endpoint for texts.

    It repeats a request after status 429, a fault of the server or an incomplete answer, and waits
    as long as the header Retry-After tells. Texts leave this machine only over TLS. The variable
    NOBACKFILL_ENDPOINT_KEY holds the key. Nothing is sent before `embed`. The key is read from the
    environment at each request; without one, none is sent.

    Args:
        url: Address of the endpoint: https://, or http:// on this machine. `#dimensions=512` behind
            it is sent as `dimensions`, for models that shorten their vectors.
        model: Name of the model there; with `url`, it determines the fingerprint.
        patience: Seconds for which one request is repeated. 0 tries once.
        timeout: Seconds to wait for one answer.

    Raises:
        ConfigurationError: The address has another form, or holds a password.
    """

    input_kind: InputKind | None = "text"
    text_role = ""

    def __init__(
        self, url: str, model: str, *, patience: float = 120.0, timeout: float = 60.0
    ) -> None:
        try:
            parsed = urllib3.util.parse_url(url)
        except urllib3.exceptions.LocationParseError:
            parsed = urllib3.util.Url()
        if parsed.host is None or parsed.auth is not None:
            raise ConfigurationError(
                "address of the endpoint: expected https://HOST/PATH without a user name and "
                "password (this message leaves them out); put the API key in the environment "
                f"variable {KEY_VARIABLE}"
            )
        address, _, settings = url.partition("#")
        # The query may hold a secret.
        self._name = address.partition("?")[0]
        self._settings: dict[str, Any] = {}
        if settings:
            if (number := _DIMENSIONS.fullmatch(settings)) is None:
                raise ConfigurationError(
                    f"{self._name}: expected nothing or dimensions=NUMBER after #, got "
                    f"{settings[:64]!r}; correct the address"
                )
            self._settings["dimensions"] = int(number[1])
        if parsed.scheme != "https" and not is_loopback(parsed.host or ""):
            raise ConfigurationError(
                f"{self._name}: expected https://, because texts are private; http:// is accepted "
                "for an endpoint on this machine"
            )
        self._url, self._model, self._patience = address, model, patience
        self._http = urllib3.PoolManager(retries=False, timeout=timeout)
        self._timeout = timeout
        self._dim: int | None = self._settings.get("dimensions")
        self._texts_bring_faults = False
        # The weights cannot be read, so the fingerprint covers their name alone.
        self.fingerprint = hashlib.sha256(f"{url}\n{model}".encode()).hexdigest()

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        """Send texts to the endpoint in one request, and return their vectors.

        The request is repeated for `patience` seconds while the endpoint is busy or fails.

        It blocks until then; one answer may take `timeout` seconds more. After three faults of the
        server it also sends a plain text, to see whether these texts cause them. Redirects are not
        followed. Each item is sent as its text.

        Args:
            items: n texts, at least one.

        Returns:
            float32 [n, dim], finite, in the order of `items`. The first answer fixes the dimension,
            unless the address declares it.

        Raises:
            UnusableItemsError: The endpoint refuses these texts, or their number. A vector holds
                NaN or infinity, or the server fails with these texts and not with a plain one.
            InvalidInputError: The answer is malformed or has another dimension than before, or the
                endpoint refuses every text. The endpoint answers with a status that a retry cannot
                help, or the answer is larger than 1 MiB for each text.
            NotPermittedError: The endpoint refuses the key.
            BusyError: It still answers 429 after `patience` seconds.
            UnavailableError: It still does not answer, or fails, after `patience` seconds.
            ValueError: The key of the environment has a line break, or a character beyond Latin-1.
        """
        try:
            return self._embedded([str(item) for item in items])
        except UnusableItemsError as error:
            if len(items) == 1 and not self._takes_plain():
                raise InvalidInputError(
                    f"{error}; the endpoint refuses every other text as well, so check the name "
                    "of the model and the address"
                ) from error
            raise

    def _takes_plain(self) -> bool:
        """Return whether the endpoint embeds a plain text, so that other texts are the cause."""
        try:
            self._embedded([_PLAIN], patient=False)
        except NobackfillError:
            return False
        return True

    def _embedded(self, texts: list[str], *, patient: bool = True) -> Vectors:
        answer = self._asked(
            {"model": self._model, "input": texts, **self._settings}, patient=patient
        )
        ordered = [one.embedding for one in sorted(answer.data, key=lambda one: one.index)]
        vectors = stack_vectors(ordered, [str(n) for n in range(len(texts))], self._name)
        if self._dim is not None and vectors.shape[1] != self._dim:
            source = "as declared" if self._settings else "as before"
            raise InvalidInputError(
                f"{self._name}: expected vectors of dimension {self._dim} {source}, got "
                f"{vectors.shape[1]}; check that {self._model!r} always names the same model at "
                "the endpoint"
            )
        self._dim = vectors.shape[1]
        try:
            return check_vectors(vectors, self._dim, error_name=self._name)
        except UnusableRowsError as error:
            raise UnusableItemsError(str(error)) from error

    def _asked(self, body: dict[str, Any], *, patient: bool) -> _Answer:
        deadline, wait, tries = time.monotonic() + self._patience, _FIRST_WAIT / 2, 0
        while True:
            said = self._once(body)
            if isinstance(said, _Answer):
                return said
            if not patient:
                raise said.error
            wait = (
                said.retry_seconds
                if said.retry_seconds is not None
                else min(_LONGEST_WAIT, 2 * wait)
            )
            over, tries = time.monotonic() + wait > deadline, tries + 1
            # A retry cannot help where these texts cause the fault.
            look = said.faulty and (over or tries >= _TRIES or self._texts_bring_faults)
            if look and self._takes_plain():
                self._texts_bring_faults = True
                raise UnusableItemsError(f"{self._name}: the endpoint {said.words}")
            if over:
                raise said.error
            time.sleep(wait)

    def _once(self, body: dict[str, Any]) -> "_Answer | _Refusal":
        """Send one request.

        Returns:
            The answer, or a refusal after which a retry may succeed.

        Raises:
            NotPermittedError: The endpoint refuses the key.
            UnusableItemsError: The texts may be the cause.
            InvalidInputError: A retry cannot help.
        """
        key = os.environ.get(KEY_VARIABLE)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            response = self._http.request(
                "POST", self._url, json=body, headers=headers, redirect=False, preload_content=False
            )
            data = self._read(response, _MOST_BYTES * (1 + len(body["input"])))
        except urllib3.exceptions.HTTPError as error:
            return _Refusal(
                UnavailableError(
                    f"{self._name}: the endpoint does not answer ({error}); check its address, "
                    "then run the command again"
                )
            )
        if response.status in (401, 403):
            raise NotPermittedError(
                f"{self._name}: the endpoint refuses the API key; put a valid one in the "
                f"environment variable {KEY_VARIABLE}{_colon(data)}"
            )
        if response.status == 200:
            return self._answer(data, len(body["input"]))
        return self._refused(
            response.status, response.status, data, response.headers.get("Retry-After")
        )

    def _refused(
        self, status: int, http_status: int, data: bytes, retry_after: str | None = None
    ) -> "_Refusal":
        """Decide by a status whether a retry may succeed.

        Args:
            status: The status, or the code of an error inside an answer of status 200.
            http_status: The status of the answer.
            data: The answer.
            retry_after: Its header Retry-After; None without.

        Raises:
            UnusableItemsError: The texts may be the cause.
            InvalidInputError: A retry cannot help.
        """
        words, said = f"answers {http_status}", _colon(data)
        if status in _OF_ITEMS:
            raise UnusableItemsError(f"{self._name}: the endpoint {words}{said}")
        if status not in _LATER and http_status != 200:
            raise InvalidInputError(
                f"{self._name}: the endpoint {words}{said}; check the address and the name of the "
                "model"
            )
        kind, seconds = BusyError if status == 429 else UnavailableError, _seconds(retry_after)
        advice = (
            "try again later"
            if seconds is None
            else f"it asks to wait {seconds:.0f} s: try again then, or allow that with --patience"
        )
        error = kind(
            f"{self._name}: the endpoint still {words} after {self._patience:g} s{said}; {advice}"
        )
        return _Refusal(error, words + said, seconds, faulty=status == 500)

    def _answer(self, data: bytes, count: int) -> "_Answer | _Refusal":
        """Parse the answer of a request with status 200.

        Returns:
            The answer, or a refusal after which a retry may succeed.

        Raises:
            UnusableItemsError: The texts may be the cause.
            InvalidInputError: A retry cannot help.
        """
        try:
            answer = _Answer.model_validate_json(data)
        except ValidationError as error:
            if (fault := _fault(data)) is not None:
                code = str(fault.code)
                return self._refused(int(code) if code.isdecimal() else 503, 200, data)
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            why = InvalidInputError(
                f"{self._name}: expected an answer in the form of OpenAI's embeddings API, got "
                f"another ({f'{place}: ' if place else ''}{first['msg']}); check the address"
            )
            if first["loc"][2:3] == ("embedding",):
                raise UnusableItemsError(str(why)) from error
            if data.startswith(b"{") and first["type"] == "json_invalid":
                # The answer is incomplete.
                return _Refusal(why)
            raise why from error
        found = Counter(one.index for one in answer.data)
        strange = [n for n in found if not 0 <= n < count or found[n] > 1]
        if strange:
            raise InvalidInputError(
                f"{self._name}: the answer of the endpoint must have each index from 0 to "
                f"{count - 1} once; it has index {strange[0]} {found[strange[0]]} times. Check "
                "that the endpoint follows OpenAI's embeddings API"
            )
        if len(found) != count:
            return _Refusal(
                InvalidInputError(
                    f"{self._name}: the endpoint must return one vector for each text; it returned "
                    f"{len(found)} for {count} texts. Check that it follows OpenAI's embeddings API"
                )
            )
        return answer

    def _read(self, response: urllib3.BaseHTTPResponse, most: int) -> bytes:
        """Read the body of an answer.

        Raises:
            InvalidInputError: It has more than `most` bytes.
            HTTPError: It does not end within the timeout.
        """
        end, data = time.monotonic() + self._timeout, bytearray()
        while piece := response.read1(_PIECE):
            data += piece
            if len(data) > most:
                response.close()
                raise InvalidInputError(
                    f"{self._name}: expected an answer of at most {most} bytes from the endpoint, "
                    "got more; check its address"
                )
            if time.monotonic() > end:
                response.close()
                raise urllib3.exceptions.TimeoutError("the answer does not end")
        return bytes(data)


@dataclass(frozen=True)
class _Refusal:
    """An answer after which a retry may succeed.

    Attributes:
        error: The error to raise when the patience ends.
        words: The endpoint's own words.
        retry_seconds: Seconds that the server asks to wait; None if it does not.
        faulty: Whether the server failed, which these texts may have caused.
    """

    error: NobackfillError
    words: str = ""
    retry_seconds: float | None = None
    faulty: bool = False


def _seconds(retry_after: str | None) -> float | None:
    """Parse Retry-After, a number of seconds or a date; None for neither."""
    if retry_after is None:
        return None
    if retry_after.isascii() and retry_after.replace(".", "", 1).isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _fault(data: bytes) -> _Fault | None:
    try:
        said = _Failed.model_validate_json(data).error
    except ValidationError:
        return None
    return _Fault(message=said) if isinstance(said, str) else said


def _colon(data: bytes) -> str:
    """Quote an endpoint's own words on one line, behind a colon."""
    fault = _fault(data)
    text = data[:4096].decode(errors="replace") if fault is None else fault.message
    line = " ".join(text.split())[:200]
    return f": {line}" if line else ""
