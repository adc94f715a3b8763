"""Names that users rely on stay what they are."""

import difflib
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import inventory

if TYPE_CHECKING:
    from tests.support.postgres import Server


def _changed(written: Any, present: Any) -> str:
    old, new = (
        json.dumps(one, indent=1, sort_keys=True).splitlines() for one in (written, present)
    )
    difference = "\n".join(difflib.unified_diff(old, new, "written", "present", lineterm=""))
    return difference and (
        "what users rely on differs from the inventory; keep the old names, or run "
        "`python -m tests.inventory` and put a table of old and new names into the commit:\n"
        f"{difference}"
    )


@pytest.mark.slow
def test_names_that_users_rely_on_stay() -> None:
    written = inventory.written()
    del written["postgresql"]
    changed = _changed(written, inventory.read())
    assert not changed, changed


def test_names_in_databases_stay(postgres: "Server") -> None:
    changed = _changed(inventory.written()["postgresql"], inventory.read_postgresql(postgres))
    assert not changed, changed


def test_every_command_with_json_has_its_keys() -> None:
    commands = inventory.written()["commands"]

    def with_json(name: str, command: Any) -> set[str]:
        own = {name} if "--json" in command["parameters"] else set()
        return own.union(
            *(with_json(f"{name} {word}", sub) for word, sub in command.get("commands", {}).items())
        )

    expected = set().union(*(with_json(name, command) for name, command in commands.items()))
    assert set(inventory.JSON) == expected, "inventory.JSON must name where the keys are written"
    found = inventory.written()["json"]
    assert all(found[name] for name in expected), found


def test_defaults_are_of_fields_of_the_contract() -> None:
    written = inventory.written()
    for name in written["proto_defaults"]:
        message, field = name.split(".")
        assert field in written["messages"][f"nobackfill.v1.{message}"], name
