"""Signing keys: ed25519, one PEM file a role, in `<publication folder>.keys/` or wherever the owner
keeps them.

root and targets keys may stay offline: their files are then given where they are needed. snapshot
and timestamp keys are online, as they sign every month. With nothing prepared, the first publish
makes all four beside the publication folder: development keys, and it says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Role = Literal["root", "targets", "snapshot", "timestamp"]
ROLES: tuple[Role, ...] = ("root", "targets", "snapshot", "timestamp")


@dataclass(frozen=True)
class Keys:
    """Where signing keys are: a folder of ROLE.pem files, and files named one by one."""

    folder: Path
    files: Mapping[Role, Path] = field(default_factory=dict)

    @classmethod
    def beside(cls, repo: Path, **files: Path) -> "Keys":
        """The keys of a publication folder by default: `<repo>.keys/`, and `files` such as
        `targets=Path("usb/targets.pem")`."""
        raise NotImplementedError
