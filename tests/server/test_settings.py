"""Settings: precedence, refusals, and no door to the network without TLS and tokens."""

from pathlib import Path

import pytest

from nobackfill.errors import ConfigurationError
from nobackfill.server.settings import load_settings


def test_flag_before_environment_before_file_before_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('data = "from-file"\nmodel_repo = "from-file"\naddress = "127.0.0.1:1"\n')
    monkeypatch.setenv("NOBACKFILL_DATA", "from-environment")
    monkeypatch.setenv("NOBACKFILL_MODEL_REPO", "from-environment")
    settings = load_settings({"data": Path("from-flag"), "address": None}, file)
    assert settings.data == Path("from-flag")
    assert settings.model_repo == Path("from-environment")
    assert settings.address == "127.0.0.1:1"
    assert settings.metrics_address == "127.0.0.1:9464"


@pytest.mark.parametrize("address", ["0.0.0.0:50051", "[::]:50051", "192.0.2.1:1", "example.org:1"])
def test_beyond_loopback_demands_tls_and_tokens(address: str) -> None:
    tls = {"tls_cert": Path("c"), "tls_key": Path("k")}
    tokens = {"tokens_file": Path("t")}
    for given, missing in (
        ({}, "tls_cert, tls_key, tokens_file"),
        (tls, "tokens_file"),
        (tokens, "tls_cert, tls_key"),
    ):
        with pytest.raises(ConfigurationError, match=f"Set the missing {missing}, or"):
            load_settings({"address": address} | given, None)
    assert load_settings({"address": address} | tls | tokens, None).address == address


def test_metrics_leave_this_machine_where_that_is_let() -> None:
    address = "0.0.0.0:9464"
    given = {"metrics_address": address, "metrics_open": True}
    assert load_settings(given, None).metrics_address == address


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"address": "nonsense"}, "HOST:PORT"),
        ({"address": "127.0.0.1:99999"}, "HOST:PORT"),
        ({"triton": "nonsense"}, "HOST:PORT"),
        ({"metrics_address": "0.0.0.0:9464"}, "loopback"),
        ({"tls_cert": Path("c")}, "together"),
        ({"tls_client_ca": Path("c")}, "tls_cert"),
        ({"max_calls": 0}, "max_calls"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_cannot_work_is_named(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_settings(flags, None)


def test_a_variable_that_is_no_json_and_a_file_that_is_no_text_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_bytes(b'data = "\xff"\n')
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load_settings({}, file)
    monkeypatch.setenv("NOBACKFILL_ITEM_FOLDERS", "/photos")
    with pytest.raises(ConfigurationError, match=r"item_folders.*JSON"):
        load_settings({}, None)


def test_an_unknown_key_of_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("colour = 'red'\n")
    with pytest.raises(ConfigurationError, match="colour"):
        load_settings({}, file)
    file.write_text("not TOML")
    with pytest.raises(ConfigurationError, match="TOML"):
        load_settings({}, file)
    with pytest.raises(ConfigurationError, match="found none"):
        load_settings({}, tmp_path / "missing.toml")
