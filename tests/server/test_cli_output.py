"""Output of commands for a person: whole words in a narrow terminal, no time left of nothing."""

from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from nobackfill.errors import NotFoundError
from nobackfill.server.backup import backup
from nobackfill.server.cli.app import print_result
from nobackfill.server.cli.operations import format_upgrade_progress
from nobackfill.v1 import upgrade_pb2 as pb


def test_a_narrow_terminal_loses_no_letter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    reason = "release 2 does not pass its probes on this machine"
    print_result(False, {}, [["release", "state", "reason"], ["2", "activating", reason]])
    printed = capsys.readouterr().out
    letters = "".join(sign for sign in printed if sign.isalnum())
    assert "\u2026" not in printed
    assert sum(map(letters.count, "abcdefghijklmnopqrstuvwxyz")) == sum(
        map("releasestatereasonactivating".__add__(reason).count, "abcdefghijklmnopqrstuvwxyz")
    )


def test_no_time_is_left_where_nothing_runs() -> None:
    assert (
        format_upgrade_progress(pb.UpgradeProgress(state=pb.UPGRADE_STATE_DONE, done=5, total=5))
        == "done 5/5"
    )
    running = pb.UpgradeProgress(
        state=pb.UPGRADE_STATE_RUNNING, done=5, total=10, items_per_second=2,
        remaining=Duration(seconds=3),
    )  # fmt: skip
    assert format_upgrade_progress(running) == "running 5/10 2 items/s, 3 s left"


def test_a_gateway_on_postgresql_is_told_how_it_is_backed_up(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="pg_dump"):
        backup(tmp_path / "data", tmp_path / "backup")
