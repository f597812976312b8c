"""The dense model of the tables, as a stock exporter writes it; needs the extra ``[fixtures]``."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["CHECKPOINT", "DENSE", "make_export"]

DENSE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1536,
    "max_position_embeddings": 16384,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CHECKPOINT = "checkpoint"
"""Name of the folder beside an export that holds the model as it was before the export."""


def make_export(directory: Path, *, checkpoint: bool = False) -> Path:
    """Export Llama of the sizes :data:`DENSE` with transformers' own exporter.

    Args:
        directory: gets ``model.onnx`` and ``model.onnx.data``.
        checkpoint: whether to write the weights as transformers keeps them into ``directory/checkpoint`` too, for
            tools that start from there.
    """
    import onnx_ir as ir
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))
    from _build import build_model, export_parts
    from _families import Spec

    scales = ((r"embed", 0.7), (r"weight", 0.04))
    spec = Spec("dense", "llama", dict(DENSE), external=True, scales=scales)
    prompt = torch.randint(0, 100, (2, 5), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    model = build_model(spec)
    directory.mkdir(parents=True, exist_ok=True)
    if checkpoint:
        model.save_pretrained(directory / CHECKPOINT)
        _save_tokenizer(directory / CHECKPOINT)
    program = export_parts(model, spec, inputs, check=False)["decode"]
    path = directory / "model.onnx"
    ir.save(program, path, external_data="model.onnx.data")
    return path


def _save_tokenizer(directory: Path) -> None:
    """A tokenizer of one word: builders copy one along, nobody uses it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<unk>").save_pretrained(directory)
