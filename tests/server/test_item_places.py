"""Where a gallery's images may come from: what the operator's settings name, and nothing else."""

from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
from pydantic import SecretStr

from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
)
from nobackfill.server.healing.registration import AllowedSources, HealingSource
from nobackfill.server.settings import load_settings
from nobackfill.serving.sources import ItemSource
from tests.support.postgres import Server


def opened(address: str, columns: dict[str, str], functions: dict[str, str]) -> ItemSource:
    places = AllowedSources(
        [],
        [],
        columns={name: SecretStr(one) for name, one in columns.items()},
        functions=functions,
    )
    return places.open(HealingSource.checked(address))


def test_a_column_gives_bytes_and_changes_nothing(postgres: Server) -> None:
    with postgres.connected() as (address, connection):
        connection.execute('CREATE TABLE "a b" (id int PRIMARY KEY, "i%s" bytea, t text)')
        connection.execute("""INSERT INTO "a b" VALUES (1, 'abc', 't'), (2, NULL, 't')""")
        columns = {
            "good": f"{address}#public.a b.id.i%s",
            "text": f"{address}#a b.id.t",
            "gone": f"{address}#none.id.t",
            "down": "postgresql://u:SECRET@127.0.0.1:1/d#t.id.i",
            "bad": "postgresql://u:SECRET@127.0.0.1:1/d#t",
        }
        items = opened("column:good", columns, {})
        assert items.read("1", 3) == b"abc"
        assert items.read("2", 3) is None
        assert items.read("3", 3) is None
        with pytest.raises(TooLargeError):
            items.read("1", 2)
        with pytest.raises(InvalidInputError, match="'1; DROP"):
            items.read('1; DROP TABLE "a b"', 3)
        # What the connection lost is made again.
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        with pytest.raises(UnavailableError):
            items.read("1", 3)
        assert items.read("1", 3) == b"abc"
        assert opened("column:text", columns, {}).read("1", 3) == "t"
        with pytest.raises(TooLargeError):
            opened("column:text", columns, {}).read("1", 0)
        for name, error in (("gone", NotFoundError), ("down", UnavailableError)):
            with pytest.raises(error) as refused:
                opened(f"column:{name}", columns, {}).read("1", 3)
            assert "SECRET" not in str(refused.value)
        with pytest.raises(NotFoundError, match="table of the setting item_columns"):
            opened("column:gone", columns, {}).read("1", 3)
        with pytest.raises(ConfigurationError, match=r"TABLE\.KEY\.COLUMN") as wrong:
            opened("column:bad", columns, {})
        assert "SECRET" not in str(wrong.value)
        del items
        with pytest.raises(ConfigurationError, match="not in the setting item_columns"):
            opened(f"column:{address}#t.id.i", columns, {})


class Broken(psycopg.Connection[Any]):
    """The second statement of the first one fails."""

    made: ClassVar[list["Broken"]] = []

    def execute(self, *arguments: Any, **options: Any) -> Any:
        if self not in self.made:
            self.made.append(self)
        elif len(self.made) == 1:
            raise psycopg.OperationalError("broken")
        return super().execute(*arguments, **options)


def test_a_connection_reads_only_or_is_none(
    postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    Broken.made.clear()
    with postgres.database() as address:
        with psycopg.connect(address, autocommit=True) as connection:
            setting = "convert_to(current_setting('default_transaction_read_only'), 'UTF8')"
            connection.execute(f"CREATE VIEW v AS SELECT 1 AS id, {setting} AS i".encode())
        monkeypatch.setattr(psycopg, "connect", Broken.connect)
        items = opened("column:v", {"v": f"{address}#v.id.i"}, {})
        with pytest.raises(UnavailableError):
            items.read("1", 3)
        assert Broken.made[0].closed
        assert items.read("1", 3) == b"on"
        # Of a machine that has vanished the kernel tells, and so late at most.
        told = Broken.made[1].info.get_parameters()
        assert int(told["tcp_user_timeout"]) <= 10_000 and int(told["keepalives_idle"]) <= 10
        del items


def test_a_function_is_the_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_items.py").write_text(
        "def picture(name): return None if name == 'gone' else name.encode()\nnothing = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    functions = {"shop": "shop_items:picture", "none": "shop_items:nothing", "no": "no_such:f"}
    items = opened("function:shop", {}, functions)
    assert items.read("i1", 10) == b"i1"
    assert items.read("gone", 10) is None
    with pytest.raises(TooLargeError):
        items.read("a long name", 3)
    for address, why in (
        ("function:none", "is not a function"),
        ("function:no", "cannot be imported"),
        ("function:os:system", "not in the setting item_functions"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            opened(address, {}, functions)


def test_settings_name_them_in_their_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(
        '[item_columns]\nphotos = "postgresql://u:SECRET@h/d#t.id.i"\n'
        '[item_functions]\nshop = "shop_items:picture"\n'
    )
    settings = load_settings({}, file)
    assert settings.item_functions == {"shop": "shop_items:picture"}
    assert "SECRET" not in repr(settings)
