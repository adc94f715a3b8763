"""What the distributions hold: every module and data file, types, a page; and nothing else."""

import platform
import re
import shutil
import subprocess
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, build
from tests.test_architecture import ROOTS as ALL_ROOTS

# The comparison of methods stays in checkouts.
ROOTS = {root: rooms for root, rooms in ALL_ROOTS.items() if root != "research"}


def contents(wheel: Path) -> dict[str, bytes]:
    """Its files but those about the distribution itself."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        return {name: archive.read(name) for name in names}


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_the_wheel_holds_every_file_of_the_roots_and_nothing_else(wheel: Path) -> None:
    """Templates, Triton's backend, its requirements: code reads data as well."""
    files = {
        str(path.relative_to(ROOT / root)): path.read_bytes()
        for root in ROOTS
        for path in (ROOT / root / "nobackfill").rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".so"}
    }
    files |= {
        f"nobackfill/training/{path.relative_to(ROOT)}": path.read_bytes()
        for path in (ROOT / "configs").rglob("*.yaml")
    }
    assert len(files) > 300
    found = contents(wheel)
    assert {name: found[name] for name in found if not name.endswith(".so")} == files


@pytest.mark.skipif(
    shutil.which("objdump") is None or platform.machine() != "x86_64",
    reason="needs objdump, and knows one processor's registers",
)
def test_the_wheels_compiled_code_runs_on_every_processor_of_its_kind(
    wheel: Path, tmp_path: Path
) -> None:
    """An instruction that the processor does not have ends the process. Only distances use newer
    ones, in a namespace for each kind, and the module asks the processor first."""
    compiled = {name: code for name, code in contents(wheel).items() if name.endswith(".so")}
    if not compiled:
        pytest.skip("nothing was compiled: there is no compiler")
    ((name, code),) = compiled.items()
    assert name.startswith("nobackfill/gallery/search/_native.")
    (tmp_path / "module.so").write_bytes(code)
    said = subprocess.run(
        ["objdump", "-d", tmp_path / "module.so"], check=True, capture_output=True, text=True
    ).stdout
    kinds: dict[str, set[str]] = {register: set() for register in ("xmm", "ymm", "zmm")}
    for function, code_of_it in re.findall(r"^\w+ <([^>]+)>:\n(.*?)(?:\n\n|\Z)", said, re.S | re.M):
        for register, functions in kinds.items():
            if f"%{register}" in code_of_it:
                # As the compiler spells nobackfill::avx2::…
                kind = re.match(r"_ZNK?10nobackfill\d+(avx2|avx512)", function)
                functions.add(kind[1] if kind else "any")
    assert kinds["xmm"] >= {"any"} and kinds["ymm"] >= {"avx2"}
    assert kinds["ymm"] <= {"avx2", "avx512"} and kinds["zmm"] == {"avx512"}


def test_a_wheel_of_the_sdist_is_the_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert contents(build("wheel", unpacked, tmp_path / "again")) == contents(wheel)


def test_ready_made_converters_stay_in_checkouts(wheel: Path, tmp_path: Path) -> None:
    assert list((ROOT / "converters").glob("*/map.npz"))
    with tarfile.open(build("sdist", ROOT, tmp_path)) as archive:
        names = [*archive.getnames(), *contents(wheel)]
    assert not [name for name in names if "/converters/" in name or name.endswith("map.npz")]


def test_types_are_there_for_apps(wheel: Path) -> None:
    """mypy takes the marker of the namespace for all below it, pyright a room's own; the modules
    of the base have the namespace's alone, and each root of an editable install its rooms'."""
    rooms = {f"nobackfill/{room}/py.typed" for rooms in ROOTS.values() for room in rooms}
    assert rooms | {"nobackfill/py.typed"} <= set(contents(wheel))


def test_the_licences_of_others_come_with_their_code(wheel: Path, tmp_path: Path) -> None:
    theirs = "core/nobackfill/gallery/search/native/hnswlib/LICENSE"
    text = (ROOT / theirs).read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(f"licenses/{theirs}"))
        assert archive.read(record) == text and b"Apache License" in text
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        assert f"License-File: {theirs}".encode() in archive.read(metadata)
    with tarfile.open(build("sdist", ROOT, tmp_path)) as packed:
        (held,) = (one for one in packed.getmembers() if one.name.endswith(f"/{theirs}"))
        read = packed.extractfile(held)
        assert read is not None and read.read() == text


def test_the_package_has_a_page(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = str(metadata.get_payload())
    assert page.startswith("# nobackfill\n")
    assert "## Try it" in page
    assert not re.findall(r"\]\((?!https?://)", page), "links that lead nowhere on a package's page"


def test_the_metadata_name_no_address_and_every_python_that_was_tried(metadata: Message) -> None:
    assert metadata.get_all("Project-URL") is metadata["Home-page"] is None
    tried = re.findall(r"Python :: (3\.\d+)", " ".join(metadata.get_all("Classifier", [])))
    first, last = tried[0], tried[-1]
    following = f"3.{int(last.removeprefix('3.')) + 1}"
    assert metadata["Requires-Python"] == f"<{following},>={first}"
