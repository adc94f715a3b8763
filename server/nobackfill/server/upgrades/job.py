"""How far the upgrade of one gallery is."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

# An upgrade's neighbours are looked at so often while it runs, at equal distances.
LOOKS = 10


class JobState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    INDEXING = "indexing"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Job:
    """The last upgrade of one gallery."""

    gallery: str
    from_release: int
    to_release: int
    state: JobState = JobState.RUNNING
    done: int = 0
    total: int = 0
    items_per_second: float = 0.0
    re_embedded: int = 0
    neighbours_kept: float | None = None
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen in it."""
        return self.state in (JobState.DONE, JobState.FAILED)

    @property
    def remaining_s(self) -> float:
        """Seconds to go at the present rate; 0 where none is known."""
        left = self.total - self.done
        return left / self.items_per_second if self.items_per_second > 0 else 0.0

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(asdict(self))


def from_json(text: str) -> Job:
    """A job that another gateway runs, or has run."""
    values = json.loads(text)
    return Job(**{**values, "state": JobState(values["state"])})
