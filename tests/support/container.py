"""What deploy/containers/try asks of a gateway in a container.

`publish FOLDER`; `ready`, `fill` and `find`, each with an address.
"""

import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.server.support import Client, images
from tests.support.blocks import publish_block_release

_START_S = 120.0


def main() -> None:
    """As the arguments say; raises where it is not as it should be."""
    what, where = sys.argv[1:]
    if what == "publish":
        publish_block_release(Path(where), 1)
    elif what == "ready":
        wait(f"http://{where}/readyz")
    else:
        with Client(where) as client:
            if what == "fill":
                client.create_gallery("g")
                client.put_images(images(5))
            assert [client.find(image).hits[0].id for image in images(5)] == [
                f"i{number}" for number in range(5)
            ]


def wait(page: str) -> None:
    """Until it is there."""
    end = time.monotonic() + _START_S
    while True:
        try:
            urllib.request.urlopen(page, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < end, f"{page}: no answer within {_START_S:.0f} s"
            time.sleep(0.2)


if __name__ == "__main__":
    main()
