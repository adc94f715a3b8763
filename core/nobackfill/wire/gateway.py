"""The Python client of a gateway: its five services as one class."""

from nobackfill.wire.galleries import Galleries
from nobackfill.wire.releases import Releases
from nobackfill.wire.searches import Searches
from nobackfill.wire.upgrades import Upgrades
from nobackfill.wire.vault import Vault


class Gateway(Searches, Galleries, Releases, Upgrades, Vault):
    """A connection to one gateway, usable from several threads; see `Connection` for its arguments.

        from nobackfill.client import Gateway

        with Gateway("127.0.0.1:50051") as gateway:
            for hit in gateway.search("photos", image="query.png", k=5).hits:
                print(hit.id, hit.distance, hit.score)

    Hits and items come as in nobackfill.wire.answers, as those of a device do; galleries,
    releases, upgrades and blobs as the contract's messages (nobackfill.v1).
    """
