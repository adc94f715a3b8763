"""Days until what lets people in or releases be believed expires, for Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_DAY = timedelta(days=1)


def _none() -> Mapping[str, datetime]:
    return {}


class Expiries(Collector):
    """Asked when somebody looks. Each source, set by the gateway, maps a label to a time."""

    def __init__(self) -> None:
        self.metadata: Callable[[], Mapping[str, datetime]] = _none
        self.certificates: Callable[[], Mapping[str, datetime]] = _none
        # The first token to expire; nobody's name is shown.
        self.tokens: Callable[[], datetime | None] = lambda: None

    def collect(self) -> Iterator[Metric]:
        now = datetime.now(UTC)
        for name, what, label, ends in (
            ("metadata", "TUF metadata of a role", "role", self.metadata()),
            ("certificate", "a TLS certificate", "certificate", self.certificates()),
        ):
            family = GaugeMetricFamily(
                f"nobackfill_{name}_expires_days",
                f"Days until {what} expires; negative: since it did.",
                labels=[label],
            )
            for value, end in ends.items():
                family.add_metric([value], (end - now) / _DAY)
            yield family
        tokens = GaugeMetricFamily(
            "nobackfill_token_expires_days", "Days until the first of the tokens expires."
        )
        first = self.tokens()
        if first is not None:
            tokens.add_metric([], (first - now) / _DAY)
        yield tokens
