"""The notebooks run as they stand, and are committed with their outputs."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from manual.notebooks import FOLDER, page

UPGRADE, METHOD = FOLDER / "upgrade-a-gallery.ipynb", FOLDER / "which-method.ipynb"
# Between two notebooks of one kernel: no name of the first is left, but what it imported is loaded.
_RESET = "%reset -f"


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """What each notebook printed, run one after the other in one kernel: its start costs more than
    they do. Raises CellExecutionError at the first failure."""
    folder = tmp_path_factory.mktemp("notebooks")
    both, counts = read(UPGRADE), {}
    for path in (UPGRADE, METHOD):
        notebook = read(path)
        counts[path] = len(code(notebook))
        if path is METHOD:
            both["cells"] += [nbformat.v4.new_code_cell(_RESET), *notebook["cells"]]  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(folder / name.lower()))
        resources = {"metadata": {"path": str(folder)}}
        NotebookClient(both, timeout=200, resources=resources).execute()
    cells = code(both)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] == "stream" for output in outputs)
    parts = {UPGRADE: cells[: counts[UPGRADE]], METHOD: cells[-counts[METHOD] :]}
    return {
        path: "".join(output["text"] for cell in part for output in cell["outputs"])
        for path, part in parts.items()
    }


def test_a_gallery_is_upgraded_in_50_lines(said: dict[Path, str]) -> None:
    lines = [line for c in code(read(UPGRADE)) for line in c["source"].splitlines() if line.strip()]
    assert len(lines) <= 50
    assert "600 of 600 items migrated" in said[UPGRADE]
    lower, upgraded, upper = (float(share) for share in re.findall(r"(\d+\.\d)%", said[UPGRADE]))
    # Half of the gap and more is closed; the map may beat new/new by a few queries of 297.
    assert (lower + upper) / 2 < upgraded < upper + 5


def test_the_method_hangs_on_the_data(said: dict[Path, str]) -> None:
    ways = re.findall(
        r"^(stay|query adapter|map|both|lazily|re-embed): ", said[METHOD], re.MULTILINE
    )
    assert len(ways) == 5
    assert (ways[0], ways[-1]) == ("map", "stay")


@pytest.mark.parametrize("path", [UPGRADE, METHOD], ids=lambda path: path.stem)
def test_notebooks_are_committed_with_their_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    printed = "".join(output["text"] for cell in code(notebook) for output in cell["outputs"])
    assert "new/upgraded" in printed
    assert all(line in page(path) for line in printed.splitlines())
    for cell in code(notebook):
        assert f"```python\n{cell['source']}\n```" in page(path)
    assert {file.name for file in FOLDER.iterdir()} == {UPGRADE.name, METHOD.name}
