"""The newest metadata versions ever seen, kept apart from the metadata itself."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Version = Annotated[int, Field(ge=0)]


class Floor(BaseModel):
    """Versions below which nothing is accepted: small JSON, kept with the installed release.

    A client keeps it in the same database transaction as the release it installs, so that neither a
    lost state folder nor metadata that never reached the disk lets an attacker go back. `keys` are
    digests of the keys of each role: the counters of a role start anew when the root metadata
    gives it other keys, else one stolen online key could end all publishing (fast-forward attack,
    TUF 5.3.11).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: Version
    timestamp: Version
    snapshot: Version
    targets: Version
    keys: dict[str, str]
