"""Transport credentials: TLS, and client certificates where an authority is given.

The files are looked at again when somebody connects, so a renewed certificate needs no restart.
"""

import ssl
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import grpc
import structlog
from cryptography import x509

from nobackfill.errors import ConfigurationError
from nobackfill.server.settings import Settings

log = structlog.get_logger("server.tls")

_EVERY_S = 1.0

_Stamp = tuple[tuple[int, int, int], ...]


class Certificates:
    """A certificate with its key, and the authority of clients if there is one.

    Files that do not fit together, as when one of them was replaced and the other is yet to be,
    change nothing: what was read last goes on. Raises ConfigurationError at the start.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._lock = threading.Lock()
        self._trouble = ""
        self._stamp, self._configuration = self._read()
        self._looked = time.monotonic()

    def credentials(self) -> grpc.ServerCredentials:
        """What a port listens with; it follows the files."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._changed,  # type: ignore[arg-type]
            require_client_authentication=bool(self._client_ca),
        )

    def expiries(self) -> Mapping[str, datetime]:
        """When the certificates that are there now expire, those that can be read."""
        files = {"server": self._cert, "client_ca": self._client_ca}
        found = {}
        for name, path in files.items():
            try:
                chain = x509.load_pem_x509_certificates(path.read_bytes()) if path else []
            except (OSError, ValueError):
                continue
            if chain:
                found[name] = min(one.not_valid_after_utc for one in chain)
        return found

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC at each handshake; None: as before."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < _EVERY_S:
                return None
            self._looked = now
            try:
                if self._stamps() == self._stamp:
                    return None
                self._stamp, self._configuration = self._read()
            except (OSError, ConfigurationError) as error:
                if str(error) != self._trouble:
                    log.error("certificates not read again, the old ones go on", error=str(error))
                self._trouble = str(error)
                return None
            self._trouble = ""
            log.info("certificates read again")
            return self._configuration

    def _read(self) -> tuple[_Stamp, grpc.ServerCertificateConfiguration]:
        try:
            stamp = self._stamps()
            # gRPC takes any bytes, and then fails every handshake.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key, password=_no_password)
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
            pair = self._key.read_bytes(), self._cert.read_bytes()
            authority = self._client_ca.read_bytes() if self._client_ca else None
            if self._stamps() != stamp:
                raise ConfigurationError(f"{self._cert}: is being replaced")
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"{self._cert}, {self._key}: expected a certificate and its key in PEM ({error})"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"{error.filename}: cannot be read ({error.strerror})"
            ) from error
        return stamp, grpc.ssl_server_certificate_configuration([pair], authority)

    def _stamps(self) -> _Stamp:
        paths = (self._cert, self._key, self._client_ca)
        found = [path.stat() for path in paths if path is not None]
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)


def _no_password() -> bytes:
    """For a sealed key: refused, where OpenSSL would ask on the terminal."""
    return b""


def certificates(settings: Settings) -> Certificates | None:
    """None where no certificate is set. Raises ConfigurationError for files that are none."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
