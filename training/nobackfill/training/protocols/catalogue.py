"""Every protocol that evaluate.py knows, by name."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from nobackfill.errors import ConfigurationError
from nobackfill.training.protocols import gldv2, ijbc, market1501, revisited, vggface2
from nobackfill.training.protocols.protocol import Protocol

# Each reads its files below a folder, and may write images below a second, temporary one.
PROTOCOLS: Mapping[str, Callable[[Path, Path], Protocol]] = {
    "ijbc": ijbc.protocol,
    "gldv2": gldv2.protocol,
    "roxford5k": revisited.oxford,
    "rparis6k": revisited.paris,
    "market1501": market1501.protocol,
    "vggface2": vggface2.protocol,
}


def protocol_named(
    name: str, points: ijbc.OperatingPoints | None = None
) -> Callable[[Path, Path], Protocol]:
    """The reader of a protocol, at other operating points where it has such.

    Raises ConfigurationError for an unknown name, naming the known, and for points of a protocol
    without.
    """
    if name not in PROTOCOLS:
        raise ConfigurationError(f"unknown protocol {name!r}; known: {', '.join(PROTOCOLS)}")
    if points is None:
        return PROTOCOLS[name]
    if name != "ijbc":
        raise ConfigurationError(f"--far and --fpir are of ijbc; {name} has no operating points")
    return partial(ijbc.protocol, points=points)
