"""Where a publication comes from: a folder or any static HTTP host. The gateway's is in client/.

A fetcher has one method. What it gives is untrusted: lengths, digests and signatures are checked by
trust.py.
"""

import http.client
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote, urljoin

import urllib3
from tuf.api.exceptions import DownloadError, DownloadHTTPError, SlowRetrievalError

from nobackfill.pace import pool_manager

_CHUNK = 2**16
# A source that sends nothing for so long has gone, or means harm.
SILENCE_SECONDS = 10.0
_REDIRECTS = 3
# What a host can make the libraries raise: urllib3 lets some of theirs through.
_TROUBLE = (urllib3.exceptions.HTTPError, http.client.HTTPException, ValueError, OSError)


class Fetcher(Protocol):
    """Reads a file of a publication."""

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """The bytes of `url` from `offset` on, in pieces.

        Raises, at once or at any piece, tuf's DownloadHTTPError (404: not there, 416: shorter than
        `offset`), SlowRetrievalError when nothing comes, DownloadError for other trouble.
        """
        ...


class FolderFetcher:
    """A publication folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.base_url = f"{folder}/"

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        path = self._folder / unquote(url.removeprefix(self.base_url))
        try:
            with path.open("rb") as file:
                file.seek(offset)
                while piece := file.read(_CHUNK):
                    yield piece
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DownloadHTTPError(f"{path}: is not there", 404) from error
        except OSError as error:
            raise DownloadError(f"{path}: cannot be read ({error.strerror})") from error


class HttpFetcher:
    """Any static HTTP(S) host, with ranges where it serves them.

    $NOBACKFILL_CA_FILE may name its authority's certificate (PEM, else the system's).
    """

    def __init__(self) -> None:
        self._pool = pool_manager(
            timeout=urllib3.Timeout(SILENCE_SECONDS),
            ca_certs=os.environ.get("NOBACKFILL_CA_FILE") or None,
            # A host's Retry-After would be slept through, however long it is.
            retries=urllib3.Retry(2, respect_retry_after_header=False),
        )
        weakref.finalize(self, self._pool.clear)

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        try:
            response = self._answer(quote(url, safe=":/@%?=&[]"), offset)
        except _TROUBLE as error:
            raise DownloadError(f"{url}: {_sentence(error)}") from error
        complete = False
        try:
            if response.status not in (200, 206):
                raise DownloadHTTPError(f"{url}: HTTP {response.status}", response.status)
            # A host that ignores Range sends everything: pass by what is here already.
            skip = offset if response.status == 200 else 0
            # read1 gives what has come, so that the caller notices a host that drips.
            while piece := response.read1(_CHUNK):
                if len(piece) > skip:
                    yield piece[skip:]
                skip = max(0, skip - len(piece))
            complete = True
        except urllib3.exceptions.TimeoutError as error:
            raise SlowRetrievalError(f"{url}: nothing came for {SILENCE_SECONDS:g} s") from error
        except _TROUBLE as error:
            raise DownloadError(f"{url}: {error}") from error
        finally:
            # After a complete file its connection is used again; else the rest is in the way.
            if not complete:
                response.close()
            response.release_conn()

    def _answer(self, url: str, offset: int) -> urllib3.BaseHTTPResponse:
        # What was signed are the bytes as they lie there: nothing is unpacked.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        for _ in range(1 + _REDIRECTS):
            response = self._pool.request(
                "GET",
                url,
                headers=headers,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
            location = response.get_redirect_location()
            if not location:
                return response
            response.close()
            response.release_conn()
            before, url = url, urljoin(url, location)
            if not url.startswith(("https://", before.partition("//")[0] + "//")):
                raise DownloadError(f"{before}: redirects to {url}; expected https there")
        raise DownloadError(f"{url}: redirects more than {_REDIRECTS} times")


def _sentence(error: Exception) -> str:
    """What a person can use of a failed request, without the pools and retries of the library."""
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, Exception) else error
    text = str(cause)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            "its certificate is of no authority that is known here; name the authority's "
            "certificate (PEM) in NOBACKFILL_CA_FILE"
        )
    if isinstance(cause, urllib3.exceptions.NameResolutionError):
        return "no host of that name is known; check the address"
    if isinstance(cause, urllib3.exceptions.NewConnectionError):
        return "nothing answers there; check the address, and that the host runs"
    # What follows the last colon is what happened; before it stand objects of the library.
    return text.rpartition(": ")[2] if "object at 0x" in text or "Pool(" in text else text


def fetcher_for(source: str) -> tuple[Fetcher, str]:
    """The fetcher and base URL of a folder, `http://` or `https://` source."""
    if source.startswith(("http://", "https://")):
        return HttpFetcher(), source.rstrip("/") + "/"
    folder = FolderFetcher(Path(source))
    return folder, folder.base_url
