"""The commands that follow releases, and those of the vault."""

from argparse import Namespace

from nobackfill.client.cli.options import Command, Commands, Switch, named_path, no_options, whole
from nobackfill.client.output import Output, size
from nobackfill.errors import VerificationError, few


def sync(arguments: Namespace) -> None:
    """Follow the newest release: upgrade every vector without its image.

    What is downloaded is verified first. Searches answer by the old release until all is done.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.gallery_file import keep_reserve
    from nobackfill.client.sync import Wishes, sentence
    from nobackfill.client.sync import sync as follow

    output = Output(arguments.json)
    wishes = Wishes(
        dry_run=arguments.dry_run,
        backfill=arguments.backfill,
        keep_original=arguments.keep_original,
        int8=arguments.int8,
        retry=arguments.retry,
        source=arguments.source,
        now=arguments.now,
    )
    with Device(arguments.gallery) as device:
        report = follow(device, wishes, output)
    keep_reserve(arguments.gallery)
    for note in report.notes:
        output.note(note)
    output.result(report.as_json(), sentence(report))


def report(arguments: Namespace) -> None:
    """Send a gateway a summary of the last sync: five numbers, no vector, no id.

    It is sent only when you run this command.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.sync import send_report as send

    with Device(arguments.gallery) as device:
        found = send(device, arguments.to)
    sent = "not sent" if arguments.to is None else f"sent to {arguments.to}"
    told = ", ".join(f"{key} {value}" for key, value in found.items())
    Output(arguments.json).result({**found, "sent": arguments.to is not None}, f"{told}; {sent}")


def rollback(arguments: Namespace) -> None:
    """Return to the release before.

    It is kept until `gc`, or until a sync a week later finds nothing newer.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.sync import roll_back

    with Device(arguments.gallery) as device:
        left, release = roll_back(device)
    Output(arguments.json).result(
        {"from_release": left, "release": release},
        f"release {release} answers again; sync does not follow {left} unless told to --retry",
    )


def push(arguments: Namespace) -> None:
    """Back up images to the vault, encrypted on this device."""
    from nobackfill.client.device import Device
    from nobackfill.client.vault.transfer import push as upload

    output = Output(arguments.json)
    with Device(arguments.gallery) as device:
        done = upload(
            device, arguments.recipient or [], arguments.vault, output, new_key=arguments.new_key
        )
        recoverable = bool(device.state("recipients"))
    if not recoverable:
        output.note(
            f"only the key in {arguments.gallery}.identity opens these images: keep a copy of it, "
            "or push with --recipient age1… to name a recovery key"
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


def pull(arguments: Namespace) -> None:
    """Restore images from the vault, and check that they are what was added."""
    from nobackfill.client.device import Device
    from nobackfill.client.vault.transfer import pull as restore

    output = Output(arguments.json)
    with Device(arguments.gallery) as device:
        done = restore(
            device, arguments.items, arguments.to, arguments.identity, arguments.unknown, output
        )
    for reason, names in done.reasons().items():
        output.note(f"{few(names)}: {reason}")
    output.result(
        done.as_json(),
        f"{len(done.restored)} restored, {done.held} there already, {len(done.failed)} failed",
    )
    if not (done.restored or done.held or done.failed or arguments.unknown):
        output.note("this gallery has pushed nothing; --unknown restores what another one did")
    if done.failed:
        raise SystemExit(VerificationError.exit_code)


def _sync_options(command: Command) -> None:
    command.add_argument(
        "--dry-run", action="store_true", help="Tell what would happen, bytes and seconds."
    )
    command.add_argument(
        "--backfill",
        type=whole(0, 2**63 - 1),
        default=0,
        metavar="N",
        help="Embed the N least certain items anew, from their files or the vault.",
    )
    command.add_argument(
        "--keep-original",
        "--drop-original",
        action=Switch,
        help="Keep vectors embedded from images for direct upgrades later, or drop them, from now "
        "on. Without it, as the gallery did before.",
    )
    command.add_argument(
        "--int8",
        "--fp32",
        action=Switch,
        default=True,
        help="Quantised upgrades, where published, or exact ones.",
    )
    command.add_argument(
        "--retry", action="store_true", help="Also follow releases that were held back here."
    )
    command.add_argument(
        "--now", action="store_true", help="Also a release that is not for this device yet."
    )
    command.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="Another address of the same publication, from now on; as in init.",
    )


def _report_options(command: Command) -> None:
    command.add_argument(
        "--to",
        metavar="ADDRESS",
        help="The gateway to send it to, grpc(s)://HOST:PORT. [default: none, only show it]",
    )


def _push_options(command: Command) -> None:
    command.add_argument(
        "--recipient",
        action="append",
        metavar="KEY",
        help="A further public key (age1…) that can decrypt: a recovery key, made with "
        "`age-keygen -o recovery.txt` and kept elsewhere (repeatable, remembered).",
    )
    command.add_argument(
        "--vault",
        metavar="ADDRESS",
        help="The vault's gateway, grpc(s)://HOST:PORT. [default: the one of the push before, else "
        "the gallery's source]",
    )
    command.add_argument(
        "--new-key",
        action="store_true",
        help="The key is lost for good: make a new one, and push again every image whose file is "
        "still there.",
    )


def _pull_options(command: Command) -> None:
    command.add_argument("items", nargs="*", metavar="[IDS...]", help="Items; all if none.")
    command.add_argument(
        "--to",
        type=named_path,
        required=True,
        metavar="FOLDER",
        help="The folder to restore images into.",
    )
    command.add_argument(
        "--identity",
        type=named_path,
        metavar="FILE",
        help="An age identity file to use: the recovery key. [default: the gallery's own key]",
    )
    command.add_argument(
        "--unknown",
        action="store_true",
        help="Also blobs that this gallery never pushed (lost device).",
    )


# Function and options of each command, by its name.
COMMANDS: Commands = {
    "sync": (sync, _sync_options),
    "report": (report, _report_options),
    "rollback": (rollback, no_options),
    "push": (push, _push_options),
    "pull": (pull, _pull_options),
}
