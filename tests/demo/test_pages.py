import sys
from pathlib import Path

import pytest

from demo.children import Children, wait_for_line
from nobackfill.errors import NobackfillError


def test_an_address_is_told_even_by_a_command_that_has_ended(tmp_path: Path) -> None:
    script = "print('begun'); print('console: http://127.0.0.1:1/')"
    with Children(tmp_path) as children:
        child = children.start("gateway", [sys.executable, "-c", script])
        child.process.wait()
        assert wait_for_line(child, "console: ", 60) == "console: http://127.0.0.1:1/"


def test_a_command_that_ends_without_an_address_is_not_waited_for(tmp_path: Path) -> None:
    script = "import sys; print('no extra [web]', file=sys.stderr); sys.exit(69)"
    with (
        Children(tmp_path) as children,
        pytest.raises(NobackfillError, match=r"(?s)code 69:.*no extra \[web\].*browse\.log"),
    ):
        wait_for_line(children.start("browse", [sys.executable, "-c", script]), r"\{", 60)
