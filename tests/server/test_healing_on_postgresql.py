"""The same with galleries in PostgreSQL, whose gateways share claims and budgets."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nobackfill.server.gateway import GatewayServer
from tests.server.conftest import Stages
from tests.server.support import Client, running
from tests.server.test_healing import (
    COUNT,
    TRUE,
    healed,
    register,
    upgraded,
)
from tests.server.test_healing import (
    client as client,
)
from tests.server.test_healing import (
    folder as folder,
)
from tests.server.test_healing import (
    host as host,
)
from tests.server.test_healing import (
    name as name,
)
from tests.server.test_healing import (
    names as names,
)
from tests.server.test_healing import (
    test_a_day_has_its_budget as test_a_day_has_its_budget,
)
from tests.server.test_healing import (
    test_hits_are_embedded_again_and_ranked as test_hits_are_embedded_again_and_ranked,
)
from tests.server.test_healing import (
    test_what_went_does_not_come_back as test_what_went_does_not_come_back,
)
from tests.support import postgres as servers
from tests.support.picture_host import PictureHost


@pytest.fixture(scope="module")
def store(postgres: servers.Server) -> Iterator[str]:
    """The address of a database."""
    with postgres.database() as url:
        yield url


@pytest.fixture(scope="module")
def healing(store: str, stages: Stages, folder: Path) -> Iterator[GatewayServer]:
    """See test_healing."""
    with upgraded(stages, folder.parent, store=store) as gateway:
        yield gateway


def test_two_gateways_embed_no_item_twice(
    healing: GatewayServer, client: Client, name: str, host: PictureHost, store: str, folder: Path
) -> None:
    host.gate.clear()
    register(client, name, host.address, a_day=2 * COUNT, seconds=1)
    with (
        running(
            folder.parent / "repo", folder.parent / "other", store=store,
            item_hosts=("127.0.0.1",),
        ) as other,
        Client(other.address) as beside,
    ):  # fmt: skip
        with ThreadPoolExecutor(4) as askers:
            both = [client, beside, client, beside]
            found = list(askers.map(lambda one: one.find(TRUE[3], name), both))
        assert {hit.origin for one in found for hit in one.hits} == {"upgraded"}
        host.gate.set()
        # What one embeds the other shows.
        for one in (client, beside):
            while one.find(TRUE[3], name).hits[0].id != "i3":
                pass
        while len(healed(beside, name)) < COUNT:
            beside.find(TRUE[3], name, k=COUNT)
    assert set(host.asked.values()) == {1}
