"""Sources that hang: whoever reads waits no longer than he said, and no stop waits for them."""

import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nobackfill.errors import NobackfillError
from nobackfill.serving import FunctionItems, LedgerFile, ReembeddingLimits, UrlItems
from tests.serving.test_reembedding import Keeping
from tests.support.evil_host import BEHAVIOURS, every_fifth, evil_host
from tests.support.waiting import wait_until


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", every_fifth(BEHAVIOURS))
def test_no_behaviour_of_a_host_holds_a_reader_or_a_thread(name: str) -> None:
    with evil_host(BEHAVIOURS[name]) as address:
        items = UrlItems(f"{address}{{id}}", ["127.0.0.1"], timeout_seconds=0.6)
        with suppress(NobackfillError):
            assert isinstance(items.read("a", 1000), bytes)
        # Also where the host goes on for ever.
        wait_until(
            lambda: all(thread.name != "fetch" for thread in threading.enumerate()),
            "a thread reads on after it was given up",
            seconds=20,
        )


def test_an_end_does_not_wait_for_a_source_that_hangs(tmp_path: Path) -> None:
    hangs, over = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        hangs.set()
        over.wait()

    ledger = LedgerFile[str](tmp_path / "ledger.sqlite")
    again = Keeping(
        FunctionItems(hang, "text"), ReembeddingLimits(concurrent_batches=1, batch_size=1), ledger
    )
    again.reembed_within_limit({"a": "a", "b": "b"}, seconds=0)
    assert hangs.wait(30)
    began = time.monotonic()
    assert not again.close(0.2)
    assert time.monotonic() - began < 20
    # Fetches that had not begun stay wanted.
    assert again.wanted == {"b"}
    over.set()
    wait_until(lambda: again.close(0.2), "it has not ended by itself")
    ledger.close()
