"""What healing may cost others: deletions, searches, the day's budget, a batch's memory."""

import contextvars
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nobackfill.errors import CancelledError, ConfigurationError, NotFoundError
from nobackfill.release.calibration import Scorer
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries.answering import EmbeddedQuery
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import LOCAL
from nobackfill.server.healing import healing as answering
from nobackfill.v1 import gallery_pb2, search_pb2
from tests.server.conftest import Stages
from tests.server.support import Client, images, refused, running, vector
from tests.server.test_healing import (
    COUNT,
    GALLERIES,
    TRUE,
    Points,
    healed,
    progress,
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
from tests.support.blocks import png
from tests.support.picture_host import PictureHost
from tests.support.waiting import wait_until

ASKED, OPEN = threading.Event(), threading.Event()


def held(name: str) -> bytes | None:
    """An operator's function that takes as long as a test has it take."""
    ASKED.set()
    OPEN.wait()
    return None


@pytest.fixture(scope="module")
def healing(stages: Stages, folder: Path) -> Iterator[GatewayServer]:
    """See test_healing."""
    with upgraded(stages, folder.parent, item_functions={"held": f"{__name__}:held"}) as gateway:
        yield gateway


def test_a_slow_source_holds_no_deletion_up(client: Client, name: str) -> None:
    register(client, name, "function:held", a_day=1000)
    try:
        # By the background.
        assert ASKED.wait(60)
        client.delete_gallery(name)
        with pytest.raises(NotFoundError):
            client.get_gallery(name)
        client.create_gallery(name)
    finally:
        OPEN.set()


def test_a_source_that_lacks_everything_costs_the_day_nothing(
    client: Client, name: str, host: PictureHost
) -> None:
    pictures, host.pictures = host.pictures, {}
    register(client, name, host.address, a_day=4 * COUNT)
    for image in TRUE:
        assert {hit.origin for hit in client.find(image, name).hits} == {"upgraded"}
    wait_until(lambda: progress(client, name).failed == COUNT, "not all are asked for")
    told = progress(client, name)
    assert (told.today, told.embedded, told.carried) == (0, 0, COUNT)
    assert set(host.asked.values()) == {1}
    # Who brings the pictures back says so, and has the whole day's budget.
    host.pictures = pictures
    register(client, name, host.address, a_day=COUNT)
    client.find(TRUE[0], name)
    wait_until(lambda: len(healed(client, name)) == COUNT, "some are not embedded")
    assert progress(client, name).today == COUNT


def test_a_batch_is_answered_in_parts_that_end_with_the_call(
    healing: GatewayServer, client: Client, name: str, host: PictureHost, two: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(answering, "_MAX_CANDIDATES", 1)
    # Of a budget that is left to queries.
    register(client, name, host.address, a_day=1)
    hosted = healing.galleries.peek(name)
    parts = (hosted.plan.parts[0],)
    questions = [EmbeddedQuery(hosted, parts, (vector(two, i)[None],), k=3, ef=0) for i in TRUE[:4]]

    def gives_up_when_the_first_is_read() -> None:
        context.set_current_call(context.Call(LOCAL, time.monotonic() + 60, lambda: not host.asked))
        healing.healing.answer_queries(questions, None)

    with pytest.raises(CancelledError):
        contextvars.copy_context().run(gives_up_when_the_first_is_read)
    assert sum(host.asked.values()) == 1
    register(client, name, host.address, a_day=1000)
    queries = [search_pb2.Query(image=png(TRUE[i])) for i in (5, 7, 9)]
    request = search_pb2.SearchBatchRequest(gallery=name, queries=queries, k=2)
    answers = client.raw.searches.SearchBatch(request).responses
    assert [answer.hits[0].id for answer in answers] == ["i5", "i7", "i9"]


def test_as_many_native_items_are_candidates_as_are_asked_for(
    healing: GatewayServer, client: Client, name: str, host: PictureHost
) -> None:
    """More than the hits that are embedded again, of which a valley would hide all but those."""
    host.pictures = {}
    source = gallery_pb2.ItemSource(address=host.address, hits=20)
    client.update_gallery(name, source=source)
    assert progress(client, name).carried == COUNT
    new = images(60, seed=11)
    client.put(name, {f"new{number}": png(image) for number, image in enumerate(new)})
    (part,) = healing.galleries.peek(name).plan.parts
    assert isinstance(part.score_curves, dict)
    part.score_curves["upgraded"] = Scorer(Points((0.0, 4.0), (0.01, 0.0)))
    found = client.find(TRUE[0], name, k=50)
    assert [hit.origin for hit in found.hits] == ["native"] * 50


def test_a_module_that_cannot_be_imported_breaks_no_search(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "items_of_the_shop.py").write_text(
        "import os\nKEY = os.environ['KEY_OF_THE_SHOP']\ndef item(name): return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KEY_OF_THE_SHOP", "key")
    functions = {"item_functions": {"shop": "items_of_the_shop:item"}}
    name = GALLERIES[0]
    with upgraded(stages, tmp_path, **functions) as gateway, Client(gateway.address) as client:
        register(client, name, "function:shop")
    monkeypatch.delenv("KEY_OF_THE_SHOP")
    sys.modules.pop("items_of_the_shop")
    with (
        running(tmp_path / "repo", tmp_path / "data", **functions) as gateway,
        Client(gateway.address) as client,
    ):
        assert {hit.origin for hit in client.find(TRUE[0], name).hits} == {"upgraded"}
        with refused(ConfigurationError, "KeyError: 'KEY_OF_THE_SHOP'"):
            register(client, name, "function:shop", a_day=2)
