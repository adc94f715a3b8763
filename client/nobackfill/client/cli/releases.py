"""The commands that follow releases and that use the vault."""

from argparse import Namespace

from nobackfill.client.cli.options import Command, Commands, Switch, integer, named_path, no_options
from nobackfill.client.output import Output, format_bytes
from nobackfill.errors import VerificationError, join_few


def sync(arguments: Namespace) -> None:
    """Upgrade every vector to the newest release, without the images.

    Downloads are verified first. Searches use the old release until the upgrade is complete. After
    an interruption, run it again to continue.

    Args:
        arguments: the parsed words: gallery, source and json, and the options of
            nobackfill.client.sync.SyncOptions; `now` is its join_early. Notes go to stderr. The
            reserve file is made again at the end.

    Raises:
        NotFoundError: there is no gallery, or the source lacks a release that the gallery uses.
        ConfigurationError: the source has an unknown form or is missing, or the token or
            certificate of the gateway cannot be read. Or the extra `text` is needed and missing.
        VerificationError: the publication fails verification, or a file of the gallery is damaged.
        NoEncoderError: a backfill was requested, and the release embeds no images.
        NotPermittedError, UnavailableError: the source refuses the token, or does not answer.
        BusyError: another sync runs, or other commands keep changing the gallery.
        CannotWriteError: the disk is full or read-only.
        OSError: a file of the models folder cannot be read.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.gallery_file import create_reserve
    from nobackfill.client.sync import SyncOptions, describe_report
    from nobackfill.client.sync import sync as follow

    output = Output(arguments.json)
    choices = SyncOptions(
        dry_run=arguments.dry_run,
        backfill=arguments.backfill,
        keep_original=arguments.keep_original,
        int8=arguments.int8,
        retry=arguments.retry,
        source=arguments.source,
        join_early=arguments.now,
    )
    with Device(arguments.gallery) as device:
        report = follow(device, choices, output)
    create_reserve(arguments.gallery)
    for note in report.notes:
        output.print_note(note)
    output.print_result(report.as_json(), describe_report(report))


def send_sync_report(arguments: Namespace) -> None:
    """Send a summary of the last sync to a gateway: five numbers, no vector, no id.

    Nothing is sent unless you run this command.

    Args:
        arguments: the parsed words: gallery, to (None: nothing is sent, only printed) and json.

    Raises:
        NotFoundError: there is no gallery, or no sync has tried another release.
        ConfigurationError: `to` is no gateway's address, or the token or certificate cannot be
            read.
        NotPermittedError, UnavailableError: the gateway refuses the call, or does not answer.
        VerificationError: the gallery file is damaged.
        BusyError: another process holds the gallery file, or the gateway has too much work.
        InvalidInputError: the gateway refuses the summary, such as one of a release that is not
            published there.
        CannotWriteError: the gallery file cannot be opened, or the disk fails.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.sync import send_report as send

    with Device(arguments.gallery) as device:
        summary = send(device, arguments.to)
    kept = summary["neighbours_kept"]
    share = "not measured" if kept is None else f"{kept:.1%}"
    values = (
        f"release {summary['release']}: probes {'' if summary['probes_passed'] else 'not '}passed, "
        f"{summary['seconds']:.1f} s, neighbours kept: {share}, failure: {summary['failure']}"
    )
    outcome = "not sent" if arguments.to is None else f"sent to {arguments.to}"
    Output(arguments.json).print_result(
        {**summary, "sent": arguments.to is not None}, f"{values}; {outcome}"
    )


