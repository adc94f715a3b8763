"""The kinds of side-information psi (fct.txt section 5.1), by the name of `side_info`."""

from training.config import SideEncoderConfig
from training.objective import Objective
from training.simclr import SimclrObjective


def side_objective(config: SideEncoderConfig, classes: int) -> Objective:
    """The training objective of a side encoder."""
    return SimclrObjective(config)
