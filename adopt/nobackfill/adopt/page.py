"""Render a verdict as one self-contained HTML page."""

import base64
import io
from pathlib import Path

from nobackfill.adopt.judgement import SHARES
from nobackfill.adopt.verdict import CurvePoint, Verdict, VerdictOption, gain_of_doubling_pairs
from nobackfill.extras import require_extra

_COLOUR = "#0072b2"


def render_verdict(verdict: Verdict) -> str:
    """Render a verdict as an HTML page, with the learning curve and the options as pictures.
    Nothing is written.

    Args:
        verdict: The verdict; a learning curve of fewer than two points is left out. It needs at
            least one option with figures.

    Returns:
        The page as text, without references to other files.

    Raises:
        ConfigurationError: The extra `adopt` is not installed.
        KeyError: An option or the curves of re-embedding lack the deciding figure.
        IndexError: The verdict has no options.
    """
    with require_extra("adopt"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.j2").render(
        verdict=verdict,
        figures=list(verdict.ways[0].figures),
        curve=_chart(verdict.curve, verdict.judged_by) if len(verdict.curve) > 1 else None,
        bars=_bars(verdict),
        healing=_re_embedding_chart(verdict),
        gain=gain_of_doubling_pairs(verdict.curve),
        seconds=format_duration,
        percent=format_figure_percent,
    )


def format_figure_percent(way: VerdictOption, figure: str) -> str:
    """Format a figure of an option in percent: '97.4%', and '~97.4%' for an estimate.

    One decimal. Figures are shares from 0 to 1.

    Args:
        way: The option.
        figure: Name of one of its figures, such as "R@1".

    Raises:
        KeyError: The option has no such figure.
    """
    mark = "~" if figure in way.estimated else ""
    return f"{mark}{100 * way.figures[figure]:.1f}%"


def format_duration(seconds: float | None) -> str:
    """Format a duration in the largest unit of which it has at least two: '3.5 h', '12.0 ms'. Below
    2 s it counts milliseconds.

    Args:
        seconds: Seconds, 0 or more; None becomes 'not measured', and 0 becomes '0'.
    """
    if seconds is None:
        return "not measured"
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{1000 * seconds:.1f} ms" if seconds else "0"


def _chart(points: list[CurvePoint], judged_by: str) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3), layout="constrained")
    axes = figure.add_subplot()
    pairs, figures = [p.pairs for p in points], [100 * p.figure for p in points]
    axes.plot(pairs, figures, color=_COLOUR, marker="o", markersize=4)
    axes.set_xscale("log")
    axes.set_xticks(pairs, [str(n) for n in pairs])
    axes.minorticks_off()
    axes.set_xlabel("pairs the map is fitted on")
    axes.set_ylabel(f"{judged_by} of the map, %")
    return _data_uri(figure)


def _re_embedding_chart(verdict: Verdict) -> str:
    """Draw the deciding figure while items become native, ranked by score and by distance."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3), layout="constrained")
    axes = figure.add_subplot()
    healing, name = verdict.healing, verdict.judged_by
    for label, curve, colour in (
        ("by calibrated scores", healing.curves_by_score[name], _COLOUR),
        ("by distance", healing.curves_by_distance[name], "#9aa5b1"),
    ):
        axes.plot(100 * SHARES, [100 * one for one in curve], color=colour, label=label)
    axes.set_xlabel("items re-embedded, %")
    axes.set_ylabel(f"{name}, %")
    axes.legend(frameon=False)
    return _data_uri(figure)


def _bars(verdict: Verdict) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.6), layout="constrained")
    axes = figure.add_subplot()
    values = [100 * way.figures[verdict.judged_by] for way in verdict.ways]
    colours = [_COLOUR if way.name == verdict.way else "#9aa5b1" for way in verdict.ways]
    bars = axes.barh([way.name for way in verdict.ways], values, color=colours)
    axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.set_xlabel(f"{verdict.judged_by}, %")
    return _data_uri(figure)


def _data_uri(figure: object) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "nobackfill"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
