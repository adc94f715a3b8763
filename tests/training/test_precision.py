from pathlib import Path

import pytest
import torch

from nobackfill.training.loop.loop import fabric_precision
from tests.training.life import config_of

FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def chosen(tmp_path: Path, precision: str) -> str:
    return fabric_precision(
        config_of("embedder", tmp_path / "run", tmp_path, accelerator="cpu", precision=precision)
    )


def test_auto_is_what_the_kernel_says_of_this_processor(tmp_path: Path) -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = {
        flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()
    }
    expected = "bf16-mixed" if flags & FLAGS else "32-true"
    assert chosen(tmp_path, "auto") == expected


@pytest.mark.parametrize("has", [True, False])
def test_bf16_is_obeyed_and_its_cost_told(
    has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has})
    assert chosen(tmp_path, "auto") == ("bf16-mixed" if has else "32-true")
    assert capsys.readouterr().err == ""
    assert chosen(tmp_path, "bf16-mixed") == "bf16-mixed"
    assert ("no bf16 instructions" in capsys.readouterr().err) is not has
    assert chosen(tmp_path, "32-true") == "32-true"
    assert capsys.readouterr().err == ""
