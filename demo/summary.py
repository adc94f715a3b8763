"""The end of the demo: report.json, and a table that a newcomer understands."""

from typing import Any

from rich.console import Console
from rich.table import Table

from demo.journal import Journal

# Key of the matrix, what it is called, what it means.
ROWS = (
    ("old/old", "before", "old model, its gallery"),
    ("new/old", "naive swap", "new model, gallery left as it was"),
    ("new/upgraded", "upgraded", "new model, gallery carried over"),
    ("new/new", "upper bound", "new model, all images embedded again"),
)


def make_report(journal: Journal) -> dict[str, Any]:
    """report.json: metrics in percent, latencies in milliseconds."""
    before, after, bounds = journal["before"], journal["after"], journal["bounds"]
    swap, sync = journal["swap"], journal["sync"]
    return {
        "cells": {
            "old/old": before["server"],
            "new/old": bounds["new/old"],
            "new/upgraded": after["server"],
            "new/new": bounds["new/new"],
        },
        "server": {
            "items": len(journal["server"]["items"]),
            **{key: value for key, value in swap.items() if key != "phases"},
        },
        "edge": {
            "items": journal["device"]["items"],
            "cells": {"old/old": before["device"], "new/upgraded": after["device"]},
            "sync_seconds": sync["sync_seconds"],
            "searches_during_sync": sync["searches"],
            "failed_during_sync": sync["failed"],
            "same_hits_as_server": after["agreement"],
        },
        "seconds": journal.seconds,
    }


def print_report(figures: dict[str, Any]) -> None:
    """Print the table and what it means to standard output."""
    cells, server, edge = figures["cells"], figures["server"], figures["edge"]
    table = Table(title="Searches with images that no model was trained on, in percent")
    table.add_column("gallery", no_wrap=True)
    table.add_column("what it means")
    for name in ("1st right", "in 5", "mAP"):
        table.add_column(name, justify="right", no_wrap=True)
    for key, name, meaning in ROWS:
        table.add_row(name, meaning, *_percent(cells[key]), end_section=key == "new/new")
    for key, name in (("old/old", "device before"), ("new/upgraded", "device upgraded")):
        table.add_row(name, "one SQLite file on the device", *_percent(edge["cells"][key]))
    console = Console(highlight=False)
    console.print(table)
    kept = 100 * cells["new/upgraded"]["map"] / cells["new/new"]["map"]
    console.print(
        f"The upgrade keeps [bold]{kept:.1f} %[/bold] of what embedding all "
        f"{server['items']} images again would give, and reads none of them: they were deleted "
        "before it began.\n"
        f"Server: {server['requests']} searches while release 2 was swapped in, "
        f"[bold]{server['failed']} failed[/bold]. Half were answered within "
        f"{server['p50_ms_steady']} ms, 99 % within {server['p99_ms_steady']} ms; during the "
        f"{server['swap_seconds']} s of the swap within {server['p50_ms_swap']} and "
        f"{server['p99_ms_swap']} ms.\n"
        f"{_killed(server)}"
        f"Device: synced {edge['items']} images in {edge['sync_seconds']} s; "
        f"{edge['searches_during_sync']} searches were answered meanwhile, "
        f"{edge['failed_during_sync']} failed. Of its first five hits the server finds "
        f"{edge['same_hits_as_server']:.1f} % as well."
    )


def _percent(cell: dict[str, float]) -> list[str]:
    return [f"{cell[key]:.1f}" for key in ("cmc1", "cmc5", "map")]


def _killed(server: dict[str, Any]) -> str:
    if not server["killed"]:
        return ""
    return (
        f"One of the {server['gateways']} gateways was killed (SIGKILL) while it led the upgrade; "
        "another led on.\n"
    )
