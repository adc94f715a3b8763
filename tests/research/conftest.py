"""The digits, the runs and the one thread of the tests of training."""

from tests.training.conftest import _one_thread as _one_thread
from tests.training.conftest import digits as digits
from tests.training.conftest import runs as runs
