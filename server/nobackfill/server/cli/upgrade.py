"""Define `gateway upgrade`: a job that activates a release for gateways that share a database."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, cast

import typer

from nobackfill.server.cli.app import (
    Json,
    Number,
    Rollout,
    app,
    exit_on_error,
    format_examples,
    print_result,
)
from nobackfill.server.cli.serve import ModelRepo, Ray, Workers
from nobackfill.terminal import escape_control

if TYPE_CHECKING:
    from nobackfill.server.gateway import GatewayServer
    from nobackfill.server.state import RolloutName

# Pause between two checks (seconds) while another process leads the activation.
_POLL_SECONDS = 0.5
_ROLLOUTS = ("direct", "dual", "cutover")


@app.command(
    epilog=format_examples("gateway upgrade 2 --store postgresql://gateway@db/vectors --workers 8")
)
def upgrade(
    number: Number,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="STORE",
            help="Upgrade the galleries of this database: postgresql://USER@HOST/DATABASE.",
            show_default="the variable NOBACKFILL_STORE",
        ),
    ] = None,
    model_repo: ModelRepo = None,
    workers: Workers = None,
    ray: Ray = None,
    rollout: Rollout = None,
    as_json: Json = False,
) -> None:
    """Activate a release from a job outside the gateways.

    The job does the work, and the gateways that share the database follow it. If the job is killed,
    one of these gateways continues. If another process activates this release, the job waits for
    it. A release that is active already is activated again, for galleries that stayed behind.
    Settings are those of `gateway serve`.

    Progress goes to stderr. It exits with 1 if the activation fails, with 78 without a PostgreSQL
    database, and with 75 while another release is activated.
    """
    if rollout is not None and rollout not in _ROLLOUTS:
        raise typer.BadParameter(
            f"--rollout: expected one of {', '.join(_ROLLOUTS)}, got {rollout!r}"
        )
    flags = {"store": store, "model_repo": model_repo, "workers": workers, "ray": ray}
    with exit_on_error(), TemporaryDirectory(prefix="nobackfill-") as scratch:
        from nobackfill.errors import ConfigurationError
        from nobackfill.server.gateway import GatewayServer
        from nobackfill.server.grpc.logs import configure_logging
        from nobackfill.server.settings import SQLITE, load_settings

        settings = load_settings(flags, None)
        if settings.store is None or settings.store.get_secret_value().startswith(SQLITE):
            raise ConfigurationError(
                "--store: expected postgresql://USER@HOST/DATABASE, got none or a folder. Only the "
                "gateway that serves a folder may change it: run `gateway activate "
                f"{number} --server HOST:PORT`"
            )
        # No client calls this process, and its files are temporary: all that must last is in the
        # database.
        private = {
            "address": "127.0.0.1:0", "metrics_address": "127.0.0.1:0", "data": Path(scratch),
            "console": False, "tokens_file": None, "tls_cert": None, "tls_key": None,
            "tls_client_ca": None,
        }  # fmt: skip
        configure_logging()
        gateway = GatewayServer(settings.model_copy(update=private))
        gateway.start()
        try:
            outcome = _lead(gateway, number, cast("RolloutName | None", rollout))
        finally:
            gateway.stop()
        result = {"release": number, "left_behind": outcome}
        print_result(as_json, result, [["release", "left behind"], [str(number), outcome]])


def _lead(gateway: "GatewayServer", number: int, rollout: "RolloutName | None") -> str:
    """Activate a release, resume an activation that another process left unfinished, or wait for
    its leader.

    Args:
        gateway: a started gateway of this process.
        number: the release to activate.
        rollout: how queries are answered meanwhile; None means the release's own default.

    Returns:
        The galleries that stay with the old release, as one sentence; empty if there are none or
        another process has finished the activation.

    Raises:
        NobackfillError: the release failed.
    """
    from nobackfill.errors import NobackfillError
    from nobackfill.server.rollout.rollout import Phase

    activations, is_waiting = gateway.activations, False
    while (run := activations.current_run()) is None or run.activation.release != number:
        if run is None and activations.activating_release() == number:
            if not is_waiting:
                typer.echo("waiting: another process leads this activation", err=True)
            is_waiting = True
            time.sleep(_POLL_SECONDS)
        elif is_waiting and gateway.state.current.active == number:
            return ""
        else:
            run = activations.start(number, rollout)
            gateway.state.record_audit("local", "activate", f"release {number}")
            break
    for event in run.events():
        progress = f" {event.upgraded_item_count}/{event.item_count}" if event.item_count else ""
        typer.echo(escape_control(f"{event.phase}{progress} {event.message}".rstrip()), err=True)
    if event.phase is Phase.FAILED:
        raise NobackfillError(
            f"release {number} failed to activate: {event.message}. Remove the cause, then run the "
            "command again"
        )
    return event.message
