"""What compare.py trains and measures: presets, rows of the table, cells, claims.

>>> from nobackfill.training.comparison import preset_named
>>> [(split.name, split.old, split.new) for split in preset_named("digits").splits]
[('main', 5, 10), ('unseen', 3, 7)]
"""

from typing import TYPE_CHECKING

from nobackfill.faces import offer

if TYPE_CHECKING:
    from nobackfill.training.comparison.catalogue import rows_of as rows_of
    from nobackfill.training.comparison.cells import Cells as Cells
    from nobackfill.training.comparison.results import Results as Results
    from nobackfill.training.comparison.presets import (
        Preset as Preset,
        Split as Split,
        preset_named as preset_named,
    )
    from nobackfill.training.comparison.rows import Row as Row
else:
    __getattr__ = offer(
        __name__,
        {
            "catalogue": "rows_of",
            "cells": "Cells",
            "results": "Results",
            "presets": "Preset Split preset_named",
            "rows": "Row",
        },
    )
