"""Plug-ins of other packages, found by their installed metadata."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nobackfill.adopt import cli
from nobackfill.errors import ConfigurationError
from nobackfill.extras import load_plugin
from tests.support.commands import run_here


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The installed package acme-store, whose plug-in `acme` is the object `opened` of a module."""
    facts = tmp_path / "acme_store-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-store\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[nobackfill.sources]\nacme = acme_store:opened\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "acme_store.py"
    sys.modules.pop("acme_store", None)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import acme_client_that_is_gone", "ModuleNotFoundError: No module named 'acme_client"),
        ("other = 1", "AttributeError: module 'acme_store' has no attribute 'opened'"),
        ("raise OSError('no libacme.so')", "OSError: no libacme.so"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named_with_its_package(
    package: Path, code: str, reason: str
) -> None:
    package.write_text(code)
    with pytest.raises(ConfigurationError) as refused:
        load_plugin("sources", "acme")
    assert f"'acme' of the package acme-store cannot be imported ({reason}" in str(refused.value)
    assert "`pip install --upgrade acme-store`" in str(refused.value)


def test_a_command_ends_with_this_sentence(package: Path) -> None:
    package.write_text("import acme_client_that_is_gone")
    ended = run_here(cli.main, "nobackfill", "inspect", "acme:place#items")
    assert ended.returncode == 78
    assert "of the package acme-store cannot be imported" in ended.stderr
    assert "Traceback" not in ended.stderr
