"""The training loop, its objectives, and the run folders that trainings resume from.

>>> from nobackfill.training import load_config
>>> from nobackfill.training.config import configs_folder
>>> from nobackfill.training.loop import learning_rate
>>> config = load_config(configs_folder() / "digits" / "embedder-1.yaml")
>>> learning_rate(config, epoch=2) == config.lr
True
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.training.loop.loop import (
        DivergedError as DivergedError,
        train_objective as train_objective,
        learning_rate as learning_rate,
    )
    from nobackfill.training.loop.objective import (
        FrozenModule as FrozenModule,
        Objective as Objective,
    )
    from nobackfill.training.loop.run import (
        Checkpoint as Checkpoint,
        read_checkpoint as read_checkpoint,
        read_finished as read_finished,
    )
    from nobackfill.training.loop.upgrade import (
        read_upgrade as read_upgrade,
        train_upgrade as train_upgrade,
    )
else:
    __getattr__ = export_lazily(__name__)
