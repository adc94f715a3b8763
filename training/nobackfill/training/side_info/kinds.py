"""The kinds of side-information psi (fct.txt section 5.1, and further ones), by the name of
`side_info`.
"""

from collections.abc import Callable, Mapping

from nobackfill.training.config import SideEncoderConfig
from nobackfill.training.loop.objective import Objective
from nobackfill.training.side_info.alternate import AlternateObjective
from nobackfill.training.side_info.autoencoder import AutoencoderObjective
from nobackfill.training.side_info.distilled import DistilledObjective
from nobackfill.training.side_info.simclr import SimclrObjective
from nobackfill.training.side_info.vicreg import VicregObjective

_UNLABELLED: Mapping[str, Callable[[SideEncoderConfig], Objective]] = {
    "autoencoder": AutoencoderObjective,
    "vicreg": VicregObjective,
    "distilled": DistilledObjective,
    "simclr": SimclrObjective,
    # build_encoder makes the difference.
    "binary_simclr": SimclrObjective,
}


def side_objective(config: SideEncoderConfig, classes: int) -> Objective:
    """The training objective of a side encoder; `classes` of its images, which only a second old
    model reads."""
    if config.side_info in ("alternate", "mixup"):
        return AlternateObjective(config, classes)
    return _UNLABELLED[config.side_info](config)
