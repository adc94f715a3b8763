"""In what numbers a training multiplies."""

import sys
from typing import Literal

import torch

from nobackfill.training.config import Config

Precision = Literal["32-true", "bf16-mixed", "16-mixed"]


def precision_of(config: Config) -> Precision:
    """lightning-fabric's word for `config.precision`; `auto` is bf16 where the device has it.

    Where an explicit bf16-mixed meets a processor without it, it is obeyed, and stderr says what
    that costs: each product is emulated.
    """
    if config.precision == "auto":
        return "bf16-mixed" if _multiplies_bf16(config) else "32-true"
    if config.precision == "bf16-mixed" and not _multiplies_bf16(config):
        print(
            f"{config.run_dir}: this processor has no bf16 instructions, so precision: bf16-mixed "
            "is many times slower than 32-true; precision: auto chooses",
            file=sys.stderr,
        )
    return config.precision


def reads_in_bf16(config: Config) -> bool:
    """Whether a model that this configuration trained reads what an upgrade is trained on in bf16:
    where it was trained so, and this device multiplies in it. It takes half of the time.
    """
    return config.precision in ("auto", "bf16-mixed") and _multiplies_bf16(config)


def _multiplies_bf16(config: Config) -> bool:
    if config.accelerator != "cpu" and torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if config.accelerator != "cpu" and torch.backends.mps.is_available():
        return False
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
