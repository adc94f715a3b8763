"""An upgrade carried by worker processes; that they may die is in tests/scale."""

import pickle
from pathlib import Path

import pytest

from nobackfill.errors import ConfigurationError, NobackfillError, UnusableOutputError
from nobackfill.server.settings import load_settings
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, running
from tests.support.postgres import Server


def test_an_activation_is_carried_by_workers(
    repo: Path, stages: Stages, tmp_path: Path, postgres: Server
) -> None:
    with (
        postgres.database() as url,
        running(repo, tmp_path / "data", store=url, workers=1) as gateway,
        Client(gateway.address) as client,
    ):
        client.create_gallery("g")
        client.put_images(images(8))
        publish_stage(repo, stages[2])
        client.swap(2, "cutover")
        hit = client.find(images(1)[0]).hits[0]
        assert (hit.id, hit.origin, hit.release) == ("i0", "upgraded", 2)


@pytest.mark.parametrize(
    "given",
    [{"workers": 2}, {"ray": "auto"}, {"workers": 1, "ray": "auto", "store": "postgresql://x"}],
)
def test_workers_want_a_database_and_one_kind(given: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="workers"):
        load_settings(given, None)


def test_errors_come_whole_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(UnusableOutputError("no vector", [3, 5])))
    assert (str(error), error.rows) == ("no vector", (3, 5))
    assert isinstance(error, NobackfillError)
