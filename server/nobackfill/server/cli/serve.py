"""`gateway serve`."""

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.server.cli.app import Json, app, exit_codes, show

# For so long a thread keeps the interpreter while another wants it: one that receives a call has to
# ask for it four times, and beside an upgrade waited 5 ms each time.
_SWITCH_S = 0.0005

ModelRepo = Annotated[
    Path | None, typer.Option(help="publication folder", show_default="model_repo")
]
Workers = Annotated[
    int | None,
    typer.Option(help="processes that carry upgrades, beside a database", show_default="0"),
]
Ray = Annotated[
    str | None, typer.Option(help="a Ray cluster that carries upgrades: auto or HOST:PORT")
]
_Console = Annotated[bool | None, typer.Option("--console", help="show pages for operators")]
_Folders = Annotated[
    list[Path] | None,
    typer.Option("--item-folder", help="a folder that may hold sources of images; may be repeated"),
]
_Hosts = Annotated[
    list[str] | None,
    typer.Option("--item-host", help="a host that may hold sources of images; may be repeated"),
]


@app.command()
def serve(
    model_repo: ModelRepo = None,
    data: Annotated[
        Path | None, typer.Option(help="what the gateway keeps", show_default="gateway-data")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="sqlite:FOLDER or postgresql://USER@HOST/DATABASE",
            show_default="SQLite in --data",
        ),
    ] = None,
    workers: Workers = None,
    ray: Ray = None,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of gRPC", show_default="127.0.0.1:50051")
    ] = None,
    metrics_address: Annotated[
        str | None, typer.Option(help="HOST:PORT of /metrics", show_default="127.0.0.1:9464")
    ] = None,
    console: _Console = None,
    console_address: Annotated[
        str | None, typer.Option(help="HOST:PORT of these pages", show_default="127.0.0.1:9465")
    ] = None,
    triton: Annotated[
        str | None,
        typer.Option(
            help="(grpcs://)HOST:PORT of a tritonserver, or in-process",
            show_default="a tritonserver of its own where there is one, else in-process",
        ),
    ] = None,
    triton_venv: Annotated[
        Path | None,
        typer.Option(
            help="where nvidia-pytriton is",
            show_default=".venv-triton beside the environment of this command",
        ),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(help="the first root metadata to trust", show_default="that of --model-repo"),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="certificate chain (PEM)")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="private key of --tls-cert (PEM)")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="demand certificates of this authority from clients (PEM)")
    ] = None,
    tokens_file: Annotated[
        Path | None,
        typer.Option(
            help="who may call: lines NAME ROLE SHA256, then EXPIRES, rate=N, items=N if wanted"
        ),
    ] = None,
    item_folders: _Folders = None,
    item_hosts: _Hosts = None,
    settings: Annotated[Path | None, typer.Option(help="TOML file of settings")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="serve a folder that was moved, too")
    ] = False,
) -> None:
    """Serve searches of galleries until SIGTERM or SIGINT.

    Every setting is a variable NOBACKFILL_* or a key of --settings (docs/operations/settings.md).
    An option here goes before both.
    """
    flags = {name: value for name, value in locals().items() if name not in ("settings", "force")}
    with exit_codes():
        # Imported here: the operator's commands need neither numpy nor Triton's client.
        from nobackfill.server.process_limits import bound_arenas

        bound_arenas()
        sys.setswitchinterval(_SWITCH_S)
        from nobackfill.server.gateway import GatewayServer
        from nobackfill.server.grpc.logs import configure
        from nobackfill.server.settings import load_settings
        from nobackfill.server.storage import forget_move

        loaded = load_settings(flags, settings)
        if force:
            forget_move(loaded)
        configure()
        ended = _ended()
        gateway = GatewayServer(loaded)
        gateway.start()
        _keep_what_is_there()
        if gateway.console_address:
            # Not logged: it may hold a secret.
            print(f"console: {gateway.console_address}", flush=True)
        os.read(ended, 1)
        gateway.stop()


def _keep_what_is_there() -> None:
    """It stays. Every full collection would go through it, 60 ms in which no call has the
    interpreter, and a swap that upgrades makes enough objects for three."""
    gc.collect()
    gc.freeze()


def _ended() -> int:
    """A file to read from: a byte comes with SIGTERM or SIGINT.

    Python runs a handler once the main thread wakes. A signal that another thread meets, or that
    comes just before the main thread begins to wait, does not wake it: such a one was lost.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reads


# `gateway install-triton`.


@app.command()
def install_triton(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="a new folder",
            show_default=".venv-triton beside the environment of this command",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the virtual environment that holds Triton.

    Its packages come from pip's index.
    """
    with exit_codes():
        from nobackfill.server.triton.process import default_folder, install

        default = default_folder()
        target = default if folder is None else folder
        install(target)
        used = "gateway serve" + ("" if target == default else f" --triton-venv {target}")
        show(
            as_json,
            {"triton_venv": str(target), "used_by": used},
            [["Triton", "used by"], [str(target), used]],
        )
