"""Where a publication comes from: folders and a real static HTTP host."""

import functools
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tuf.api.exceptions import DownloadError, DownloadHTTPError, SlowRetrievalError

from nobackfill.errors import NotFoundError, UnavailableError
from nobackfill.release.probes import check_probes
from nobackfill.release.publishing.publish import publish
from nobackfill.release.trust import trust as fetchers
from nobackfill.release.trust.trust import (
    Fetcher,
    FolderFetcher,
    HttpFetcher,
    Trust,
    fetch_first_root,
    fetcher_for,
)
from tests.support import hosts
from tests.support.releases import draft
from tests.support.simulator import Simulator

DATA = bytes(range(256)) * 3000


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Python's own static host; it does not serve ranges."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "host" / "deep").mkdir(parents=True)
    (tmp_path / "host" / "deep" / "file").write_bytes(DATA)
    return tmp_path / "host"


@pytest.fixture
def host(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with hosts.Host(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(params=["folder", "http"])
def source(request: pytest.FixtureRequest, folder: Path, host: str) -> tuple[Fetcher, str]:
    return fetcher_for(str(folder) if request.param == "folder" else host)


@pytest.mark.parametrize("offset", [0, 1, 65_536, len(DATA) - 1])
def test_files_are_read_from_any_offset(offset: int, source: tuple[Fetcher, str]) -> None:
    fetcher, base = source
    assert b"".join(fetcher.fetch_from(f"{base}deep/file", offset)) == DATA[offset:]


@pytest.mark.parametrize("name", ["missing", "deep/missing", "deep/file/below"])
def test_missing_files_are_missing(name: str, source: tuple[Fetcher, str]) -> None:
    fetcher, base = source
    with pytest.raises(DownloadHTTPError) as caught:
        list(fetcher.fetch_from(base + name, 0))
    assert caught.value.status_code == 404


def test_a_folder_is_no_file(folder: Path) -> None:
    with pytest.raises(DownloadError):
        list(FolderFetcher(folder).fetch_from(f"{folder}/deep", 0))


def test_ranges_are_used_where_the_host_serves_them() -> None:
    asked: list[str] = []

    class Ranges(Quiet):
        def do_GET(self) -> None:
            asked.append(self.headers["Range"])
            self.send_response(206)
            self.send_header("Content-Length", str(len(DATA) - 1000))
            self.end_headers()
            self.wfile.write(DATA[1000:])

    with hosts.Host(("127.0.0.1", 0), Ranges) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/file"
        assert b"".join(HttpFetcher().fetch_from(url, 1000)) == DATA[1000:]
        server.shutdown()
        thread.join()
    assert asked == ["bytes=1000-"]


def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    fetcher, base = fetcher_for(url)
    with pytest.raises(UnavailableError):
        fetch_first_root(fetcher, base)


def test_an_empty_host_publishes_nothing(host: str) -> None:
    fetcher, base = fetcher_for(host)
    with pytest.raises(NotFoundError):
        fetch_first_root(fetcher, base)


@pytest.fixture
def mute_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, socket.socket]]:
    """A host that accepts and then only says what the test sends."""
    monkeypatch.setattr(fetchers, "READ_TIMEOUT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/file", server


def test_a_silent_host_is_given_up(mute_host: tuple[str, socket.socket]) -> None:
    url, _ = mute_host
    started = time.monotonic()
    with pytest.raises(DownloadError):
        list(HttpFetcher().fetch_from(url, 0))
    assert time.monotonic() - started < 30


def test_a_host_that_falls_silent_is_given_up(mute_host: tuple[str, socket.socket]) -> None:
    url, server = mute_host

    def serve() -> None:
        connection, _ = server.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        done.wait(20)
        connection.close()

    done = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    pieces = HttpFetcher().fetch_from(url, 0)
    # What has come is given at once, not kept until a buffer is full.
    assert next(pieces) == b"half"
    with pytest.raises(SlowRetrievalError):
        next(pieces)
    done.set()
    thread.join()


@pytest.mark.faults
@pytest.mark.parametrize("name", ["timestamp.json", "embedder_1/1/model.onnx"])
def test_a_dripping_host_is_given_up_within_half_a_minute(name: str, tmp_path: Path) -> None:
    """One byte a second, for real: it never falls silent, and never ends."""
    simulator = Simulator()
    simulator.add_file("embedder_1/1/model.onnx", DATA)
    simulator.advance()
    ended = threading.Event()

    class Drip(Quiet):
        def do_GET(self) -> None:
            path = self.path.lstrip("/")
            data = simulator.files.get(path)
            self.send_response(200 if data else 404)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            for byte in data or b"":
                self.wfile.write(bytes([byte]))
                if path == name and ended.wait(1):
                    return

    with hosts.Host(("127.0.0.1", 0), Drip) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        fetcher, base = fetcher_for(f"http://127.0.0.1:{server.server_address[1]}")
        trust = Trust(tmp_path / "state", fetcher, base, simulator.files["1.root.json"])
        started = time.monotonic()
        with pytest.raises(UnavailableError):
            trust.refresh()
            trust.download(name, tmp_path)
        seconds = time.monotonic() - started
        ended.set()
        server.shutdown()
    print(f"{name}: given up after {seconds:.1f} s")
    assert seconds < 30


@pytest.mark.usefixtures("near_gate")
def test_a_static_host_serves_a_publication_unchanged(
    host: str, folder: Path, tmp_path: Path
) -> None:
    repo = folder / "repo"
    first = draft(tmp_path / "drafts", 1)
    publish(repo, first)
    publish(repo, draft(tmp_path / "drafts", 2, [first.manifest], int8=True))
    fetcher, base = fetcher_for(f"{host}/repo")
    trust = Trust(tmp_path / "state", fetcher, base, fetch_first_root(fetcher, base))
    assert trust.refresh()
    assert trust.newest_release() == 2
    manifest = trust.manifest(2)
    for file in manifest.files():
        trust.download(file.path, tmp_path / "models")
    check_probes(tmp_path / "models", manifest)
