"""Options of export.py for models that were not trained here."""

from pathlib import Path
from typing import Annotated

import typer

from nobackfill.framing import Fit, Interpolation

Onnx = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="or an embedder of your own: uint8 [n,H,W,3] or float32 [n,3,H,W] -> [n,dim]",
    ),
]
PublicWeights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="NAME",
        help="or a public one as it is: timm:NAME.TAG, open_clip:NAME/TAG, "
        "torchvision:NAME/WEIGHTS",
    ),
]
Mean = Annotated[
    tuple[float, float, float], typer.Option(help="a float32 --onnx takes (x/255 - mean) / std")
]
Std = Annotated[tuple[float, float, float], typer.Option(help="see --mean")]
FitOption = Annotated[Fit, typer.Option("--fit", help="how --onnx takes pictures of other aspects")]
Shortest = Annotated[
    int | None, typer.Option(min=1, help="with --fit crop: pixels of the shortest side")
]
Interpolating = Annotated[
    Interpolation, typer.Option("--interpolation", help="how --onnx wants pictures scaled")
]
TextFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="a text model: ONNX with tokenizer.json, of one space"),
]
EvalTexts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSONL of id, text and label, its class or one of --eval's; without any labels the "
        "texts are to be found by their `query`, or by a part of themselves",
    ),
]
VectorsOf = Annotated[
    str | None, typer.Option(metavar="NAME:DIM", help="no model at all: what made the vectors")
]
Upgrades = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="RUN", help="upgrade into it, or `nobackfill fit`'s FILE.onnx; may be repeated"
    ),
]
QueryFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="another model for texts that ask, beside --text-encoder"),
]
