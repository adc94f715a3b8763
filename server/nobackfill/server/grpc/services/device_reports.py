"""Reports of devices: counted, and nothing else is kept of them."""

from nobackfill.errors import InvalidInputError
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.v1 import release_pb2 as pb

_FAILURES = {
    pb.SYNC_FAILURE_UNSPECIFIED: "none",
    pb.SYNC_FAILURE_NO_ROUTE: "no route",
    pb.SYNC_FAILURE_REFUSED: "refused",
    pb.SYNC_FAILURE_LEFT_BEHIND: "left behind",
}


def count_report(report: pb.ReportSyncRequest, metrics: Metrics, *, known: bool) -> None:
    """`known`: its release is published here. Raises InvalidInputError."""
    kept = report.neighbours_kept if report.HasField("neighbours_kept") else 0.0
    good = known and report.failure in _FAILURES and 0 <= report.seconds < 1e9 and 0 <= kept <= 1
    if not good:
        raise InvalidInputError(
            "report: expected a release that is published here, a failure of the contract, seconds "
            "of 0 and more, and a share from 0 to 1"
        )
    release = str(report.release)
    failure = _FAILURES[report.failure]
    if failure == "none" and not report.probes_passed:
        failure = "probes"
    metrics.devices.syncs.labels(release, failure).inc()
    if failure == "none":
        metrics.devices.seconds.labels(release).observe(report.seconds)
    if report.HasField("neighbours_kept"):
        metrics.devices.neighbours_kept.labels(release).observe(kept)
