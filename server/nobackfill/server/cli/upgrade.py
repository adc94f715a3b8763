"""`gateway upgrade`: an activation led from here, beside the gateways that serve the database."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, cast

import typer

from nobackfill.server.cli.app import Json, Number, Rollout, app, exit_codes, show
from nobackfill.server.cli.serve import ModelRepo, Ray, Workers
from nobackfill.terminal import visible

if TYPE_CHECKING:
    from nobackfill.server.gateway import GatewayServer
    from nobackfill.server.state import RolloutName

# While another leads.
_LOOK_S = 0.5
_ROLLOUTS = ("direct", "dual", "cutover")


@app.command()
def upgrade(
    number: Number,
    store: Annotated[
        str | None,
        typer.Option(
            help="postgresql://USER@HOST/DATABASE", show_default="the variable NOBACKFILL_STORE"
        ),
    ] = None,
    model_repo: ModelRepo = None,
    workers: Workers = None,
    ray: Ray = None,
    rollout: Rollout = None,
    as_json: Json = False,
) -> None:
    """Activate a release from a job of its own.

    The job leads, and the gateways that serve from the database follow. If it is killed, one of
    them goes on with it. Settings are those of `gateway serve`.
    """
    if rollout is not None and rollout not in _ROLLOUTS:
        raise typer.BadParameter(f"expected one of {', '.join(_ROLLOUTS)}, got {rollout!r}")
    flags = {"store": store, "model_repo": model_repo, "workers": workers, "ray": ray}
    with exit_codes(), TemporaryDirectory(prefix="nobackfill-") as scratch:
        from nobackfill.errors import ConfigurationError
        from nobackfill.server.gateway import GatewayServer
        from nobackfill.server.grpc.logs import configure
        from nobackfill.server.settings import SQLITE, load_settings

        given = load_settings(flags, None)
        if given.store is None or given.store.get_secret_value().startswith(SQLITE):
            raise ConfigurationError(
                "expected --store postgresql://…: a folder belongs to the gateway that serves it, "
                "ask that one with `gateway activate`"
            )
        # It answers nobody, and keeps nothing that is not in the database.
        alone = {
            "address": "127.0.0.1:0", "metrics_address": "127.0.0.1:0", "data": Path(scratch),
            "console": False, "tokens_file": None, "tls_cert": None, "tls_key": None,
            "tls_client_ca": None,
        }  # fmt: skip
        configure()
        gateway = GatewayServer(given.model_copy(update=alone))
        gateway.start()
        try:
            left = _lead(gateway, number, cast("RolloutName | None", rollout))
        finally:
            gateway.stop()
        result = {"release": number, "left_behind": left}
        show(as_json, result, [["release", "left behind"], [str(number), left]])


def _lead(gateway: "GatewayServer", number: int, rollout: "RolloutName | None") -> str:
    """Activate, go on with what another began and ended half-way, or wait for one that has taken
    the lead; what was left behind. Raises NobackfillError where the release fails."""
    from nobackfill.errors import NobackfillError
    from nobackfill.server.rollout.rollout import Phase

    activations, waited = gateway.activations, False
    while (run := activations.running()) is None or run.record.release != number:
        if run is None and activations.under_way() == number:
            if not waited:
                typer.echo("waiting: a gateway that serves leads it", err=True)
            waited = True
            time.sleep(_LOOK_S)
        elif waited and gateway.state.now.active == number:
            return ""
        else:
            run = activations.start(number, rollout)
            gateway.state.audit("local", "activate", f"release {number}")
            break
    for event in run.events():
        told = f" {event.done}/{event.total}" if event.total else ""
        typer.echo(visible(f"{event.phase}{told} {event.message}".rstrip()), err=True)
    if event.phase is Phase.FAILED:
        raise NobackfillError(f"release {number} was not activated: {event.message}")
    return event.message
