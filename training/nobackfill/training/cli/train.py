"""The command train.py CONFIG.yaml: train an embedder, a side encoder or an upgrade."""

import os
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.training.cli.command import command_app
from nobackfill.training.config import load_config

_EPILOG = """
The key `kind` of a configuration selects what is trained: `embedder` (a model from images to
vectors), `side_encoder` (a model of side-information, a second vector that upgrades read) or
`upgrade` (a model from an old embedder's vectors to a new one's). Ready configurations are in
configs/. training/config.py describes every key; an unknown key is refused, with the list of known
ones.

Writes RUN_DIR/checkpoint.safetensors, config.yaml and stats.jsonl (one JSON object per logged
step). After an interruption run the same command again: it resumes from the last checkpoint, with
the same result.

--weights overrides the key `weights`. It is a name that torchvision has for the backbone (DEFAULT,
IMAGENET1K_V2), which is downloaded and verified, a file (.safetensors, .pt, .pth), or a public
model, which also selects the backbone: timm:NAME.TAG or open_clip:NAME/TAG. Public models need the
extra public-models. The classifier is loaded only for classes that have the same name in the
weights and in the images. Layers that stay untrained are listed on stderr.

Examples:

python training/train.py configs/digits/embedder-1.yaml configs/digits/side_encoder-1.yaml --set
images=photos/train

python training/train.py configs/imagenet/embedder-2.yaml --weights IMAGENET1K_V2

Exit codes: 0 done (now or before), 1 the loss diverged, 65 refused data, or a file whose digest is
wrong, 66 no such file of weights, 69 a download without a network, 73 cannot write, 75 another
training works in RUN_DIR, 78 wrong configuration, 130 interrupted.
"""


def main(
    configs: Annotated[
        list[Path],
        typer.Argument(
            metavar="CONFIG...",
            help="YAML files that each describe one training, such as "
            "configs/digits/embedder-1.yaml; they are only read, and trained one after another.",
        ),
    ],
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Pretrained weights to start from, in place of `weights` in every CONFIG: "
            "a name in torchvision, a file that is read, timm:NAME.TAG or open_clip:NAME/TAG.",
            show_default="`weights` of CONFIG",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace the value of one key in every CONFIG, for example epochs=3 or "
            "augmentation.noise=0.1; repeat it for more keys. Without it, the files apply "
            "unchanged.",
        ),
    ] = None,
) -> None:
    """Train an embedder, a side-information encoder or an upgrade; several files one by one.

    --set and --weights apply to every file.
    """
    changed = [*(overrides or ()), *([f"weights={weights}"] if weights else [])]
    loaded = [load_config(path, tuple(changed)) for path in configs]
    # Imported here: these modules import torch, which takes seconds.
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
