"""Select, divide, read and augment the images of a training.

>>> import numpy as np
>>> from nobackfill.training.data import allocate_images
>>> rows = allocate_images("open-class", np.array([0, 0, 1, 1]), share=0.5)
>>> rows.old_rows.tolist(), rows.new_rows.tolist()
([0, 1], [2, 3])
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.training.data.allocations import (
        Allocation as Allocation,
        allocate_images as allocate_images,
    )
    from nobackfill.training.data.augment import Augment as Augment
    from nobackfill.training.data.folders import (
        hold_out as hold_out,
        read_stored_vectors as read_stored_vectors,
        drop_unreadable_images as drop_unreadable_images,
        require_classes as require_classes,
    )
else:
    __getattr__ = export_lazily(__name__)
