"""The one way to a gateway: its address, TLS, certificates and a token that never goes without TLS.

An address is HOST:PORT or grpc://HOST:PORT, in the clear, or grpcs://HOST:PORT; several gateways
that share their galleries are HOST:PORT,HOST:PORT and so on after one scheme. With TLS,
$NOBACKFILL_CA_FILE may name the authority's certificate (PEM, else the system's),
$NOBACKFILL_CERT_FILE and $NOBACKFILL_KEY_FILE this client's own, $NOBACKFILL_TOKEN_FILE a bearer
token.
"""

import os
import re
from pathlib import Path

import grpc

from nobackfill.errors import ConfigurationError
from nobackfill.wire.limits import LARGEST_ANSWER, LARGEST_REQUEST
from nobackfill.wire.several import one_of

_SCHEMES = {"": False, "grpc": False, "grpcs": True}
_TOKEN = re.compile(rb"[\x21-\x7e]+")


def open_channel(address: str, *, tls: bool = False) -> grpc.Channel:
    """A channel to `address`; `tls` goes for one without a scheme. Nothing is sent yet. To several
    gateways: to one of them, and to the next when that does not answer.

    Raises ConfigurationError for another scheme, files that cannot be read, a file that holds no
    token, and a token without TLS.
    """
    scheme, _, listed = address.rstrip("/").rpartition("://")
    hosts = [host.strip() for host in listed.split(",")]
    if scheme not in _SCHEMES or (len(hosts) > 1 and "" in hosts):
        raise ConfigurationError(
            "expected HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT, several hosts with commas "
            f"between, got {address!r}"
        )
    options = [
        ("grpc.enable_retries", 0),
        # Channels of one process share no connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", LARGEST_ANSWER),
        ("grpc.max_send_message_length", LARGEST_REQUEST),
    ]
    token = _read("NOBACKFILL_TOKEN_FILE")
    if not (_SCHEMES[scheme] or tls):
        if token is not None:
            raise ConfigurationError(
                "expected TLS for a bearer token: name the gateway as grpcs://HOST:PORT, "
                "or unset NOBACKFILL_TOKEN_FILE"
            )
        return one_of([grpc.insecure_channel(host, options) for host in hosts])
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read("NOBACKFILL_CA_FILE"),
        private_key=_read("NOBACKFILL_KEY_FILE"),
        certificate_chain=_read("NOBACKFILL_CERT_FILE"),
    )
    if token is not None:
        if not _TOKEN.fullmatch(token.strip()):
            raise ConfigurationError("NOBACKFILL_TOKEN_FILE: expected one token of plain ASCII")
        bearer = grpc.access_token_call_credentials(token.decode().strip())
        credentials = grpc.composite_channel_credentials(credentials, bearer)
    return one_of([grpc.secure_channel(host, credentials, options) for host in hosts])


def _read(variable: str) -> bytes | None:
    path = os.environ.get(variable)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{variable}: cannot read {path} ({error.strerror})") from error
