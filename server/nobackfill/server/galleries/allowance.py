"""What a token may have its galleries hold together."""

from dataclasses import dataclass

from nobackfill.errors import ItemQuotaError, few


@dataclass(frozen=True)
class Allowance:
    """At most `items` in the galleries of these names."""

    galleries: frozenset[str]
    items: int

    def check(self, there: int, new: int) -> None:
        """Raises ItemQuotaError where `new` items beside those that are `there` are too many."""
        if new and there + new > self.items:
            raise ItemQuotaError(
                f"expected at most {self.items} items in {few(sorted(self.galleries))} together "
                f"under this token, {there} are there and {new} more came; delete some, or ask its "
                "operator for more"
            )
