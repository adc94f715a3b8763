"""Image galleries from Python: on this device or on a gateway, with the same methods.

>>> from nobackfill.client import Device, Gateway
>>> with Device.create(folder / "gallery.sqlite", f"grpc://{address}", root) as device:
...     refused = device.put({"cat": image})
...     near = device.search(image=image, k=5)
>>> [(hit.id, hit.origin) for hit in near.hits]
[('cat', 'native')]

>>> with Gateway(address) as gateway:
...     made = gateway.create_gallery("photos")
...     refused = gateway.put("photos", {"cat": image})
...     near = gateway.search("photos", image=image, k=5)
>>> [(hit.id, hit.origin) for hit in near.hits]
[('cat', 'native')]

Each class is imported on first use: a search on a device needs no gRPC.
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.client.device import Device as Device
    from nobackfill.wire.gateway import Gateway as Gateway
else:
    __getattr__ = export_lazily(__name__)
