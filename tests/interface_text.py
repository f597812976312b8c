"""Decoders of a few nodes, as text."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

__all__ = ["small_decoder"]


def small_decoder(
    nodes: list[str], outputs: dict[str, list[Any]], inputs: dict[str, list[Any]] | None = None
) -> ir.Model:
    """A graph on ``input_ids [B, S]``, ``hidden [B, S, 4]`` and ``w [4, 8]``, whose outputs are float."""
    text = ", ".join(f"float[{','.join(map(str, dims))}] {name}" for name, dims in outputs.items())
    more = "".join(f", float[{','.join(map(str, dims))}] {name}" for name, dims in (inputs or {}).items())
    return ir.from_onnx_text(
        '<ir_version: 9, opset_import: ["" : 18]> g (int64[B,S] input_ids, float[8,4] table, float[4,8] w'
        + more
        + f") => ({text}) <int64 zero = {{0}}, int64 last = {{-1}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] minus = {{-1}},"
        " int64[1] far = {9223372036854775807}> { hidden = Gather(table, input_ids) " + " ".join(nodes) + " }"
    )
