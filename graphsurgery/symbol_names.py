"""New names for symbolic sizes, in every shape that a model declares."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.shapes import invalidate
from graphsurgery.patterns.matcher import all_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["declared_symbols", "rename_symbols"]

_NAME = re.compile(r"[A-Za-z_]\w*")


def declared_symbols(model: ir.Model) -> frozenset[str]:
    """Every name that stands in a declared size, alone or in an expression."""
    texts = {text for value in _shaped(model) for size in value.shape or () if (text := _text(size)) is not None}
    return frozenset(texts).union(*(_NAME.findall(text) for text in texts))


def rename_symbols(model: ir.Model, names: Mapping[str, str]) -> int:
    """Rename symbols, old name to new, in place and all at once; in expressions such as ``past + seq`` too.

    The caller has made sure that no new name is that of another size.

    Returns:
        Number of declared sizes that changed.
    """

    def renamed(size: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        text = _text(size)
        if text is None:
            return size
        new = names.get(text) or _NAME.sub(lambda found: names.get(found[0], found[0]), text)
        return ir.SymbolicDim(new) if new != text else size

    changed = 0
    for value in _shaped(model):
        shape = value.shape
        assert shape is not None
        sizes = [renamed(size) for size in shape]
        moved = sum(new is not old for new, old in zip(sizes, shape, strict=True))
        if moved:
            changed += moved
            # Shapes of inputs are frozen, and values may share one.
            denotations = [shape.get_denotation(axis) for axis in range(len(shape))]
            value.shape = ir.Shape(sizes, denotations=denotations)
    invalidate(model)
    return changed


def _text(size: int | ir.SymbolicDim) -> str | None:
    return size.value if isinstance(size, ir.SymbolicDim) else None


def _shaped(model: ir.Model) -> Iterator[ir.Value]:
    """Every value that declares a shape; initializers have no symbols in theirs."""
    for graph in all_graphs(model):
        for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
            if value.shape is not None:
                yield value
