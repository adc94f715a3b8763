"""Load the gateway's settings: flag > environment (NOBACKFILL_*) > file (TOML) > default."""

import os
import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from nobackfill.errors import ConfigurationError
from nobackfill.loopback import is_loopback

IN_PROCESS = "in-process"
TLS = "grpcs://"
SQLITE = "sqlite:"
DATABASES = ("postgresql://", "postgres://")


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1, by its CPU affinity; a
    container's CPU quota does not count.
    """
    return len(os.sched_getaffinity(0))


class Settings(BaseSettings):
    """Hold the settings of `gateway serve`."""

    model_config = SettingsConfigDict(env_prefix="NOBACKFILL_", extra="forbid", frozen=True)

    # The publication folder, which is only read.
    model_repo: Path = Path("model_repo")
    # The gateway's data folder.
    data: Path = Path("gateway-data")
    # Store of galleries and state: sqlite:FOLDER, or postgresql://…, which may have a password.
    # Without FOLDER, or without the setting, it is the data folder.
    store: SecretStr | None = None
    # With a database: number of processes that compute upgrades, or address of a Ray cluster that
    # does (auto: the one on this machine). Without either a thread of the gateway does.
    workers: int = Field(default=0, ge=0, le=256)
    ray: str | None = None
    address: str = "127.0.0.1:50051"
    metrics_address: str = "127.0.0.1:9464"
    # Whether and where operators' pages are served.
    console: bool = False
    console_address: str = "127.0.0.1:9465"
    # Metrics and health pages are not encrypted; this allows an address other than loopback.
    metrics_open: bool = False
    # Serve with a plain grpc.server, as with a grpcio that loop.py was not tested with. The second
    # setting allows an address other than loopback for it.
    plain_grpc: bool = False
    plain_grpc_open: bool = False
    # An external tritonserver: HOST:PORT or grpcs://HOST:PORT. Without it the gateway starts its
    # own. The word in-process embeds with onnxruntime inside the gateway.
    triton: str | None = None
    # For that tritonserver: certificate of its authority, if the system does not know it, and the
    # file with the token for every call.
    triton_ca: Path | None = None
    triton_token_file: Path | None = None
    # The virtual environment with nvidia-pytriton; the default is the folder next to our own.
    triton_venv: Path | None = None
    # First root metadata of the publication; without it the folder's own is trusted at first use.
    root: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    # Authority of client certificates, which clients must then have (mTLS).
    tls_client_ca: Path | None = None
    tokens_file: Path | None = None
    # Most calls at once; more are refused with RESOURCE_EXHAUSTED.
    max_calls: int = Field(default=256, ge=8, le=10_000)
    # Folders and hosts that sources of galleries may be below; callers cannot name others.
    item_folders: tuple[Path, ...] = ()
    item_hosts: tuple[str, ...] = ()
    # Other sources by name: columns of databases, postgresql://USER@HOST/DATABASE#TABLE.KEY.COLUMN
    # (which may have a password), and Python functions of this machine, module:function, which take
    # an id.
    item_columns: dict[str, SecretStr] = Field(default_factory=dict)
    item_functions: dict[str, str] = Field(default_factory=dict)
    # Most bytes of the vault for one token's name.
    vault_quota: int = Field(default=50 * 2**30, ge=2**20)
    # Longest time of a unary call, whatever deadline it has.
    max_call_seconds: float = Field(default=60, gt=0, le=3600)
    # Cores that all index builds together may use, at low priority.
    index_threads: int = Field(default_factory=lambda: max(1, usable_cores() // 2), ge=1, le=256)
    # Longest time for calls to end after SIGTERM.
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
        """Return the sources of settings, the strongest first: options, variables, the TOML file.

        pydantic calls it. Files of variables (.env) and of secrets are not read.

        Raises:
            OSError, UnicodeDecodeError, tomllib.TOMLDecodeError: the TOML file cannot be read.
        """
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @model_validator(mode="after")
    def _check_metrics_address(self) -> Self:
        host, _ = split_address(self.metrics_address, "metrics_address")
        if not is_loopback(host) and not self.metrics_open:
            raise ValueError(
                f"metrics_address: expected a loopback host such as 127.0.0.1, got {host}: metrics "
                "are served without encryption. Scrape them through an agent on this machine, or "
                "set metrics_open = true in a private network"
            )
        self._check_triton()
        store = SQLITE if self.store is None else self.store.get_secret_value()
        if not store.startswith((SQLITE, *DATABASES)):
            raise ValueError(
                "store: expected sqlite:FOLDER or postgresql://USER@HOST/DATABASE, got another "
                "form; correct it"
            )
        if (self.workers or self.ray) and store.startswith(SQLITE):
            raise ValueError(
                "workers and ray need store = postgresql://USER@HOST/DATABASE, because only one "
                "process may write to a folder of galleries; leave both out, or set store"
            )
        if self.workers and self.ray:
            raise ValueError(
                "expected workers (processes of this machine) or ray (a cluster), got both; leave "
                "one out"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(
                "expected tls_cert and tls_key together, or neither; got one of them. Set the other"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_client_ca requests certificates of clients, which needs TLS: set tls_cert "
                "and tls_key as well"
            )
        missing = [
            name for name in ("tls_cert", "tls_key", "tokens_file") if getattr(self, name) is None
        ]
        for name in ("address", "console_address"):
            address = getattr(self, name)
            host, _ = split_address(address, name)
            if missing and not is_loopback(host):
                raise ValueError(
                    f"{name} {address} can be reached from other machines; that needs "
                    f"tls_cert, tls_key and tokens_file. Set the missing {', '.join(missing)}, or "
                    "listen on 127.0.0.1"
                )
        return self

    def _check_triton(self) -> None:
        address = self.triton or IN_PROCESS
        if address != IN_PROCESS:
            host, _ = split_address(address.removeprefix(TLS), "triton")
            if "://" in host:
                raise ValueError(
                    f"triton: expected HOST:PORT or {TLS}HOST:PORT, got {address!r}; correct it"
                )
        has_credentials = self.triton_ca is not None or self.triton_token_file is not None
        if has_credentials and not address.startswith(TLS):
            raise ValueError(
                f"triton_ca and triton_token_file need triton = {TLS}HOST:PORT: a token never "
                "travels unencrypted. Correct the setting triton, or leave both out"
            )


def load_settings(flags: dict[str, Any], file: Path | None) -> Settings:
    """Merge the sources of the settings: an option wins over a variable NOBACKFILL_*, a variable
    over the file, and the file over the default.

    Lists and tables in variables are JSON. Unknown variables are ignored. Tables of several sources
    are merged, key by key.

    Args:
        flags: options of the command line by the setting's name; None values are left out.
        file: the TOML file; None means none.

    Returns:
        The complete settings. Files and folders that they name are not opened yet.

    Raises:
        ConfigurationError: a value is not valid, values contradict each other, or a variable is no
            JSON; or the file is missing, cannot be read, is no TOML or has unknown keys. The error
            names every wrong key.
        OSError: this user may not search a folder above the file.
    """
    if file is not None and not file.is_file():
        raise ConfigurationError(
            f"--settings: expected a settings file (TOML) at {file}, found none; check its name"
        )

    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=file)

    options = {name: value for name, value in flags.items() if value is not None}
    try:
        return FromFile(**options)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()
        ]
        # Pydantic's words before the message of a validator of ours.
        message = "; ".join(lines).replace(": Value error, ", ": ")
        raise ConfigurationError(message) from error
    except SettingsError as error:
        # pydantic's sentence hides what is wrong with a variable that must be JSON.
        raise ConfigurationError(
            f"environment: {error}: {error.__cause__}; lists and tables are JSON, such as "
            """NOBACKFILL_ITEM_FOLDERS='["/photos"]'; correct the variable"""
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--settings: {file} is not TOML: {error}; correct the file"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"--settings: cannot read {file} ({error.strerror}); check its permissions"
        ) from error


def split_address(address: str, name: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 host is in brackets.

    The host is not looked up; it may be a name. The port is 0 to 65535. An IPv6 host without
    brackets is not refused; its last number is then the port.

    Args:
        address: the address.
        name: name of the setting, for the error.

    Returns:
        The host without brackets, and the port.

    Raises:
        ValueError: the address has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{name}: expected HOST:PORT, got {address!r}; correct it")
    return host.strip("[]"), int(port)
