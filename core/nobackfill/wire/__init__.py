"""The way into a gateway: addresses, statuses as errors, and the client of all its calls.

    from nobackfill.wire import Gateway

    with Gateway("grpcs://gateway.example:50051") as gateway:
        gateway.create_gallery("photos")
        gateway.put("photos", {"cat": "cat.png"})

Loaded when it is asked for: the answers and limits below do not need gRPC.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nobackfill.wire.gateway import Gateway

__all__ = ["Gateway"]


def __getattr__(name: str) -> Any:
    if name != "Gateway":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nobackfill.wire.gateway import Gateway

    return Gateway
