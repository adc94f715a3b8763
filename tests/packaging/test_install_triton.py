"""`gateway install-triton` where it cannot: one line says why. That it can is tried by hand, as it
downloads 400 MB."""

from pathlib import Path

from tests.packaging.environments import Environment


def test_without_an_index_it_says_so(server: Environment, tmp_path: Path) -> None:
    """The versions come from the wheel: the first that pip looks for is named."""
    done = server.run(
        "gateway", "install-triton", "triton", cwd=tmp_path, code=69, PIP_NO_INDEX="1"
    )
    assert done.stderr.startswith("gateway: triton: cannot install Triton's packages (ERROR: ")
    assert "==" in done.stderr
    assert done.stderr.count("\n") == 1
    asked = server.run(
        "gateway", "serve", "--triton-venv=triton", "--model-repo=.", cwd=tmp_path, code=69
    )
    assert "gateway install-triton" in asked.stderr.splitlines()[-1]


def test_a_folder_that_cannot_be_made(server: Environment, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = server.run("gateway", "install-triton", "file/triton", cwd=tmp_path, code=73)
    assert done.stderr.startswith("gateway: file/triton: cannot create a virtual environment")
    assert done.stderr.count("\n") == 1
