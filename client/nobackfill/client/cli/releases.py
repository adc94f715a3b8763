"""The commands that follow releases, and those of the vault."""

from pathlib import Path
from typing import Annotated

import typer

from nobackfill.client.cli.options import Json
from nobackfill.client.output import Output, size
from nobackfill.errors import VerificationError, few

Backfill = Annotated[
    int,
    typer.Option(
        min=0,
        max=2**63 - 1,
        metavar="N",
        help="Embed the N least certain items anew, from their files or the vault.",
    ),
]


def sync(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would happen, bytes and seconds.")
    ] = False,
    backfill: Backfill = 0,
    keep_original: Annotated[
        bool | None,
        typer.Option(
            "--keep-original/--drop-original",
            help="From now on, keep vectors embedded from images for direct upgrades later.",
        ),
    ] = None,
    int8: Annotated[
        bool,
        typer.Option("--int8/--fp32", help="Quantised upgrades, where published, or exact ones."),
    ] = True,
    retry: Annotated[
        bool, typer.Option("--retry", help="Also follow releases that were held back here.")
    ] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Also a release that is not for this device yet.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", help="Another address of the same publication, from now on; as in init."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Follow the newest release: verify, download, upgrade every vector without its image, flip."""
    from nobackfill.client.device import Device
    from nobackfill.client.gallery_file import keep_reserve
    from nobackfill.client.sync import Wishes, sentence
    from nobackfill.client.sync import sync as follow

    output = Output(json)
    wishes = Wishes(dry_run, backfill, keep_original, int8, retry, source, now)
    with Device(context.obj) as device:
        report = follow(device, wishes, output)
    keep_reserve(context.obj)
    for note in report.notes:
        output.note(note)
    output.result(report.as_json(), sentence(report))


def report(
    context: typer.Context,
    to: Annotated[
        str | None,
        typer.Option(help="The gateway to send it to, grpc(s)://HOST:PORT; without: only show it."),
    ] = None,
    json: Json = False,
) -> None:
    """Tell a gateway how the last sync went: five numbers, no vector, no id. Never by itself."""
    from nobackfill.client.device import Device
    from nobackfill.client.sync import send_report as send

    with Device(context.obj) as device:
        found = send(device, to)
    sent = "not sent" if to is None else f"sent to {to}"
    told = ", ".join(f"{key} {value}" for key, value in found.items())
    Output(json).result({**found, "sent": to is not None}, f"{told}; {sent}")


def rollback(context: typer.Context, json: Json = False) -> None:
    """Return to the release before: kept until a sync a week later finds nothing newer, or gc."""
    from nobackfill.client.device import Device
    from nobackfill.client.sync import roll_back

    with Device(context.obj) as device:
        left, release = roll_back(device)
    Output(json).result(
        {"from_release": left, "release": release},
        f"release {release} answers again; sync does not follow {left} unless told to --retry",
    )


def push(
    context: typer.Context,
    recipient: Annotated[
        list[str] | None,
        typer.Option(
            help="A further public key (age1…) that can decrypt: a recovery key, made with "
            "`age-keygen -o recovery.txt` and kept elsewhere (repeatable, remembered)."
        ),
    ] = None,
    vault: Annotated[
        str | None,
        typer.Option(
            help="The vault's gateway, grpc(s)://HOST:PORT (remembered); else the gallery's source."
        ),
    ] = None,
    new_key: Annotated[
        bool,
        typer.Option(
            "--new-key",
            help="The key is lost for good: make a new one, and push again every image whose file "
            "is still there.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Encrypt images on this device and upload them to the vault, as ciphertext."""
    from nobackfill.client.device import Device
    from nobackfill.client.vault.transfer import push as upload

    output = Output(json)
    with Device(context.obj) as device:
        done = upload(device, recipient or [], vault, output, new_key=new_key)
        recoverable = bool(device.state("recipients"))
    if not recoverable:
        output.note(
            f"only the key in {context.obj}.identity opens these images: keep a copy of it, or "
            "push with --recipient age1… to name a recovery key"
        )
    for item in done.skipped:
        output.note(f"{item}: its file is gone or was changed since it was added; not pushed")
    if done.unreadable:
        output.note(
            f"{few(done.unreadable)}: only the lost key opens what the vault holds, and the file "
            "is gone; kept there, in case the key or a recovery key is found"
        )
    if done.lost:
        output.note(
            f"{few(done.lost)}: the vault has lost what was pushed, as by an older backup, and the "
            "file is gone here; restore the gateway's newest backup"
        )
    output.result(
        done.as_json(),
        f"{done.pushed} pushed ({size(done.bytes_sent)}), {done.held} held already, "
        f"{done.removed} removed, {len(done.skipped)} skipped",
    )


def pull(
    context: typer.Context,
    to: Annotated[Path, typer.Option(help="The folder to restore images into.")],
    items: Annotated[
        list[str] | None, typer.Argument(metavar="[IDS...]", help="Items; all if none.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option(help="An age identity file to use: the recovery key.")
    ] = None,
    unknown: Annotated[
        bool,
        typer.Option("--unknown", help="Also blobs that this gallery never pushed (lost device)."),
    ] = False,
    json: Json = False,
) -> None:
    """Restore images from the vault and compare them with what was added."""
    from nobackfill.client.device import Device
    from nobackfill.client.vault.transfer import pull as restore

    output = Output(json)
    with Device(context.obj) as device:
        done = restore(device, items or [], to, identity, unknown, output)
    for reason, names in done.reasons().items():
        output.note(f"{few(names)}: {reason}")
    output.result(
        done.as_json(),
        f"{len(done.restored)} restored, {done.held} there already, {len(done.failed)} failed",
    )
    if not (done.restored or done.held or done.failed or unknown):
        output.note("this gallery has pushed nothing; --unknown restores what another one did")
    if done.failed:
        raise typer.Exit(VerificationError.exit_code)
