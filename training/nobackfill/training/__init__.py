"""Train embedders, side-information encoders and upgrades; needs the extra `training`.

Only this package and nobackfill.research import torch. Run `python training/train.py`,
`evaluate.py` and `export.py`, or in an installation `python -m nobackfill.training.cli.train` and
so on. `nobackfill.research`, which only a checkout has, compares methods.

>>> from nobackfill.training import load_config
>>> from nobackfill.training.config import configs_folder
>>> config = load_config(configs_folder() / "digits" / "embedder-1.yaml", ("epochs=3",))
>>> config.kind, config.epochs
('embedder', 3)
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.training.config import (
        Config as Config,
        EmbedderConfig as EmbedderConfig,
        SideEncoderConfig as SideEncoderConfig,
        UpgradeConfig as UpgradeConfig,
        load_config as load_config,
        parse_config as parse_config,
    )
    from nobackfill.training.method import (
        EmbedderInputs as EmbedderInputs,
        EmbedderMethod as EmbedderMethod,
        UpgradeInputs as UpgradeInputs,
        UpgradeMethod as UpgradeMethod,
        UpgradeShape as UpgradeShape,
    )
else:
    __getattr__ = export_lazily(__name__)
