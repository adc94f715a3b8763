"""The small life of the training room's tests: trained once a run."""

from tests.training.conftest import _graphs_made_once, _one_thread, digits, life, runs

__all__ = ["_graphs_made_once", "_one_thread", "digits", "life", "runs"]
