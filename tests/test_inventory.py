"""Names that users rely on stay what they are."""

import difflib

from tests import inventory


def test_names_that_users_rely_on_stay() -> None:
    written = inventory.FILE.read_text(encoding="utf-8").splitlines()
    present = inventory.text().splitlines()
    changed = "\n".join(difflib.unified_diff(written, present, "written", "present", lineterm=""))
    assert not changed, (
        "commands, settings, calls, fields, metrics or exit codes differ from the inventory; "
        "keep the old names, or run `python -m tests.inventory` and put a table of old and new "
        f"names into the commit:\n{changed}"
    )
