"""Export the Transformer of a folder that sentence-transformers saved, as a program.

`python -m nobackfill.training.export.transformer_folder FOLDER OUT TASK…` writes OUT/model.onnx,
and OUT/check.npz with what the library encodes. `nobackfill embed` and `export.py` run it, because
it needs torch. It ends when its stdin ends, so that it does not outlive a killed parent.
"""

import logging
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

OUTPUT = "token_embeddings"
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# Bytes of weights above which they lie in a file of their own: protobuf takes 2 GiB.
_LARGE = 1 << 30
# Their lengths differ; the last is longer than most models read.
TEXTS = (
    "A short text about red shoes.",
    "word",
    "What does 3,5 % of ÄÖÜ mean, and for WHOM? It depends: see the second sentence of this text.",
    "one two three four five six seven eight nine ten " * 60,
)


class _Tokens(nn.Module):
    """A Transformer from its inputs in a fixed order to the vectors of tokens."""

    def __init__(self, encoder: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._encoder, self._names = encoder, tuple(names)

    def forward(self, *values: Tensor) -> Tensor:
        inputs = dict(zip(self._names, values, strict=True))
        tokens: Tensor = self._encoder(**inputs, return_dict=True).last_hidden_state
        return tokens


def export_transformer(folder: Path, out: Path, tasks: Sequence[str]) -> None:
    """Export the Transformer that texts of some tasks pass, and encode TEXTS by the whole model.

    No code of the folder is run, and only safetensors are read for the Transformer. Numbers are
    float32. Run as a command, this module gives files the mode 0600.

    Args:
        folder: The model's folder. Nothing is downloaded.
        out: An existing folder; it gets `model.onnx`, with `model.onnx.data` for a large model, and
            `check.npz`: `texts`, and for each task vectors float32 [texts, dim].
        tasks: `document`, `query` or both. They must pass the same Transformer.

    Raises:
        ValueError: The tasks pass several Transformers, or none.
        KeyError: A task is neither `document` nor `query`.
        ImportError: sentence-transformers is not installed.
        OSError: A file cannot be written to `out`.
        Exception: The library cannot load the folder, or torch cannot export the model.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer

    model = SentenceTransformer(
        str(folder), device="cpu", local_files_only=True, trust_remote_code=False,
        model_kwargs={
            "use_safetensors": True, "dtype": torch.float32, "attn_implementation": "eager"
        },
    )  # fmt: skip
    runs: list[tuple[Any, dict[str, Tensor]]] = []

    def record(module: Any, inputs: tuple[Any, ...]) -> None:
        tensors = {name: inputs[0][name].clone() for name in _INPUTS if name in inputs[0]}
        runs.append((module, tensors))

    for module in model.modules():
        if isinstance(module, Transformer):
            module.register_forward_pre_hook(record)
    encode = {"document": model.encode_document, "query": model.encode_query}
    check: dict[str, Any] = {"texts": np.array(TEXTS)}
    for task in tasks:
        check[task] = encode[task](list(TEXTS), batch_size=len(TEXTS), show_progress_bar=False)
    if len({id(module) for module, _ in runs}) != 1 or len(runs) != len(tasks):
        raise ValueError(
            "expected a model with one Transformer that runs once for each kind of text "
            f"({', '.join(tasks)}), found {len({id(module) for module, _ in runs})} Transformers "
            f"that ran {len(runs)} times; use another model"
        )
    transformer, features = runs[0]
    encoder = transformer.auto_model.eval()
    encoder.config.use_cache = False
    _write(_Tokens(encoder, list(features)), features, out / "model.onnx")
    np.savez(out / "check.npz", **check)


def _write(module: nn.Module, features: dict[str, Tensor], path: Path) -> None:
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    size = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    with warnings.catch_warnings(), torch.no_grad():
        # torch.onnx prints deprecation warnings about itself.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), tuple(features.values()), str(path), dynamo=True, verbose=False,
            input_names=list(features), output_names=[OUTPUT],
            dynamic_shapes=(tuple(free for _ in features),), external_data=size > _LARGE,
        )  # fmt: skip


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    os.umask(0o077)
    logging.disable(logging.WARNING)
    export_transformer(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