def rollback(arguments: Namespace) -> None:
    """Return to the previous release, whose vectors are still stored; nothing is computed.

    It stays available until `gc`, or until a sync a week later finds nothing newer. Later syncs
    skip the release that was left, unless you pass --retry.

    Args:
        arguments: the parsed words: gallery and json.

    Raises:
        NotFoundError: there is no gallery, or no previous release.
        PreconditionError: some items have no vector in the previous space.
        VerificationError: the gallery file is damaged.
        BusyError: a sync is writing vectors, or another process holds the gallery file.
        CannotWriteError: the disk is full or read-only.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.sync import roll_back

    with Device(arguments.gallery) as device:
        old_release, release = roll_back(device)
    Output(arguments.json).print_result(
        {"from_release": old_release, "release": release},
        f"release {release} is active again; sync skips release {old_release} unless you pass "
        "--retry",
    )


def push(arguments: Namespace) -> None:
    """Encrypt images on this device, and back them up to the vault of a gateway.

    The vault sees ciphertext alone. Images that it holds already are not sent again.

    Args:
        arguments: the parsed words: gallery, recipient (None: none), vault (None: the stored one),
            new_key and json. Notes on items that were not pushed go to stderr.

    Raises:
        NotFoundError: there is no gallery.
        ConfigurationError: a key is missing or malformed, the address is no gateway, or a new vault
            lacks pushed images. Or the token or certificate cannot be read.
        QuotaExceededError: the vault holds as many bytes as it may.
        NotPermittedError, UnavailableError: the gateway refuses the token, or does not answer.
        VerificationError: the vault lists malformed blobs, or the gallery file is damaged.
        BusyError: another push or pull runs, another process holds the gallery file, or the
            gateway has too much work.
        CannotWriteError: the disk is full or read-only.
        InvalidInputError: the vault refuses a ciphertext, also as too large (TooLargeError).
        AlreadyExistsError: the vault holds another blob under the random id.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.vault.transfer import push as upload

    output = Output(arguments.json)
    with Device(arguments.gallery) as device:
        report = upload(
            device, arguments.recipient or [], arguments.vault, output, new_key=arguments.new_key
        )
        recoverable = bool(device.state("recipients"))
    if not recoverable:
        output.print_note(
            f"only the key in {arguments.gallery}.identity opens these images: keep a copy of it, "
            "or add a recovery key with --recipient age1…"
        )
    for item in report.missing_files:
        output.print_note(
            f"{item}: not pushed, because its file is gone or was changed after it was added; add "
            "the file again with `edge-client add`"
        )
    if report.unreadable:
        output.print_note(
            f"{join_few(report.unreadable)}: only the lost key opens the copies in the vault, and "
            "the files are gone; the copies stay there, in case the key is found"
        )
    if report.lost_copies:
        output.print_note(
            f"{join_few(report.lost_copies)}: the vault has lost the pushed copies, and the files "
            "are gone here; the gateway may run on an older backup: restore its newest one"
        )
    output.print_result(
        report.as_json(),
        f"{report.pushed_count} images pushed ({format_bytes(report.bytes_sent)}), "
        f"{report.duplicate_count} already in the vault, {report.removed_count} removed there, "
        f"{len(report.missing_files)} skipped",
    )


