"""Connect to a gateway: addresses, the client of all its calls, and statuses as errors.

>>> from nobackfill.wire import Gateway
>>> with Gateway(address) as gateway:
...     made = gateway.create_gallery("animals")
...     refusals = gateway.put("animals", {"cat": image})
...     answer = gateway.search("animals", image=image, k=5)
>>> refusals, [hit.id for hit in answer.hits]
({}, ['cat'])
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.wire.answers import Answer as Answer
    from nobackfill.wire.answers import Hit as Hit
    from nobackfill.wire.answers import Image as Image
    from nobackfill.wire.answers import Item as Item
    from nobackfill.wire.answers import Status as Status
    from nobackfill.wire.gateway import Gateway as Gateway
else:
    __getattr__ = export_lazily(__name__)
