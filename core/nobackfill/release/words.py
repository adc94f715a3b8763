"""Words that manifests and galleries share; apart, because pydantic takes long to load."""

from typing import Literal

Metric = Literal["squared_l2", "cosine"]
Origin = Literal["native", "direct", "upgraded", "re-embedded", "old-model"]
