"""`python training/train.py CONFIG.yaml`: train an embedder, a side encoder or an upgrade."""

import os
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.training.cli.command import command_app
from nobackfill.training.config import load_config

_EPILOG = """
The configuration's `kind` says what is trained: `embedder` (phi), `side_encoder` (psi) or `upgrade`
(h and g). Ready configurations are in configs/; every key is described in training/config.py, and
an unknown key is refused with the list of those known.

Writes RUN_DIR/checkpoint.safetensors, config.yaml and stats.jsonl (one JSON line a log step). Run
it again after an interruption: it goes on after the last checkpoint, to the same result.

--weights is the key `weights`: a name that torchvision has for the backbone (DEFAULT,
IMAGENET1K_V2), downloaded and compared with its digest, a file (.safetensors, .pt, .pth), or
timm:NAME.TAG or open_clip:NAME/TAG, which is the backbone then (the extra public-models). The
classifier is left out, or kept for the classes that both name; what does not fit is named.

Examples:

python training/train.py configs/digits/embedder-1.yaml configs/digits/side_encoder-1.yaml --set
images=photos/train

python training/train.py configs/imagenet/embedder-2.yaml --weights IMAGENET1K_V2

Exit codes: 0 done (or was done before), 1 the loss diverged, 65 refused data or another digest,
66 no such file of weights, 69 a download without a network, 73 cannot write, 75 another training
works in RUN_DIR, 78 wrong configuration, 130 interrupted.
"""


def main(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG...", help="YAML files, e.g. configs/digits/embedder-1.yaml"),
    ],
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="pretrained weights to begin with",
            show_default="the key weights of CONFIG",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="override a key; nested keys with dots"),
    ] = None,
) -> None:
    """Train an embedder, a side-information encoder or an upgrade; several files one by one.

    --set and --weights apply to every file.
    """
    changed = [*(overrides or ()), *([f"weights={weights}"] if weights else [])]
    loaded = [load_config(path, tuple(changed)) for path in configs]
    # Imported where used: they bring torch, which takes seconds.
    from nobackfill.training.loop.loop import ProgressBars
    from nobackfill.training.loop.run import CHECKPOINT
    from nobackfill.training.loop.training import train

    for config in loaded:
        checkpoint = train(config, ProgressBars())
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"{config.run_dir / CHECKPOINT}: {config.kind}, {checkpoint.epoch} epochs, "
                f"{checkpoint.step} steps",
                flush=True,
            )


app = command_app("train.py", main, _EPILOG)

if __name__ == "__main__":
    app()
