"""Options of `embed` for what an ONNX file reads of pictures."""

from typing import Annotated

import typer

from nobackfill.framing import Fit, Interpolation

FitOption = Annotated[
    Fit | None,
    typer.Option(
        "--fit",
        help="Pictures of another aspect: sides scaled by themselves, the middle, or all on black.",
    ),
]
Size = Annotated[
    int | None, typer.Option(min=1, max=4096, help="Pixels a side, where the graph leaves it open.")
]
Shortest = Annotated[
    int | None,
    typer.Option(min=1, max=4096, help="With --fit crop: the shortest side before; default: size."),
]
Interpolating = Annotated[
    Interpolation | None, typer.Option("--interpolation", help="How pictures are scaled.")
]
Mean = Annotated[
    tuple[float, float, float] | None, typer.Option(help="Taken off pixels of 0 to 1.")
]
Std = Annotated[tuple[float, float, float] | None, typer.Option(help="What that is divided by.")]


def given(**options: object) -> dict[str, object]:
    """Those that were."""
    return {name: value for name, value in options.items() if value is not None}
