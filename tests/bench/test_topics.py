"""A tiny run of each topic: it comes to an end, and its rows say something.

The topics that take more than a few seconds even so run under `make faults`.
"""

import importlib
from pathlib import Path

import pytest

from bench.harness import Bench, Scale, Table
from bench.run import TOPICS

QUICK = {"index", "upgrade", "training", "loading"}
# Columns that name what was measured; the others hold figures.
RATIOS = (
    "of limit",
    "of bare",
    "of bare sum",
    "of echo",
    "of triton",
    "of gateway",
    "of python",
    "of torchvision",
    "of COPY",
)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and publications, made by the first topic that needs them."""
    return tmp_path_factory.mktemp("bench")


@pytest.mark.long
@pytest.mark.parametrize(
    "topic",
    [t if t in QUICK else pytest.param(t, marks=pytest.mark.faults) for t in TOPICS],
)
@pytest.mark.slow
def test_a_tiny_run(topic: str, shared: Path, tmp_path: Path) -> None:
    module = importlib.import_module(f"bench.topics.{topic}")
    tables: list[Table] = module.run(Bench(Scale.TINY, tmp_path, shared))
    assert tables
    for table in tables:
        assert table.rows, table.title
        for row in table.rows:
            for column in RATIOS:
                figure = row.get(column)
                assert figure is None or (isinstance(figure, float) and figure > 0), row
            recall = row.get("recall@10", 1.0)
            assert isinstance(recall, float), row
            # Tiny galleries are found whole.
            assert recall >= 0.9, row
