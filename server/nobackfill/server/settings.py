"""Settings: flag > environment (NOBACKFILL_*) > file (TOML) > default."""

import os
import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from nobackfill.errors import ConfigurationError
from nobackfill.loopback import is_loopback

IN_PROCESS = "in-process"
TLS = "grpcs://"
SQLITE = "sqlite:"
DATABASES = ("postgresql://", "postgres://")


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


class Settings(BaseSettings):
    """What `gateway serve` is configured with."""

    model_config = SettingsConfigDict(env_prefix="NOBACKFILL_", extra="forbid", frozen=True)

    # The publication folder, read only.
    model_repo: Path = Path("model_repo")
    # Everything the gateway itself keeps.
    data: Path = Path("gateway-data")
    # Where galleries and the gateway's state are kept: sqlite:FOLDER (without FOLDER, or without
    # any of it: the data folder), or postgresql://…, which may hold a password.
    store: SecretStr | None = None
    # Who carries upgrades, where the store is a database: so many processes of this machine, or the
    # Ray cluster at this address (auto: the one that runs here). Otherwise a thread does.
    workers: int = Field(default=0, ge=0, le=256)
    ray: str | None = None
    address: str = "127.0.0.1:50051"
    metrics_address: str = "127.0.0.1:9464"
    # Whether pages for operators are shown, and where.
    console: bool = False
    console_address: str = "127.0.0.1:9465"
    # Metrics and health pages are in the clear; elsewhere than on loopback only where this is set.
    metrics_open: bool = False
    # Serve with a plain grpc.server, as where grpcio is none that loop.py was tested with. It
    # listens elsewhere than on loopback only where the second is set.
    plain_grpc: bool = False
    plain_grpc_open: bool = False
    # A tritonserver somebody else runs, HOST:PORT or grpcs://HOST:PORT; without it the gateway runs
    # its own. The word in-process: embed with onnxruntime inside the gateway.
    triton: str | None = None
    # Of that tritonserver: its authority's certificate, when the system does not know it, and the
    # file with the token that goes with every call.
    triton_ca: Path | None = None
    triton_token_file: Path | None = None
    # The virtual environment with nvidia-pytriton; without it, the folder beside our own.
    triton_venv: Path | None = None
    # The publication folder's first root metadata, when it must not be taken on trust.
    root: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    # Clients must show a certificate of this authority (mTLS).
    tls_client_ca: Path | None = None
    tokens_file: Path | None = None
    # Calls at once; more are refused with RESOURCE_EXHAUSTED.
    max_calls: int = Field(default=256, ge=8, le=10_000)
    # Where sources of images may lie that galleries are registered with: below these folders, and
    # on these hosts. Whoever may change a gallery can name no other.
    item_folders: tuple[Path, ...] = ()
    item_hosts: tuple[str, ...] = ()
    # Sources of other kinds, by names that a gallery may be registered with: columns of databases,
    # postgresql://USER@HOST/DATABASE#TABLE.KEY.COLUMN (which may hold a password), and functions of
    # this machine's Python, module:function, which take an id.
    item_columns: dict[str, SecretStr] = Field(default_factory=dict)
    item_functions: dict[str, str] = Field(default_factory=dict)
    # Bytes that the vault keeps for one token's name.
    vault_quota: int = Field(default=50 * 2**30, ge=2**20)
    # No call may take longer, whatever deadline it brings. Streams are exempt.
    max_call_seconds: float = Field(default=60, gt=0, le=3600)
    # Cores that builds of indexes may keep busy together, behind all else.
    index_threads: int = Field(default_factory=lambda: max(1, cores() // 2), ge=1, le=256)
    # After SIGTERM, how long calls under way may take to end.
    drain_seconds: float = Field(default=10, ge=0, le=600)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @model_validator(mode="after")
    def _safe(self) -> Self:
        host, _ = split_address(self.metrics_address, "metrics_address")
        if not is_loopback(host) and not self.metrics_open:
            raise ValueError(
                "metrics_address must be on loopback: metrics are served in the clear. Scrape them "
                "through an agent on this machine, or set metrics_open where the network is yours"
            )
        self._check_triton()
        if self.store is not None and not self.store.get_secret_value().startswith(
            (SQLITE, *DATABASES)
        ):
            raise ValueError("store: expected sqlite:FOLDER or postgresql://USER@HOST/DATABASE")
        in_files = self.store is None or self.store.get_secret_value().startswith(SQLITE)
        if (self.workers or self.ray) and in_files:
            raise ValueError("workers and ray need store = postgresql://…: a folder has one writer")
        if self.workers and self.ray:
            raise ValueError("expected workers or ray, not both")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("expected tls_cert and tls_key together, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key as well")
        guarded = self.tls_cert is not None and self.tokens_file is not None
        for what in ("address", "console_address"):
            address = getattr(self, what)
            host, _ = split_address(address, what)
            if not is_loopback(host) and not guarded:
                raise ValueError(
                    f"{what} {address} can be reached from other machines; that demands "
                    "tls_cert, tls_key and tokens_file. Give all three, or listen on 127.0.0.1"
                )
        return self

    def _check_triton(self) -> None:
        address = self.triton or IN_PROCESS
        if address != IN_PROCESS:
            host, _ = split_address(address.removeprefix(TLS), "triton")
            if "://" in host:
                raise ValueError(f"triton: expected HOST:PORT or {TLS}HOST:PORT, got {address!r}")
        given = self.triton_ca is not None or self.triton_token_file is not None
        if given and not address.startswith(TLS):
            raise ValueError(
                f"triton_ca and triton_token_file need triton = {TLS}HOST:PORT: a token never "
                "travels in the clear"
            )


def load_settings(flags: dict[str, Any], file: Path | None) -> Settings:
    """Merge the sources. `flags` holds what was given on the command line only.

    Raises ConfigurationError naming every key that is wrong, and an unreadable or unknown file.
    """
    if file is not None and not file.is_file():
        raise ConfigurationError(f"expected a settings file (TOML) at {file}, found none")

    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=file)

    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return FromFile(**given)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()
        ]
        raise ConfigurationError("; ".join(lines)) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{file} is not TOML: {error}") from error


def split_address(address: str, what: str) -> tuple[str, int]:
    """Split HOST:PORT, an IPv6 host in brackets. Raises ValueError naming `what`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{what}: expected HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)
