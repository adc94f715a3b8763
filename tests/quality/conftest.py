"""The small life of the training room's tests: trained once a run."""

from tests.training.conftest import _one_thread, digits, life, runs

__all__ = ["_one_thread", "digits", "life", "runs"]
