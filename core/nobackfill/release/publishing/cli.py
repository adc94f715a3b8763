"""The command `publication`: keys, renewal, withdrawal and checks of a publication folder."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, cast

import typer

from nobackfill.digests import parse_percent
from nobackfill.errors import ConfigurationError, NobackfillError
from nobackfill.release.publishing import publish, renew
from nobackfill.release.publishing.inspection import list_releases
from nobackfill.release.publishing.inspection import verify_publication as verify_publication
from nobackfill.release.publishing.metadata import ROLES, Role, SigningKeys
from nobackfill.release.trust.trust import format_root_fingerprint
from nobackfill.terminal import escape_control
from nobackfill.version_option import Version

_EPILOG = """
Make keys that stay offline before the first release, and name them when you publish:

\b
publication keys --root-key usb/root.pem --targets-key usb/targets.pem
python training/export.py ... --targets-key usb/targets.pem
publication resign                     (monthly; without offline keys)
publication withdraw 2 --reason "confuses cats" --targets-key usb/targets.pem

Without offline keys, the first export makes all four keys in MODEL_REPO.keys. Devices need
1.root.json of the publication folder. They read the folder from a gateway or any static HTTP host.

Exit codes: 0 success or nothing to do, 2 wrong usage, 65 invalid data or failed verification,
66 nothing is published there, 73 cannot write or exists already, 75 another publisher is running,
78 a key is missing or the configuration is wrong.
"""

app = typer.Typer(
    help="Manage a publication folder: its signing keys and signatures, and withdrawn releases.\n\n"
    "A publication folder has all released models with signed metadata. `python "
    "training/export.py` publishes releases into it.",
    epilog=_EPILOG,
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Repo = Annotated[
    Path,
    typer.Option(
        "--model-repo",
        metavar="FOLDER",
        help="Publication folder, with the released models and their signed metadata.",
    ),
]
RootKey = Annotated[
    Path | None,
    typer.Option(
        "--root-key",
        metavar="FILE",
        help="PEM file of the root key, which signs the list of all keys that readers trust.",
        show_default="MODEL_REPO.keys/root.pem",
    ),
]
TargetsKey = Annotated[
    Path | None,
    typer.Option(
        "--targets-key",
        metavar="FILE",
        help="PEM file of the targets key, which signs the list of the published files.",
        show_default="MODEL_REPO.keys/targets.pem",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object on stdout; without this, print readable text."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print what the command would change, but write nothing. Without this, changes are "
        "written.",
    ),
]

DEFAULT_REPO = Path("model_repo")


@app.callback()
def options(version: Version = False) -> None:
    """Handle options that come before a command."""


@app.command()
def keys(
    model_repo: Repo = DEFAULT_REPO,
    root_key: RootKey = None,
    targets_key: TargetsKey = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make the four signing keys and the root metadata of a new publication.

    --root-key and --targets-key name the files of two of the keys, for example on an offline
    medium. The snapshot and timestamp keys go into the folder MODEL_REPO.keys. If the command was
    interrupted, run it again.
    """
    key_files = _keys(model_repo, root_key, targets_key)
    files = {role: str(key_files.key_path(role)) for role in ROLES}
    if dry_run:
        publish.refuse_existing_publication(model_repo)
        _answer(
            as_json, {"keys": files, "written": False}, [f"would make {p}" for p in files.values()]
        )
        return
    publish.begin_publication(model_repo, key_files)
    mark = _fingerprint(model_repo)
    _answer(
        as_json,
        {"keys": files, "fingerprint": mark, "written": True},
        [f"{role} key: {path}" for role, path in files.items()] + [f"fingerprint: {mark}"],
    )


