"""Nothing that comes from elsewhere moves a terminal's cursor, hides, or begins a line."""

import unicodedata
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nobackfill.terminal import escape_control

ROOT = Path(__file__).parents[2]


def test_controls_are_written_out() -> None:
    assert escape_control("a\x1b]0;title\x07b\r\n\x9b31m") == r"a\x1b]0;title\x07b\r\n\x9b31m"
    assert escape_control("gpj.\u202eexe\u2028\udc80") == r"gpj.\u202eexe\u2028\udc80"
    assert escape_control("Zürich 東京\u3000é") == "Zürich 東京\u3000é"


@given(st.text(st.characters(codec=None)))
def test_what_is_left_can_be_shown(text: str) -> None:
    shown = escape_control(text)
    shown.encode()
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_no_command_prints_an_error_as_it_came() -> None:
    """What a refusal says may hold names and a server's words: every command line escapes it."""
    bare = [
        path
        for path in (
            "client/nobackfill/client/cli/main.py",
            "server/nobackfill/server/cli/app.py",
            "core/nobackfill/release/publishing/cli.py",
            "core/nobackfill/report/__main__.py",
        )
        if 'escape_control(f"' not in (ROOT / path).read_text("utf-8")
    ]
    assert not bare
