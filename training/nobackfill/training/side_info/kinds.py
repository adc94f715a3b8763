"""The kinds of side-information psi (fct.txt section 5.1), by the name of `side_info`."""

from nobackfill.training.config import SideEncoderConfig
from nobackfill.training.loop.objective import Objective
from nobackfill.training.side_info.alternate import AlternateObjective
from nobackfill.training.side_info.autoencoder import AutoencoderObjective
from nobackfill.training.side_info.simclr import SimclrObjective


def side_objective(config: SideEncoderConfig, classes: int) -> Objective:
    """The training objective of a side encoder; `classes` of its images, which only a second old
    model reads."""
    if config.side_info in ("alternate", "mixup"):
        return AlternateObjective(config, classes)
    if config.side_info == "autoencoder":
        return AutoencoderObjective(config)
    # simclr and binary_simclr: build_encoder makes the difference.
    return SimclrObjective(config)