@app.command()
def resign(
    model_repo: Repo = DEFAULT_REPO,
    root_key: RootKey = None,
    targets_key: TargetsKey = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Renew the signatures of a publication; run it at least once a month.

    It signs the snapshot and timestamp metadata, which expire first. It also signs root and targets
    metadata, which are valid for a year, once half of that year is over and their keys are there.
    """
    renewal = renew.resign(model_repo, _keys(model_repo, root_key, targets_key), dry_run)
    _print_renewal("signed again", renewal, dry_run, as_json)


@app.command()
def rotate(
    role: Annotated[
        list[str],
        typer.Option(
            metavar="ROLE",
            help=f"Role whose key is replaced: {', '.join(ROLES)}. Repeat the option for more.",
        ),
    ],
    model_repo: Repo = DEFAULT_REPO,
    root_key: RootKey = None,
    targets_key: TargetsKey = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Replace the signing keys of --role; readers reject the old keys afterwards.

    It needs the root key.
    """
    if strangers := set(role) - set(ROLES):
        raise ConfigurationError(
            f"--role: expected one or more of {', '.join(ROLES)}, got {', '.join(strangers)}; "
            "correct the role"
        )
    roles = [cast(Role, name) for name in role]
    renewal = renew.rotate(model_repo, roles, _keys(model_repo, root_key, targets_key), dry_run)
    _print_renewal("given new keys", renewal, dry_run, as_json)


@app.command()
def rollout(
    release: Annotated[
        int, typer.Argument(help="Number of a published release; `publication list` shows them.")
    ],
    share: Annotated[
        str,
        typer.Option(
            metavar="PERCENT",
            help="Share of the devices that may use the release from now on, such as 10%.",
        ),
    ],
    model_repo: Repo = DEFAULT_REPO,
    targets_key: TargetsKey = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Offer a release to a larger share of the devices.

    The share can only grow; `publication withdraw` takes a release back from all devices. Each
    device decides by a random number of its own, which it never sends, whether it belongs to the
    share.
    """
    part = parse_percent(share)
    key_files = _keys(model_repo, None, targets_key)
    news = renew.roll_out(model_repo, release, part, key_files, dry_run)
    answer = {"release": release, "share": part, "news": news, "written": news and not dry_run}
    will = "would be" if dry_run and news else "is"
    _answer(as_json, answer, [f"release {release} {will} for {100 * part:g} % of the devices"])


@app.command()
def withdraw(
    number: Annotated[
        int, typer.Argument(help="Number of a published release; `publication list` shows them.")
    ],
    reason: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Reason for the withdrawal on one line, which devices and users are shown.",
        ),
    ],
    model_repo: Repo = DEFAULT_REPO,
    targets_key: TargetsKey = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Withdraw a release: devices use the newest release that is not withdrawn.

    It cannot be undone. Another --reason replaces the former one, and the same reason changes
    nothing. `nobackfill converter withdraw` withdraws a published map.
    """
    key_files = _keys(model_repo, None, targets_key)
    news = renew.withdraw(model_repo, number, reason, key_files, dry_run)
    answer = {"release": number, "reason": reason, "news": news, "written": news and not dry_run}
    if not news:
        line = f"release {number} is withdrawn already, for the same reason"
    else:
        line = f"release {number} {'would be' if dry_run else 'is'} withdrawn: {reason}"
    _answer(as_json, answer, [line])


@app.command()
def verify(
    model_repo: Repo = DEFAULT_REPO,
    release: Annotated[
        int | None,
        typer.Option(metavar="N", help="Check this release alone.", show_default="all releases"),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of the root metadata to trust, 1.root.json as readers received it.",
            show_default="1.root.json of --model-repo",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that a publication can be trusted and used.

    It checks signatures, expiry dates, every digest and every ONNX file. It also runs the models
    on their golden probes, test inputs with the outputs that the models must give.
    """
    try:
        trusted = None if root is None else root.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{root}: the root metadata of --root cannot be read ({error.strerror}); check its "
            "name and permissions"
        ) from error
    health = verify_publication(model_repo, trusted, release)
    lines = [f"release {number}: good" for number in health.releases]
    lines += [
        f"{role} metadata expires {_day(date)}" for role, date in health.expiry_by_role.items()
    ]
    lines += [
        f"leftover of an interrupted publish, readers ignore it: {name}"
        for name in health.leftover_files
    ]
    answer = {
        "releases": list(health.releases),
        "expires": _days(health.expiry_by_role),
        "leftovers": list(health.leftover_files),
        "fingerprint": _fingerprint(model_repo),
    }
    _answer(as_json, answer, lines)


@app.command("list")
def list_command(model_repo: Repo = DEFAULT_REPO, as_json: Json = False) -> None:
    """List the published releases with date, method, size, and the releases they upgrade from."""
    entries = list_releases(model_repo)
    lines = [
        f"{e.release:4d}  {e.unfit}"
        if e.unfit is not None
        else f"{e.release:4d}  {e.created[:10]}  {e.method:12s} gate {e.gate:18s} "
        f"{e.size / 1e6:8.1f} MB  upgrades from {', '.join(map(str, e.upgrades_from)) or '-'}"
        + (f"  for {100 * e.share:g} % of the devices" if e.share < 1 else "")
        + (f"  WITHDRAWN: {e.withdrawn}" if e.withdrawn is not None else "")
        for e in entries
    ]
    _answer(as_json, {"releases": [dataclasses.asdict(e) for e in entries]}, lines)


def _keys(repo: Path, root_key: Path | None, targets_key: Path | None) -> SigningKeys:
    files: dict[Role, Path | None] = {"root": root_key, "targets": targets_key}
    return SigningKeys.of_publication(
        repo, {role: path for role, path in files.items() if path is not None}
    )


def _print_renewal(what: str, renewal: renew.Renewal, dry_run: bool, as_json: bool) -> None:
    expires = renewal.expiry_by_role
    answer = {
        "roles": list(renewal.signed_roles),
        "expires": _days(expires),
        "written": not dry_run,
    }
    lines = [f"{'would be ' if dry_run else ''}{what}: {', '.join(renewal.signed_roles)}"]
    lines += [f"{role} metadata expires {_day(date)}" for role, date in expires.items()]
    _answer(as_json, answer, lines)


def _fingerprint(repo: Path) -> str:
    return format_root_fingerprint((repo / "1.root.json").read_bytes())


def _days(expires: Mapping[Role, datetime]) -> dict[str, str]:
    return {role: date.isoformat() for role, date in expires.items()}


def _day(date: datetime) -> str:
    return f"{date:%Y-%m-%d}"


def _answer(as_json: bool, answer: Mapping[str, object], lines: list[str]) -> None:
    print(json.dumps(answer) if as_json else "\n".join(map(escape_control, lines)))


def main() -> None:
    """Run the command; print an error of ours and exit with its code (nobackfill.errors)."""
    try:
        app()
    except NobackfillError as error:
        print(escape_control(f"publication: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
