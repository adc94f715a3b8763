"""Sources that hang: other galleries heal, and the gateway ends in seconds."""

import threading
import time
from pathlib import Path

import pytest

from nobackfill.errors import UnavailableError
from nobackfill.server.embedding.embedding import EmbeddingService, InProcessModels
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.healing.healing import Healing
from nobackfill.server.healing.registration import HealingSource
from nobackfill.server.settings import Settings
from nobackfill.v1 import gallery_pb2
from tests.server.conftest import Stages
from tests.server.process import serving
from tests.server.support import Client, refused
from tests.server.test_healing import COUNT, GALLERIES, TRUE, healed, register, upgraded
from tests.support.blocks import png
from tests.support.evil_host import BEHAVIOURS, evil_host
from tests.support.picture_host import PictureHost
from tests.support.waiting import wait_until

ASKED = threading.Event()
# A module of the operator's, in a process of its own: it says that it was asked, and hangs.
HANGING = """
import pathlib, time
def item(name):
    pathlib.Path(__file__).with_name("asked").touch()
    time.sleep(3600)
"""
# It can be imported once the file `mended` exists; until then the import waits, then fails.
LATE = """
import pathlib, time
here = pathlib.Path(__file__).parent
while not (here / "over").exists():
    time.sleep(0.01)
if not (here / "mended").exists():
    raise RuntimeError("not yet")
def item(name):
    return b""
"""


def hanging(name: str) -> bytes | None:
    """A source on a file system that is away, say."""
    ASKED.set()
    threading.Event().wait()
    return None


@pytest.mark.long
def test_a_source_that_hangs_is_its_own_gallerys_trouble(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nobackfill.server.rollout.lifecycle._OPEN_SECONDS", 0.5)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hangs_at_import.py").write_text("import time\ntime.sleep(3600)\n")
    functions = {"hangs": f"{__name__}:hanging", "import": "hangs_at_import:item"}
    pictures = {f"i{i}": png(image) for i, image in enumerate(TRUE)}
    with (
        evil_host(BEHAVIOURS["100 Continue for ever"]) as evil,
        PictureHost(pictures) as host,
        upgraded(stages, tmp_path, item_functions=functions) as gateway,
        Client(gateway.address) as client,
    ):
        one, two, three, good = GALLERIES[:4]
        register(client, one, f"{evil}{{id}}", a_day=1000)
        register(client, two, "function:hangs", a_day=1000)
        assert ASKED.wait(60)
        # It is replaced while it hangs: nobody waits for its end.
        register(client, two, "function:hangs", a_day=2000)
        client.update_gallery(one, source=gallery_pb2.ItemSource())
        with refused(UnavailableError, "cannot be opened within"):
            register(client, three, "function:import")
        register(client, good, host.address, a_day=1000)
        wait_until(lambda: len(healed(client, good)) == COUNT, "the others are not embedded")
        ended = time.monotonic()
    assert time.monotonic() - ended < 30


@pytest.mark.long
def test_the_gateway_ends_while_sources_hang(stages: Stages, tmp_path: Path) -> None:
    with upgraded(stages, tmp_path):
        pass
    (tmp_path / "operators_items.py").write_text(HANGING)
    settings = tmp_path / "settings.toml"
    settings.write_text('[item_functions]\nhangs = "operators_items:item"\n')
    options = ("--triton=in-process", "--item-host=127.0.0.1", f"--settings={settings}")
    with evil_host(BEHAVIOURS["drips headers"]) as evil:
        with (
            serving(
                tmp_path / "repo", tmp_path / "data", *options, PYTHONPATH=str(tmp_path)
            ) as served,
            Client(served.address) as client,
        ):
            register(client, GALLERIES[0], f"{evil}{{id}}", a_day=1000)
            register(client, GALLERIES[1], "function:hangs", a_day=1000)
            wait_until((tmp_path / "asked").exists, "the source is not asked")
            ended = time.monotonic()
            assert served.stop() == 0
            took = time.monotonic() - ended
        # Of ten seconds that calls have to end, none is needed.
        assert took < 30, took


def test_an_opening_that_failed_after_its_wait_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_items.py").write_text(LATE)
    metrics = Metrics()
    settings = Settings(
        model_repo=tmp_path, data=tmp_path, item_functions={"late": "late_items:item"}
    )
    healing = Healing(EmbeddingService(InProcessModels(tmp_path), metrics), settings, metrics)
    source = HealingSource.checked("function:late")
    # Threads of the other tests hang to the end of the process.
    others = set(threading.enumerate())
    with pytest.raises(UnavailableError, match="cannot be opened within"):
        healing.open(source, 0.05)
    (tmp_path / "over").touch()
    wait_until(
        lambda: all(one.name != "source" for one in set(threading.enumerate()) - others),
        "the first opening does not end",
    )
    (tmp_path / "mended").touch()
    assert healing.open(source, 60).kind is None
