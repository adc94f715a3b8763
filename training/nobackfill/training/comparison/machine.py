"""On what the results were made, in words."""

import os
import platform
import re
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")


def machine() -> str:
    """Processor, cores, accelerator and torch's version; never the machine's own name."""
    told = _CPUINFO.read_text("utf-8") if _CPUINFO.is_file() else ""
    model = re.search(r"^model name\s*: (.+)$", told, re.MULTILINE)
    name = model[1].strip() if model else platform.machine()
    beside = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {os.cpu_count()} cores{beside}, torch {torch.__version__}"
