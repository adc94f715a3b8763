"""The kinds of side-information psi (FCT section 5.1): SimCLR, an autoencoder, a second old model;
VICReg, self-distillation.

>>> import torch
>>> from nobackfill.training.side_info import nt_xent
>>> views = torch.eye(4)
>>> bool(nt_xent(views, views, temperature=0.1) < nt_xent(views, views.roll(1, 0), 0.1))
True
"""

from typing import TYPE_CHECKING

from nobackfill.faces import offer

if TYPE_CHECKING:
    from nobackfill.training.side_info.alternate import AlternateObjective as AlternateObjective
    from nobackfill.training.side_info.autoencoder import (
        AutoencoderObjective as AutoencoderObjective,
    )
    from nobackfill.training.side_info.binarise import Binarise as Binarise
    from nobackfill.training.side_info.distilled import (
        DistilledObjective as DistilledObjective,
    )
    from nobackfill.training.side_info.kinds import side_objective as side_objective
    from nobackfill.training.side_info.simclr import (
        SimclrObjective as SimclrObjective,
        nt_xent as nt_xent,
    )
    from nobackfill.training.side_info.vicreg import VicregObjective as VicregObjective
else:
    __getattr__ = offer(
        __name__,
        {
            "alternate": "AlternateObjective",
            "autoencoder": "AutoencoderObjective",
            "binarise": "Binarise",
            "distilled": "DistilledObjective",
            "kinds": "side_objective",
            "simclr": "SimclrObjective nt_xent",
            "vicreg": "VicregObjective",
        },
    )
