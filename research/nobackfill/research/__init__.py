"""The comparison of methods, which `python training/compare.py` trains and measures.

It contains presets, rows of the table, cells and claims. It runs in a checkout; no wheel has it.

>>> from nobackfill.research import preset_named
>>> splits = preset_named("digits").splits
>>> [(one.name, one.old_class_count, one.new_class_count) for one in splits]
[('main', 5, 10), ('unseen', 3, 7)]
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.research.catalogue import list_rows as list_rows
    from nobackfill.research.cells import Cells as Cells
    from nobackfill.research.presets import (
        Preset as Preset,
        Split as Split,
        preset_named as preset_named,
    )
    from nobackfill.research.results import Results as Results
    from nobackfill.research.rows import MethodRow as MethodRow
else:
    __getattr__ = export_lazily(__name__)
