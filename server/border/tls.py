"""Transport credentials: TLS, and client certificates where an authority is given."""

from pathlib import Path

import grpc

from release.errors import ConfigurationError
from server.settings import Settings


def server_credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """None where no certificate is set. Raises ConfigurationError for files that cannot be read."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    authority = settings.tls_client_ca
    return grpc.ssl_server_credentials(
        [(_read(settings.tls_key), _read(settings.tls_cert))],
        root_certificates=_read(authority) if authority else None,
        require_client_auth=authority is not None,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from error
