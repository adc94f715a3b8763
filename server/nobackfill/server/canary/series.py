"""What Prometheus reads of a canary, counted when it asks."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nobackfill.server.canary.canaries import Canaries
from nobackfill.server.canary.sessions import KINDS


class CanarySeries(Collector):
    """Of the last canary since the start; counters begin anew with each."""

    def __init__(self, canaries: Canaries) -> None:
        self._canaries = canaries

    def collect(self) -> Iterator[Metric]:
        canary, report = self._canaries.setting(), self._canaries.report()
        yield GaugeMetricFamily(
            "nobackfill_canary_share",
            "Share of callers' keys whose queries meet the release on trial, 0 to 1.",
            value=0.0 if canary is None else canary.share,
        )
        queries = CounterMetricFamily(
            "nobackfill_canary_queries", "Queries by pair and outcome: answered, empty, error.",
            labels=["pair", "outcome"],
        )  # fmt: skip
        seconds = GaugeMetricFamily(
            "nobackfill_canary_seconds", "Quantiles of the last answers' durations, by pair.",
            labels=["pair", "quantile"],
        )  # fmt: skip
        score = GaugeMetricFamily(
            "nobackfill_canary_score", "Mean calibrated score of first hits, by pair.",
            labels=["pair"],
        )  # fmt: skip
        feedback = GaugeMetricFamily(
            "nobackfill_canary_feedback", "Sessions that sent feedback, by pair and kind.",
            labels=["pair", "kind"],
        )  # fmt: skip
        for name, pair in (("old", report.old), ("new", report.new)):
            queries.add_metric([name, "error"], pair.errors)
            queries.add_metric([name, "empty"], pair.empty)
            queries.add_metric([name, "answered"], pair.queries - pair.errors - pair.empty)
            for quantile, value in (("0.5", pair.p50), ("0.99", pair.p99)):
                if value is not None:
                    seconds.add_metric([name, quantile], value)
            if pair.score is not None:
                score.add_metric([name], pair.score)
            for kind in KINDS:
                feedback.add_metric([name, kind], pair.said[kind])
        yield from (queries, seconds, score, feedback)
        yield from self._likeness()

    def _likeness(self) -> Iterator[Metric]:
        report = self._canaries.report()
        yield CounterMetricFamily(
            "nobackfill_canary_compared", "Queries that both pairs have answered.",
            value=report.compared,
        )  # fmt: skip
        yield CounterMetricFamily(
            "nobackfill_canary_skipped", "Queries not compared, since too many waited.",
            value=report.skipped,
        )  # fmt: skip
        for name, text, value in (
            ("overlap", "Mean share of items that both answers have, 0 to 1.", report.overlap),
            ("rank_correlation", "Mean rank correlation of both answers, -1 to 1.",
             report.rank_correlation),
        ):  # fmt: skip
            if value is not None:
                yield GaugeMetricFamily(f"nobackfill_canary_{name}", text, value=value)
        evidence = GaugeMetricFamily(
            "nobackfill_canary_evidence", "Evidence that a bound is crossed; it stops at 80.",
            labels=["bound"],
        )  # fmt: skip
        for bound, value in report.evidence.items():
            evidence.add_metric([bound], value)
        yield evidence
