"""An old model for the methods of embedders, trained once a test file."""

import pytest

from nobackfill.training.method import Classifier
from tests.training.methods import tiny


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    """Knows the first two of the four classes. Read only."""
    return tiny.old_model(tmp_path_factory.mktemp("old"))
