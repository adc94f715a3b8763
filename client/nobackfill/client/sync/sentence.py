"""A sync's report in one line, for commands and pages."""

from nobackfill.client.output import size
from nobackfill.client.sync.sync import Report


def sentence(report: Report) -> str:
    """What a sync did, or would do."""
    line = {
        "upgraded": f"{report.items} items now in release {report.release}'s space "
        f"(from {report.from_release}, {report.upgrade_seconds:.1f} s)",
        "planned": f"would go from release {report.from_release} to {report.release}: "
        f"{size(report.download_bytes)} to download, about {report.upgrade_seconds:.1f} s for "
        f"{report.items} items",
        "up-to-date": f"release {report.release} is the newest that can be followed",
        "rolled-back": f"returned to release {report.release}",
        "behind": f"stays at release {report.from_release}",
    }[report.state]
    if report.routes:
        line += f"; by way of {' and '.join('>'.join(map(str, r)) for r in report.routes)}"
    if report.neighbours_kept is not None:
        line += f"; kept {report.neighbours_kept:.1%} of the items' nearest neighbours"
    if report.expected_kept is not None:
        line += f"; on the publisher's images {report.expected_kept:.1%} of re-embedding's mAP"
    if report.re_embedded:
        line += f"; {report.re_embedded} embedded anew from their images"
    return line
