"""An object store for tests: OpenStack Swift of PyPI, which answers as S3 on loopback.

Accounts, containers and objects lie with servers of their own, as where it is run for years; here
each is one process, with one device and one replica.
"""

import getpass
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nobackfill.errors import UnavailableError
from tests.support.ports import free_port, listening
from tests.support.waiting import wait_until

# Where `make test-scale` installs tests/support/swift.txt.
PROGRAMS = Path(__file__).parents[2] / "build" / "swift" / "bin"
KEY, SECRET = "team:reader", "s3cr3t+of/nobody"
# Objects that one answer of a listing has: S3's 1,000 would need as many pictures.
PAGE = 50
_SERVERS = ("account", "container", "object")

_RINGS = """
import sys
from swift.common.ring.builder import RingBuilder

for server in sys.argv[2:]:
    name, port = server.split("=")
    ring = RingBuilder(1, 1, 0)
    ring.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "d",
                  "weight": 1})
    ring.rebalance()
    ring.get_ring().save(f"{sys.argv[1]}/{name}.ring.gz")
"""

_DEFAULTS = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}
recon_cache_path = {folder}
mount_check = false
fallocate_reserve = 0
"""

_SERVER = """
[pipeline:main]
pipeline = {name}-server

[app:{name}-server]
use = egg:swift#{name}
"""

_PROXY = f"""
[pipeline:main]
pipeline = catch_errors gatekeeper listing_formats s3api tempauth bulk slo proxy-server

[filter:catch_errors]
use = egg:swift#catch_errors

[filter:gatekeeper]
use = egg:swift#gatekeeper

[filter:listing_formats]
use = egg:swift#listing_formats

[filter:s3api]
use = egg:swift#s3api
max_bucket_listing = {PAGE}

[filter:tempauth]
use = egg:swift#tempauth
user_{KEY.replace(":", "_")} = {SECRET} .admin

[filter:bulk]
use = egg:swift#bulk

[filter:slo]
use = egg:swift#slo

[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
"""


class ObjectStore:
    """One that runs. `environment`: what reads of it need, beside an address as `uri` makes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        self._ports = {name: free_port() for name in _SERVERS}
        (folder / "d").mkdir()
        (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = tests\n")
        for name, port in self._ports.items():
            self._configure(name, port, _SERVER.format(name=name))
        self._configure("proxy", self.port, _PROXY)
        rings = [f"{name}={port}" for name, port in self._ports.items()]
        made = [str(PROGRAMS / "python"), "-c", _RINGS, str(folder), *rings]
        subprocess.run(made, check=True, timeout=60)

    def _configure(self, name: str, port: int, what: str) -> None:
        defaults = _DEFAULTS.format(port=port, user=getpass.getuser(), folder=self._folder)
        (self._folder / f"{name}-server.conf").write_text(defaults + what)

    def _start(self, name: str, port: int) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [PROGRAMS / f"swift-{name}-server", self._folder / f"{name}-server.conf", "-v"],
                stdout=log,
                stderr=log,
                cwd=self._folder,
            )
        self._processes.append(process)

        def answers() -> bool:
            if process.poll() is not None:
                said = (self._folder / f"{name}.log").read_text()[-2000:]
                raise UnavailableError(f"Swift cannot start here: its {name} server said {said}")
            return listening(port)

        wait_until(answers, f"Swift's {name} server listens", seconds=60)

    def begin(self) -> None:
        """Start all of it."""
        for name, port in self._ports.items():
            self._start(name, port)
        self.start()

    def start(self) -> None:
        """Answer, and again after `stop`."""
        self._start("proxy", self.port)

    def stop(self) -> None:
        """Nothing listens any more; what is stored stays."""
        process = self._processes.pop()
        process.kill()
        process.wait(30)

    def close(self) -> None:
        """The end."""
        for process in self._processes:
            process.kill()
            process.wait(30)

    def uri(self, path: str) -> str:
        """The address of `BUCKET/PREFIX`, for whoever has `environment`."""
        return f"s3://{quote(path)}?endpoint_override=127.0.0.1:{self.port}&scheme=http"

    @property
    def files(self) -> Any:
        """Its objects, by pyarrow."""
        from pyarrow.fs import S3FileSystem

        return S3FileSystem(
            access_key=KEY, secret_key=SECRET, endpoint_override=f"127.0.0.1:{self.port}",
            scheme="http", allow_bucket_creation=True, allow_delayed_open=True,
        )  # fmt: skip

    def make(self, bucket: str) -> None:
        """A bucket without objects."""
        self.files.create_dir(bucket)

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Objects by their keys."""
        files = self.files

        def one(key: str) -> None:
            with files.open_output_stream(f"{bucket}/{key}") as stream:
                stream.write(objects[key])

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(one, objects))

    def delete(self, bucket: str, keys: Iterable[str]) -> None:
        """Remove objects."""
        files = self.files
        for key in keys:
            files.delete_file(f"{bucket}/{key}")


@contextmanager
def running() -> Iterator[ObjectStore]:
    """A store, to the end of the block. Raises UnavailableError, saying why, where it cannot start
    here."""
    if not (PROGRAMS / "swift-proxy-server").exists():
        raise UnavailableError("Swift cannot start here: `make test-scale` has not installed it")
    with tempfile.TemporaryDirectory(prefix="swift-", ignore_cleanup_errors=True) as folder:
        store = ObjectStore(Path(folder))
        try:
            store.begin()
            yield store
        finally:
            store.close()
