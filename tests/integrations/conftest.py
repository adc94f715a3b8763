"""Two gateways on 127.0.0.1: one embeds texts, one stores vectors that callers made."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nobackfill.release.publishing.publish import publish
from nobackfill.wire import Gateway
from tests.server.support import running
from tests.support import text_releases, trials
from tests.support.text_releases import Reads

NUMBERS = itertools.count()
# Haystack would report its use to a host.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"


def serve(folder: Path, reads: Reads) -> Iterator[Gateway]:
    """A client of a gateway whose release 1 embeds texts, or nothing."""
    with trials.near():
        publish(folder / "repo", text_releases.draft(folder / "drafts", 1, reads=reads))
        with (
            running(folder / "repo", folder / "data", activates=True) as gateway,
            Gateway(gateway.address) as client,
        ):
            yield client


@pytest.fixture(scope="package")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that embeds texts of the words w0 to w39."""
    yield from serve(tmp_path_factory.mktemp("reader"), "texts")


@pytest.fixture(scope="package")
def vectors_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose release has no model."""
    yield from serve(tmp_path_factory.mktemp("vectors"), "nothing")


def empty_gallery(gateway: Gateway) -> str:
    """The name of a new gallery."""
    name = f"g{next(NUMBERS)}"
    gateway.create_gallery(name)
    return name