def pull(arguments: Namespace) -> None:
    """Restore images from the vault, and compare each with the image that was added.

    The exit code is 65 if an image could not be restored.

    Args:
        arguments: the parsed words: gallery, items (empty: all), to, identity, unknown and json.

    Raises:
        SystemExit: an image could not be restored; the code is 65.
        NotFoundError: there is no gallery, or it has pushed no image of one of the items.
        ConfigurationError: the key or the vault's address is missing or malformed, or the token or
            certificate cannot be read.
        NotPermittedError, UnavailableError: the gateway refuses the token, or does not answer.
        VerificationError: the vault lists malformed blobs, or the gallery file is damaged.
        BusyError: another push or pull runs, another process holds the gallery file, or the
            gateway has too much work.
        CannotWriteError: the disk is full or read-only.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.vault.transfer import pull as restore

    output = Output(arguments.json)
    with Device(arguments.gallery) as device:
        report = restore(
            device, arguments.items, arguments.to, arguments.identity, arguments.unknown, output
        )
    output.print_reasons(report.failed)
    output.print_result(
        report.as_json(),
        f"{len(report.restored)} images restored, {report.duplicate_count} already in "
        f"{arguments.to}, {len(report.failed)} failed",
    )
    if not (report.restored or report.duplicate_count or report.failed or arguments.unknown):
        output.print_note(
            "this gallery has pushed no image; --unknown restores images of other galleries"
        )
    if report.failed:
        raise SystemExit(VerificationError.exit_code)


def _sync_options(command: Command) -> None:
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="Only print the release, the bytes and the seconds of a sync. Without this, the "
        "gallery is upgraded.",
    )
    command.add_argument(
        "--backfill",
        type=integer(0, 2**63 - 1),
        default=0,
        metavar="N",
        help="Number of items to embed again by the new release's model, from their files or the "
        "vault; those with the least certain vectors come first.",
    )
    command.add_argument(
        "--keep-original",
        "--drop-original",
        action=Switch,
        help="Keep the vectors that a model computed from the images when a newer release replaces "
        "it, so that later upgrades can start from them; --drop-original deletes them. The gallery "
        "stores the choice. [default: the stored choice, else --drop-original]",
    )
    command.add_argument(
        "--int8",
        "--fp32",
        action=Switch,
        default=True,
        help="Upgrade with quantised (int8) models where they are published, which is faster; with "
        "--fp32, with the exact ones.",
    )
    command.add_argument(
        "--retry",
        action="store_true",
        help="Also try releases that failed or were rolled back on this device. Without this, they "
        "are skipped.",
    )
    command.add_argument(
        "--now",
        action="store_true",
        help="Also take a release whose rollout does not include this device yet. Without this, "
        "it is skipped.",
    )
    command.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="Another address of the same publication, written as for `init --from`, which later "
        "syncs use too. [default: the address that the gallery stores]",
    )


def _report_options(command: Command) -> None:
    command.add_argument(
        "--to",
        metavar="ADDRESS",
        help="Address of the gateway to send the summary to, grpc(s)://HOST:PORT. [default: none, "
        "only print it]",
    )


def _push_options(command: Command) -> None:
    command.add_argument(
        "--recipient",
        action="append",
        metavar="KEY",
        help="A further public key (age1…) that can decrypt the pushed images, such as a recovery "
        "key made with `age-keygen -o recovery.txt` (repeatable; the gallery stores it). Without "
        "this, only the gallery's own and stored keys can.",
    )
    command.add_argument(
        "--vault",
        metavar="ADDRESS",
        help="Address of the gateway whose vault gets the encrypted images, grpc(s)://HOST:PORT. "
        "[default: the one of the last push, else the gallery's source]",
    )
    command.add_argument(
        "--new-key",
        action="store_true",
        help="Replace a lost secret key by a new one, and push again every image whose file still "
        "exists. Without this, a push with a lost key is refused.",
    )


def _pull_options(command: Command) -> None:
    command.add_argument(
        "items",
        nargs="*",
        metavar="[IDS...]",
        help="Ids of the items to restore, as `list` prints them. Without ids, all pushed images "
        "are restored.",
    )
    command.add_argument(
        "--to",
        type=named_path,
        required=True,
        metavar="FOLDER",
        help="Folder to write the images into, which is created if missing; existing files are not "
        "replaced.",
    )
    command.add_argument(
        "--identity",
        type=named_path,
        metavar="FILE",
        help="File with the secret key to decrypt by, which is only read: an age identity, such as "
        "recovery.txt. [default: the gallery's own key]",
    )
    command.add_argument(
        "--unknown",
        action="store_true",
        help="Also restore images that this gallery never pushed, for example those of a lost "
        "device. Without this, only its own are restored.",
    )


# By a command's name: the function that runs it, and the function that adds its options.
COMMANDS: Commands = {
    "sync": (sync, _sync_options),
    "report": (send_sync_report, _report_options),
    "rollback": (rollback, no_options),
    "push": (push, _push_options),
    "pull": (pull, _pull_options),
}
