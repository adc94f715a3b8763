"""Draft a release from training runs: ONNX files, compared with torch, and probes.

>>> from nobackfill.training.export import Pixels
>>> imagenet = Pixels(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
>>> imagenet.std
(0.229, 0.224, 0.225)
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.training.export.assembly import (
        add_embedder_run as add_embedder_run,
        add_side_run as add_side_run,
        add_upgrade_run as add_upgrade_run,
    )
    from nobackfill.training.export.drafting import ReleaseDraft as ReleaseDraft
    from nobackfill.training.export.external import (
        Pixels as Pixels,
        add_onnx_embedder as add_onnx_embedder,
    )
    from nobackfill.training.export.onnx_export import (
        check_parity as check_parity,
        export_onnx as export_onnx,
        quantise as quantise,
    )
    from nobackfill.training.export.probes import make_probes as make_probes
else:
    __getattr__ = export_lazily(__name__)
