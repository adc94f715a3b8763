"""Addresses of databases: what is taken, and what may not travel in the clear."""

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from nobackfill.errors import ConfigurationError
from nobackfill.loopback import is_loopback

_ENCRYPTED = ("require", "verify-ca", "verify-full")


def check_url(url: str, setting: str = "store") -> None:
    """Raises ConfigurationError for what is no address, or one over the network in the clear. The
    sentence names the setting and does not repeat the address: it may hold a password."""
    try:
        given = conninfo_to_dict(url)
    except (psycopg.Error, UnicodeEncodeError) as error:
        raise ConfigurationError(
            f"{setting}: expected postgresql://USER@HOST/DATABASE?sslmode=verify-full, or a "
            "socket's folder as host"
        ) from error
    hosts = [*str(given.get("host") or "").split(","), str(given.get("hostaddr") or "")]
    if not all(map(is_local, hosts)) and given.get("sslmode") not in _ENCRYPTED:
        raise in_the_clear(setting)


def bounded(url: str, seconds: float) -> str:
    """A server that does not take a connection in some seconds is away."""
    return make_conninfo(url, **({"connect_timeout": int(seconds)} | conninfo_to_dict(url)))


def is_local(host: str) -> bool:
    """Whether a host, or a socket's folder, is on this machine."""
    return not host or is_loopback(host) or host.startswith(("/", "@"))


def in_the_clear(setting: str = "store") -> ConfigurationError:
    """What is said of an address on another machine without TLS."""
    return ConfigurationError(
        f"{setting}: a database on another machine demands TLS; add sslmode=verify-full (and "
        "sslrootcert) to its address"
    )
