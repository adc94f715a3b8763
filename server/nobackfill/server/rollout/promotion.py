"""What an operator does to a canary under way: let more queries meet it, or all."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from nobackfill.errors import InvalidInputError, PreconditionError
from nobackfill.server.rollout.activation import Activations
from nobackfill.server.rollout.parts import Parts
from nobackfill.server.rollout.run import Run
from nobackfill.server.state import Activation, Canary, State

# Between steps: a leap year. Longer ones are typing errors, and messages could not tell some.
_LONGEST_S = 366 * 24 * 3600


def check(canary: Canary) -> None:
    """Raises InvalidInputError for what is no canary."""
    shares = (canary.share, *canary.steps)
    grows = all(one < other for one, other in pairwise(shares))
    if not (shares[0] > 0 and shares[-1] <= 1 and grows):
        raise InvalidInputError(
            "canary: expected growing shares above 0 and at most 1, got "
            + ", ".join(f"{share:g}" for share in shares)
        )
    if not 0 <= canary.every_s <= _LONGEST_S or (canary.steps and not canary.every_s):
        raise InvalidInputError(
            f"canary: expected more than 0 seconds between steps, and at most {_LONGEST_S:,}, got "
            f"{canary.every_s:g}"
        )
    # What is not finite could not be read from the state again.
    if not (0 < canary.most_errors < 1 and 0 < canary.largest_p99_ratio < math.inf):
        raise InvalidInputError(
            "canary: expected most_errors between 0 and 1, and a finite largest_p99_ratio above 0, "
            "got "
            f"{canary.most_errors:g} and {canary.largest_p99_ratio:g}"
        )


@dataclass(frozen=True)
class Promotion:
    """Changes the canary that is under way; each change is durable before it is answered."""

    parts: Parts
    activations: Activations

    def under_way(self, release: int) -> bool:
        """Whether a canary of this release is under way or about to begin."""
        record = self.parts.state.now.activation
        return record is not None and record.release == release and record.canary is not None

    def change(self, release: int, canary: Canary) -> None:
        """Another share, other steps and bounds. Raises InvalidInputError, PreconditionError for a
        share that is smaller, or where there is none, CannotWriteError."""
        check(canary)

        def changed(now: State) -> Mapping[str, object]:
            record, before = _canary(now, release)
            if canary.share < before.share:
                raise PreconditionError(
                    f"the share is {before.share:g}, and shares only grow, got {canary.share:g}; "
                    "`gateway rollback --yes` ends the canary"
                )
            kept = canary.model_copy(update={"promoted": before.promoted})
            return {"activation": record.model_copy(update={"canary": kept})}

        self.parts.state.revise(changed)

    def promote(self, release: int) -> Run:
        """All queries move to the new pair. Raises PreconditionError where there is no canary of
        the release, and where nobody has met it, CannotWriteError."""

        def promoted(now: State) -> Mapping[str, object]:
            record, canary = _canary(now, release)
            ended = canary.model_copy(update={"promoted": True})
            return {"activation": record.model_copy(update={"canary": ended})}

        with self.activations.held():
            run = self.activations.running()
            if run is None:
                if self.under_way(release):
                    raise PreconditionError(
                        f"another gateway leads the canary of release {release}; ask that one"
                    )
                raise _none(release)
            if not self.parts.canaries.met(release):
                raise PreconditionError(
                    f"release {release} has answered no query of its canary at this gateway: there "
                    "is no evidence to promote it by. Let more callers meet it, as with `gateway "
                    f"activate {release} --canary 50%`, or end the canary with `gateway rollback "
                    f"--yes` and run `gateway activate {release}`, which asks for none"
                )
            self.parts.state.revise(promoted)
        return run


def _canary(now: State, release: int) -> tuple[Activation, Canary]:
    record = now.activation
    if record is None or record.release != release or record.canary is None:
        raise _none(release)
    return record, record.canary


def _none(release: int) -> PreconditionError:
    return PreconditionError(
        f"no canary of release {release} is under way; `gateway activate {release} --canary 5%` "
        "begins one"
    )
