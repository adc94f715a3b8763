"""A served vector database beside which the gateway is measured."""

from abc import ABC, abstractmethod
from pathlib import Path

from bench.loaded import Target
from nobackfill.gallery.search.index import Labels

# What a database's width of search is chosen from.
EFS = (10, 15, 20, 30, 40, 60, 80, 120, 160, 240)


class Rival(ABC):
    """Item n is vector n; the graph has our M and efConstruction, the metric is squared L2. What is
    asked was prepared beforehand, and answers are not read: the client costs each the same."""

    name: str
    version: str

    @abstractmethod
    def load_target(self, ef: int, requests: Path) -> Target:
        """Where the queries are asked that look at `ef` candidates; they are written there."""

    @abstractmethod
    def search_all(self, ef: int) -> Labels:
        """The items that each query finds so [q, k], nearest first."""
