"""Image galleries from Python: one on this device, or those of a gateway, by the same verbs.

    from nobackfill.client import Device, Gateway

    with Device("gallery.sqlite") as device:
        near = device.search(image="query.png", k=5)
    with Gateway("127.0.0.1:50051") as gateway:
        near = gateway.search("photos", image="query.png", k=5)

Both are loaded when they are asked for: a search on a device needs no gRPC.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nobackfill.client.device import Device
    from nobackfill.wire.gateway import Gateway

__all__ = ["Device", "Gateway"]


def __getattr__(name: str) -> Any:
    if name == "Device":
        from nobackfill.client.device import Device

        return Device
    if name == "Gateway":
        from nobackfill.wire.gateway import Gateway

        return Gateway
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
