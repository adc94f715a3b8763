"""Define `gateway sample`, `gateway serve` and `gateway install-triton`."""

import gc
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.server.cli.app import Json, app, exit_on_error, format_examples, print_result
from nobackfill.terminal import escape_control

# Longest time (seconds) that a thread keeps the interpreter while another waits for it. A call
# needs the interpreter four times; Python's default of 5 ms delayed each of them during an upgrade.
_SWITCH_S = 0.0005

ModelRepo = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Read releases from this publication folder; nothing is written there.",
        show_default="model_repo",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Compute the vectors of upgrades in this number of processes of this machine, at most "
        "256. Needs a --store in PostgreSQL. With none, a thread of the gateway computes them.",
        show_default="0",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="CLUSTER",
        help="Compute the vectors of upgrades on this Ray cluster: HOST:PORT, or auto for the one "
        "on this machine. Needs a --store in PostgreSQL. Without it, this machine computes them.",
    ),
]
_Console = Annotated[
    bool | None,
    typer.Option(
        "--console",
        help="Serve pages for operators in a browser, and print their address. Without it, no "
        "pages are served.",
    ),
]
_Folders = Annotated[
    list[Path] | None,
    typer.Option(
        "--item-folder",
        metavar="FOLDER",
        help="Permit galleries to re-embed items from files below this folder, which are only "
        "read. Repeat the option for more. Without it, no folder is permitted.",
    ),
]
_Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--item-host",
        metavar="HOST",
        help="Permit galleries to re-embed items from https addresses of this host. Repeat the "
        "option for more. Without it, no host is permitted.",
    ),
]


@app.command(epilog=format_examples("gateway sample", "gateway sample --release 2"))
def sample(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder to write to: the publication to model_repo, its signing keys to "
            "model_repo.keys, and the pictures to photos."
        ),
    ] = Path(),
    release: Annotated[
        int,
        typer.Option(
            min=1,
            max=2,
            metavar="1|2",
            help="Publish this release. 1 starts the publication and writes the pictures; 2 adds a "
            "better model to it.",
        ),
    ] = 1,
    as_json: Json = False,
) -> None:
    """Make a small publication and pictures to try everything out.

    It takes seconds, trains nothing and needs no network. The models are linear and know 24 kinds
    of drawn pictures; do not use them for others.

    It fails if the release is there already. Release 1 also fails if model_repo or photos exists,
    and release 2 if release 1 is missing.
    """
    with exit_on_error():
        from nobackfill.server.sample import write_sample

        made = write_sample(folder, release)
    repo, photos = shlex.quote(str(made.model_repo)), shlex.quote(str(made.photos_folder))
    picture = shlex.quote(str(made.photos_folder / "red-circle-0.png"))
    where = "" if folder == Path() else f" {shlex.quote(str(folder))}"
    if made.migrated_and_native_map is None:
        lines = [
            f"{repo}: release 1 is published; {photos}: {made.picture_count} pictures", "next:",
            f"  gateway serve --model-repo {repo} 2> gateway.log &",
            "  until gateway status; do sleep 1; done", "  gateway gallery create photos",
            f"  gateway put photos {photos}", f"  gateway search photos {picture}",
            f"  gateway sample{where} --release 2",
        ]  # fmt: skip
    else:
        migrated, native = made.migrated_and_native_map
        lines = [
            f"{repo}: release 2 is published; on migrated vectors it has mAP {migrated:.2f}, "
            f"where release 1 has {native:.2f}", "next:",
            "  gateway estimate photos 2", "  gateway activate 2",
            f"  gateway search photos {picture}", "  gateway rollback",
        ]  # fmt: skip
    result = {
        "model_repo": str(made.model_repo), "photos": str(made.photos_folder),
        "release": made.release, "pictures": made.picture_count,
    }  # fmt: skip
    typer.echo(json.dumps(result) if as_json else "\n".join(map(escape_control, lines)))


