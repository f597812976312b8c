"""The models of the tables, as a stock exporter writes them; needs the extra ``[fixtures]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

__all__ = ["CHECKPOINT", "DENSE", "MIXTURE", "make_export", "make_mixture"]

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
_SCALES = ((r"embed", 0.7), (r"weight", 0.04))
MIXTURE = {
    **DENSE,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
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
    from _families import Spec

    return _export(Spec("dense", "llama", dict(DENSE), external=True, scales=_SCALES), directory, checkpoint=checkpoint)


def make_mixture(directory: Path, form: str) -> Path:
    """Export Qwen3-MoE of the sizes :data:`MIXTURE` with transformers' own exporter.

    Args:
        directory: gets ``model.onnx`` and ``model.onnx.data``.
        form: ``grouped`` or ``batched``.
    """
    from _families import Spec

    spec = Spec("mixture", "qwen3_moe", dict(MIXTURE), moe=form, external=True, scales=_SCALES)
    return _export(spec, directory, checkpoint=False)


def _export(spec: Any, directory: Path, *, checkpoint: bool) -> Path:
    import onnx_ir as ir
    import torch
    from _build import build_model, export_parts

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
