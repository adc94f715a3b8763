"""The gateway's small state: what several threads change at once, each by what was there."""

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

from nobackfill.errors import UnauthenticatedError, VerificationError
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.state import AUDIT, MAX_AUDIT_ENTRIES, WRITER, StateFile
from tests.server.conftest import Stages, publish_stage
from tests.server.guarded import tokens_file
from tests.server.support import Client, images, refused, running
from tests.server.test_cli import run_json
from tests.support.postgres import Server

NAMES = [f"g{i}" for i in range(24)]


def test_no_pause_is_lost_beside_others(gateway: GatewayServer, tmp_path: Path) -> None:
    """Two that paused at once both wrote what they had read before: one was forgotten."""
    upgrading, state = gateway.upgrading, gateway.state
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(upgrading.pause, NAMES))
        assert sorted(state.current.paused) == sorted(NAMES)
        list(pool.map(upgrading.resume, NAMES[::2]))
        assert sorted(state.current.paused) == sorted(NAMES[1::2])
        list(pool.map(lambda name: upgrading.forget({name}), NAMES[1::2]))
        assert state.current.paused == ()
    upgrading.pause("g1")
    assert StateFile(tmp_path / "data" / "state.json").current == state.current


@pytest.mark.parametrize("kept", ["in files", "in a database"])
def test_deeds_are_kept_by_the_names_of_tokens(
    near_gate: None, kept: str, stages: Stages, tmp_path: Path, postgres: Server
) -> None:
    """As `gateway audit` tells beside the gateway."""
    repo, tokens = tmp_path / "repo", tokens_file(tmp_path / "tokens")
    publish_stage(repo, stages[1])
    with postgres.database() as url:
        store = f"sqlite:{tmp_path / 'data'}" if kept == "in files" else url
        with running(repo, tmp_path / "data", tokens_file=tokens, store=store) as gateway:
            with Client(gateway.address, "admin") as admin:
                admin.create_gallery("g")
                admin.put_images(images(3))
                publish_stage(repo, stages[2])
                admin.swap(2)
                admin.delete("g", ["i0", "nothing"])
                # Nothing happened.
                admin.delete("g", ["nothing"])
            with Client(gateway.address, "other") as other:
                other.rollback(confirm=True)
                other.delete_gallery("g")
            with Client(gateway.address) as nobody, refused(UnauthenticatedError):
                nobody.delete_gallery("g")
            found = run_json("audit", "--store", store)["audit"]
        assert [(deed["who"], deed["what"], deed["of_what"]) for deed in found] == [
            ("admin", "activate", "release 2"),
            ("admin", "delete", "1 items of gallery g"),
            ("other", "roll back", "to release 1, 0 items not found"),
            ("other", "delete", "gallery g"),
        ]
        times = [deed["time"] for deed in found]
        assert times == sorted(times)


def line_of(what: str, who: str = "ann", *, ascii_only: bool = True) -> bytes:
    """A deed as it is kept, without the line's end."""
    deed = {"time": 1.0, "who": who, "what": "delete", "of_what": what}
    return json.dumps(deed, ensure_ascii=ascii_only).encode()


@pytest.mark.parametrize("ascii_only", [True, False], ids=["now", "older versions"])
def test_a_cut_line_costs_no_other_deed(tmp_path: Path, ascii_only: bool) -> None:
    """Wherever a kill or a full disk has cut it, inside a character as well."""
    state, file = StateFile(tmp_path / "state.json"), tmp_path / AUDIT
    cut = line_of("gallery cut", "jürgen", ascii_only=ascii_only)
    for length in range(1, len(cut)):
        file.write_bytes(line_of("gallery first") + b"\n" + cut[:length])
        assert [deed.of_what for deed in state.audit_entries()] == ["gallery first"]
        state.record_audit("ann", "delete", "gallery next")
        assert [deed.of_what for deed in state.audit_entries()] == ["gallery first", "gallery next"]


def test_any_name_is_kept_in_ascii_and_on_one_line(tmp_path: Path) -> None:
    state, file = StateFile(tmp_path / "state.json"), tmp_path / AUDIT
    names = ["jürgen", "a\u2028b", "a\nb"]
    for name in names:
        state.record_audit(name, "delete", "gallery g")
    assert [deed.who for deed in state.audit_entries()] == names
    assert file.read_bytes().isascii()
    assert len(file.read_bytes().splitlines()) == len(names)
    file.write_bytes(line_of("gallery g", names[1], ascii_only=False) + b"\n")
    assert [deed.who for deed in state.audit_entries()] == names[1:2]


def test_an_audit_that_cannot_be_read_is_an_error_with_an_exit_code(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state.json")
    assert state.audit_entries() == []
    (tmp_path / AUDIT).mkdir()
    with pytest.raises(VerificationError, match="the audit cannot be read"):
        state.audit_entries()


def test_of_very_many_deeds_the_latest_are_told(tmp_path: Path) -> None:
    """Lines that say nothing do not count."""
    state, file = StateFile(tmp_path / "state.json"), tmp_path / AUDIT
    kept = [f"gallery g{i}" for i in range(MAX_AUDIT_ENTRIES + 10)]
    file.write_bytes(b"".join(line_of(what) + b"\n\xc3\n[]\n" for what in kept))
    assert [deed.of_what for deed in state.audit_entries()] == kept[10:]


@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        ({"format": 2}, "format 2"),
        ({"leases": {}}, "leases"),
        ({"format": 2, "a": 1}, "a, format 2"),
    ],
)
def test_a_newer_versions_state_is_not_called_damaged(
    tmp_path: Path, change: dict[str, object], unknown: str
) -> None:
    path = tmp_path / "state.json"
    StateFile(path).change(active=1)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    newer = f"newer nobackfill: {unknown}.*start"
    with pytest.raises(VerificationError, match=f"{newer} nobackfill {version('nobackfill')}, whi"):
        StateFile(path)
    path.with_name(WRITER).write_text('{"nobackfill": "9.9.9"}')
    with pytest.raises(VerificationError, match=f"{newer} nobackfill 9.9.9, which wrote it"):
        StateFile(path)
    for odd in ("", "[]", "[" * 10_000, '{"nobackfill": 5}', '{"nobackfill": "odd words"}'):
        path.with_name(WRITER).write_text(odd)
        with pytest.raises(VerificationError, match=f"{newer} the newer nobackfill that wrote it"):
            StateFile(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"active": "one"}))
    with pytest.raises(VerificationError, match="is damaged"):
        StateFile(path)