@app.command(
    epilog=format_examples(
        "gateway serve --model-repo model_repo --data gateway-data",
        "gateway serve --store postgresql://gateway@db/vectors --workers 4",
        "gateway serve --triton in-process --console",
    )
)
def serve(
    model_repo: ModelRepo = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write data of this gateway to this folder, which is created if it is missing. "
            "One gateway at a time may use it.",
            show_default="gateway-data",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="STORE",
            help="Store galleries in SQLite files of a folder (sqlite:FOLDER), or in a database "
            "that several gateways share (postgresql://USER@HOST/DATABASE).",
            show_default="SQLite in --data",
        ),
    ] = None,
    workers: Workers = None,
    ray: Ray = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Listen for gRPC calls at this address. A host that other machines reach needs "
            "--tls-cert, --tls-key and --tokens-file.",
            show_default="127.0.0.1:50051",
        ),
    ] = None,
    metrics_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve metrics for Prometheus and health pages at this address, without "
            "encryption.",
            show_default="127.0.0.1:9464",
        ),
    ] = None,
    console: _Console = None,
    console_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve the pages of --console at this address. Without --console, it is unused.",
            show_default="127.0.0.1:9465",
        ),
    ] = None,
    triton: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|in-process",
            help="Run the models in the tritonserver at this address (grpcs://HOST:PORT for TLS), "
            "or in the gateway's own process (in-process).",
            show_default="a tritonserver of its own if one is installed, else in-process",
        ),
    ] = None,
    triton_venv: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Start tritonserver from this virtual environment, which `gateway install-triton` "
            "creates.",
            show_default=".venv-triton next to this command's environment",
        ),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the publisher's root metadata, 1.root.json: only releases are trusted "
            "whose signatures lead back to it. A data folder that began with other root metadata "
            "is refused.",
            show_default="1.root.json of --model-repo, read at the first start",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Encrypt calls with the certificate chain of this PEM file; needs --tls-key. "
            "Without it, the gateway listens on loopback only, unencrypted.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read the private key of --tls-cert from this PEM file. Required with --tls-cert.",
        ),
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Accept only clients with a certificate of an authority in this PEM file. Needs "
            "--tls-cert. Without it, clients need no certificate.",
        ),
    ] = None,
    tokens_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Accept only callers with a token of this file. Each line is NAME ROLE SHA256, "
            "with the role reader, writer, device or admin and the digest of the token; EXPIRES, "
            "rate=N (calls a second) and items=N may follow. Without it, every caller may do "
            "everything.",
        ),
    ] = None,
    item_folders: _Folders = None,
    item_hosts: _Hosts = None,
    settings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read settings from this TOML file; an option or an environment variable wins "
            "over it. Without it, no file is read.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Serve the data folder again although `gateway data move` moved it to another "
            "store. Without it, the gateway refuses to start there.",
        ),
    ] = False,
) -> None:
    """Serve searches of galleries until SIGTERM or SIGINT.

    Every setting is also an environment variable NOBACKFILL_* and a key of the file --settings;
    docs/operations/settings.md lists them. An option wins over both.
    """
    flags = {name: value for name, value in locals().items() if name not in ("settings", "force")}
    with exit_on_error():
        # These imports load numpy and Triton's client, which no other command needs.
        from nobackfill.server.process_limits import limit_malloc_arenas

        limit_malloc_arenas()
        sys.setswitchinterval(_SWITCH_S)
        from nobackfill.server.gateway import GatewayServer
        from nobackfill.server.grpc.logs import configure_logging
        from nobackfill.server.settings import load_settings
        from nobackfill.server.storage import clear_moved_mark

        loaded = load_settings(flags, settings)
        if force:
            clear_moved_mark(loaded)
        configure_logging()
        stop_signal = _stop_pipe()
        gateway = GatewayServer(loaded)
        gateway.start()
        _freeze_objects()
        if gateway.console_address:
            # Printed and not logged, because the address may contain a secret.
            print(f"console: {gateway.console_address}", flush=True)
        os.read(stop_signal, 1)
        gateway.stop()


def _freeze_objects() -> None:
    """Exempt all objects that exist now from garbage collection.

    They live as long as the process. A full collection would visit them all and keep the
    interpreter from every call for 60 ms; a swap with upgrades causes three of them.
    """
    gc.collect()
    gc.freeze()


def _stop_pipe() -> int:
    """Open a pipe that gets one byte when SIGTERM or SIGINT arrives.

    Python runs a signal handler only when the main thread wakes. A signal delivered to another
    thread, or just before the main thread waits, would be lost; the byte in the pipe wakes it.

    Returns:
        The file descriptor to read from.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reader


@app.command(
    epilog=format_examples("gateway install-triton", "gateway install-triton /opt/triton-venv")
)
def install_triton(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="Folder in which the virtual environment is created, or completed.",
            show_default=".venv-triton next to this command's environment",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a virtual environment with Triton for `gateway serve`.

    pip downloads the packages from its configured index (several GB).

    A folder that exists is completed. It fails without a package index or for Python 3.13 and
    newer.
    """
    with exit_on_error():
        from nobackfill.server.triton.process import default_folder, install

        default = default_folder()
        target = default if folder is None else folder
        install(target)
        command = "gateway serve" + ("" if target == default else f" --triton-venv {target}")
        rows = [["Triton", "used by"], [str(target), command]]
        print_result(as_json, {"triton_venv": str(target), "used_by": command}, rows)
