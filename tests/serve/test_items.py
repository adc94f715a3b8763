"""Where items come from: bounded, and nothing beside what was named."""

from pathlib import Path

import pytest

from nobackfill.errors import ConfigurationError, InvalidInputError, TooLargeError, UnavailableError
from nobackfill.serve import FolderItems, FunctionItems, UrlItems
from tests.serve.host import Host


def test_no_id_leads_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "b.jpg").write_bytes(b"12345")
    (tmp_path / "secret").write_bytes(b"x")
    (folder / "link.jpg").symlink_to(tmp_path / "secret")
    items = FolderItems(folder)
    assert items.read("a/b.jpg", 5) == b"12345"
    assert items.read("a/c.jpg", 5) is None
    for name in ("../secret", "/etc/passwd", "a/../../secret", "link.jpg"):
        with pytest.raises(InvalidInputError, match="inside the folder"):
            items.read(name, 100)
    with pytest.raises(TooLargeError, match="at most 4 bytes"):
        items.read("a/b.jpg", 4)


def test_ids_that_can_name_no_file_are_refused(tmp_path: Path) -> None:
    for name in ("a\0b", "a\ud800"):
        with pytest.raises(InvalidInputError, match="can name a file"):
            FolderItems(tmp_path).read(name, 100)
    with Host() as host, pytest.raises(InvalidInputError, match="valid Unicode"):
        UrlItems(f"{host.url}/{{id}}", ["127.0.0.1"]).read("a\ud800", 100)


def test_a_function_is_bounded_too() -> None:
    items = FunctionItems({"a": "äää"}.get, "text")
    assert items.read("a", 6) == "äää"
    assert items.read("b", 6) is None
    with pytest.raises(TooLargeError):
        items.read("a", 5)


def test_only_named_hosts_are_asked_and_no_redirect_is_followed() -> None:
    with Host() as host:
        items = UrlItems(f"{host.url}/images/{{id}}.jpg", ["127.0.0.1"])
        assert items.read("a/b", 100) == b"/images/a%2Fb.jpg"
        assert items.read("gone", 100) is None
        assert items.read("gone-endless", 100) is None
        with pytest.raises(TooLargeError):
            items.read("large", 1000)
        with pytest.raises(UnavailableError, match="HTTP status 302"):
            items.read("moved", 100)
        with pytest.raises(InvalidInputError):
            items.read("..", 100)
    with pytest.raises(UnavailableError):
        items.read("a", 100)


@pytest.mark.parametrize(
    "template",
    ["http://images.example/{id}", "https://other.example/{id}", "https://images.example/", "::"],
)
def test_addresses_that_are_no_named_host_over_tls_are_refused(template: str) -> None:
    with pytest.raises(ConfigurationError):
        UrlItems(template, ["images.example"])
