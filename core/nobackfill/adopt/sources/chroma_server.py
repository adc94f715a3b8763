"""A Chroma server by its HTTP API (v2): its own client brings 80 packages and their pins."""

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import urllib3

from nobackfill import forks
from nobackfill.adopt.sources.server_address import STATUSES, server_address
from nobackfill.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)

# The variable that holds a server's token.
KEY = "NOBACKFILL_CHROMA_TOKEN"
_DEFAULT = ("default_tenant", "default_database")
_SECONDS = 60.0
_STATUSES = STATUSES | {409: AlreadyExistsError}


class ChromaServer:
    """`place`: https://HOST:PORT (http:// on this machine), with /TENANT/DATABASE where they are
    not the default ones. Raises ConfigurationError, InvalidInputError."""

    def __init__(self, place: str) -> None:
        if "://" not in place:
            raise InvalidInputError(
                f"chroma: expected https://HOST:PORT, got a folder; its server is started by "
                f"`chroma run --path {place}`, then chroma:http://localhost:8000#COLLECTION"
            )
        parts = server_address(place, "chroma", KEY)
        names = [name for name in parts.path.split("/") if name]
        if len(names) not in (0, 2):
            raise InvalidInputError(
                "chroma: expected https://HOST:PORT or https://HOST:PORT/TENANT/DATABASE"
            )
        tenant, database = map(_part, names or _DEFAULT)
        self._root = (
            f"{parts.scheme}://{parts.netloc}/api/v2/tenants/{tenant}/databases/{database}"
            "/collections"
        )
        self._http = _pool()
        forks.watch(self)

    def before_fork(self) -> None:
        """Requests of other threads go on in the parent alone."""

    def after_fork(self, child: bool) -> None:
        if child:
            self._http = _pool()

    def collection(self, name: str) -> dict[str, Any]:
        """What the server says of a collection. Raises NotFoundError."""
        try:
            found: dict[str, Any] = self.asked("GET", f"/{_part(name)}", name)
        except NotFoundError as error:
            there = [one["name"] for one in self.asked("GET", "?limit=4", name)]
            raise NotFoundError(
                f"{name}: no such collection; there are {', '.join(there) or 'none'}"
            ) from error
        return found

    def make(self, body: Mapping[str, Any], name: str) -> None:
        self.asked("POST", "", name, body)

    def drop(self, name: str) -> None:
        self.asked("DELETE", f"/{_part(name)}", name)

    def asked(
        self, method: str, path: str, name: str, body: Mapping[str, Any] | None = None
    ) -> Any:
        """The answer below `path` of the collections; `name`: what is asked about, for sentences.

        Raises UnavailableError, NotFoundError, NotPermittedError, BusyError, InvalidInputError.
        """
        token = os.environ.get(KEY)
        headers = {"x-chroma-token": token, "Authorization": f"Bearer {token}"} if token else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = None if body is None else json.dumps(body).encode()
        try:
            got = self._http.request(
                method, self._root + path, body=data, headers=headers, redirect=False
            )
        except urllib3.exceptions.HTTPError as error:
            raise UnavailableError(f"{name}: Chroma does not answer ({error})") from error
        if got.status >= 300:
            ours = _STATUSES.get(got.status, InvalidInputError)
            raise ours(f"{name}: Chroma says: {got.status} {got.data[:200]!r}")
        try:
            return json.loads(got.data) if got.data else None
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{name}: expected Chroma's JSON, got another's") from error

    def close(self) -> None:
        self._http.clear()


def _pool() -> urllib3.PoolManager:
    return urllib3.PoolManager(retries=False, timeout=_SECONDS, maxsize=16)


def _part(name: str) -> str:
    return quote(name, safe="")
