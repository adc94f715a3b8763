"""One digest of what a table's rows are configured with: whether the table is of today's code."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from nobackfill.training.comparison.catalogue import rows_of
from nobackfill.training.comparison.presets import Preset
from nobackfill.training.comparison.recipe import Place
from nobackfill.training.config import parse_config


def digest(preset: Preset, rows: Mapping[str, Iterable[str]]) -> str:
    """SHA-256 of the configurations of every training behind the named rows, by split.

    Places and seeds of the tables are left out. Raises ConfigurationError for a row that the
    catalogue does not have (any more).
    """
    trained = {}
    for split in preset.splits:
        here = Place(preset, split, 0, Path("data", split.name), Path("runs", split.name))
        for row in rows_of(here, tuple(rows.get(split.name, ()))):
            for run in row.runs:
                config = parse_config(dict(run.values), preset.name)
                trained[run.folder] = config.model_dump(mode="json", exclude_unset=True)
    content = json.dumps([trained[folder] for folder in sorted(trained)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
