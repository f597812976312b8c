"""Where the rows of an expert block are added up: reductions, products with the weights, Einsum."""

from __future__ import annotations

import dataclasses
import heapq
from typing import TYPE_CHECKING

from graphsurgery.patterns.experts.index_numbers import reduced_axes
from graphsurgery.patterns.matcher import readers

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.experts.layout import Labels
    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["Start", "end_of_pass", "equation_of", "start_of"]

_MAX_COPIES = 4096
_LONGEST_PASS = 512
"""Nodes behind the parameters of one choice that are looked at for its end."""


@dataclasses.dataclass(frozen=True)
class Start:
    """A sum over copies of rows.

    Attributes:
        rows: what is added up.
        axes: what its axes count.
        copies: how many copies there are.
        weights: what the rows are multiplied by in the same operator, if anything.
        weight_axes: what its axes count.
        parameter: what the rows are multiplied by as by a matrix in the same operator, if anything.
        parameter_axes: what its axes count.
        turned: whether the axis of it that is summed over is behind the other.
    """

    rows: ir.Value
    axes: Labels
    copies: int
    weights: ir.Value | None = None
    weight_axes: Labels = ()
    parameter: ir.Value | None = None
    parameter_axes: Labels = ()
    turned: bool = False


def start_of(node: ir.Node, shapes: ShapeView, constant: Collection[ir.Value]) -> Start | None:
    """The sum over copies that ``node`` may be; None where it cannot be one."""
    if any(item is None for item in node.inputs[:1]):
        return None
    found = {"ReduceSum": _reduced, "MatMul": _product, "Einsum": _einsum}[node.op_type](node, shapes)
    if found is None and node.op_type == "Einsum":
        found = _with_product(node, shapes, constant)
    if found is None or not 1 <= found.copies <= _MAX_COPIES or found.rows in constant:
        return None
    return found


def _reduced(node: ir.Node, shapes: ShapeView) -> Start | None:
    source, reduced = node.inputs[0], reduced_axes(node)
    assert source is not None
    shape = shapes.shape(source)
    if shape is None or reduced is None or len(reduced) != 1 or not 3 <= len(shape) <= 4:
        return None
    axis, last = reduced[0] % len(shape), len(shape) - 1
    copies = shape[axis]
    if axis == last or not isinstance(copies, int) or not isinstance(shape[-1], int):
        return None
    outer = [place for place in range(last) if place != axis]
    labels = dict(zip(outer, ("t",) if len(outer) == 1 else ("b", "s"), strict=True))
    labels[axis], labels[last] = "c", "f"
    return Start(source, tuple(labels[place] for place in range(len(shape))), copies)


def _product(node: ir.Node, shapes: ShapeView) -> Start | None:
    """``[T, 1, K]`` times ``[T, K, H]``."""
    left, right = node.inputs
    if left is None or right is None:
        return None
    weights, rows = shapes.shape(left), shapes.shape(right)
    if weights is None or rows is None or not len(weights) == len(rows) == 3 or weights[1] != 1:
        return None
    copies = rows[1]
    if copies != weights[2] or weights[0] != rows[0] or not isinstance(rows[2], int) or not isinstance(copies, int):
        return None
    return Start(right, ("t", "c", "f"), copies, left, ("t", "1", "c"))


def _einsum(node: ir.Node, shapes: ShapeView) -> Start | None:
    """Rows and weights of two operands, summed over a letter that both have (``eth,te->th``)."""
    equation = equation_of(node)
    if equation is None:
        return None
    letters, output = equation
    if len(letters) != 2 or len(output) not in (2, 3):
        return None
    for place in (0, 1):
        rows, weights = letters[place], letters[1 - place]
        value, other = node.inputs[place], node.inputs[1 - place]
        summed = [letter for letter in rows if letter not in output]
        if value is None or other is None or len(summed) != 1 or set(weights) != {*output[:-1], summed[0]}:
            continue
        if set(rows) != {*output, summed[0]}:
            continue
        names = dict(zip(output[:-1], ("t",) if len(output) == 2 else ("b", "s"), strict=True))
        names |= {output[-1]: "f", summed[0]: "c"}
        copies = shapes.dim(value, rows.index(summed[0]))
        if isinstance(copies, int):
            axes = tuple(names[letter] for letter in rows)
            return Start(value, axes, copies, other, tuple(names[letter] for letter in weights))
    return None


def _with_product(node: ir.Node, shapes: ShapeView, constant: Collection[ir.Value]) -> Start | None:
    """The last product and the sum in one operator: ``tei,ehi,te->th``; without weights where the rows have them."""
    equation = equation_of(node)
    if equation is None or len(equation[0]) not in (2, 3) or len(equation[1]) not in (2, 3):
        return None
    letters, output = equation
    tokens, feature = output[:-1], output[-1]
    operands = list(zip(node.inputs, letters, strict=True))
    matrices = [(value, axes) for value, axes in operands if value in constant and feature in axes]
    if len(matrices) != 1 or set(matrices[0][1]) & set(tokens) or len(matrices[0][1]) != 3:
        return None
    parameter, parameter_letters = matrices[0]
    inner = set(parameter_letters) - {feature}
    rest = [(value, axes) for value, axes in operands if value is not parameter]
    rows = next(((value, axes) for value, axes in rest if set(axes) == {*tokens, *inner}), None)
    weights = [(value, axes) for value, axes in rest if rows is not None and value is not rows[0]]
    if rows is None or len(weights) != len(operands) - 2 or rows[0] is None:
        return None
    # Which of the two letters counts the experts, the weights tell; without them, the order of a stack of matrices.
    expert = parameter_letters[0] if not weights else next((item for item in weights[0][1] if item in inner), "")
    if expert not in inner or any(set(axes) != {*tokens, expert} for _, axes in weights):
        return None
    names = dict(zip(tokens, ("t",) if len(tokens) == 1 else ("b", "s"), strict=True))
    names |= {feature: "f", **dict.fromkeys(inner, "f"), expert: "c"}
    copies = shapes.dim(rows[0], rows[1].index(expert))
    if not isinstance(copies, int):
        return None

    def named(axes: str) -> Labels:
        return tuple(names[letter] for letter in axes)

    weight, weight_letters = weights[0] if weights else (None, "")
    (summed,) = inner - {expert}
    return Start(
        rows[0],
        named(rows[1]),
        copies,
        weight,
        named(weight_letters),
        parameter,
        named(parameter_letters),
        turned=parameter_letters.index(feature) < parameter_letters.index(summed),
    )


def equation_of(node: ir.Node) -> tuple[list[str], str] | None:
    """The letters of the operands and of the output of an Einsum; None where one repeats a letter or has an ellipsis."""
    attribute = node.attributes.get("equation")
    text = "" if attribute is None else attribute.as_string().replace(" ", "")
    left, arrow, output = text.partition("->")
    letters = left.split(",")
    if not arrow or "." in text or len(letters) != len(node.inputs):
        return None
    if any(len(set(item)) != len(item) for item in (*letters, output)):
        return None
    return letters, output


def end_of_pass(picks: Sequence[ir.Node], index: GraphIndex, constant: Collection[ir.Value]) -> ir.Value | None:
    """The result of the experts whose parameters ``picks`` take, where it meets another: None where several do."""
    inside = {output for node in picks for output in node.outputs}
    pending = [(index.order[node], number, node) for number, node in enumerate(_readers(inside))]
    heapq.heapify(pending)
    seen = {node for _, _, node in pending}
    ends: set[ir.Value] = {value for value in inside if value.is_graph_output()}
    while pending:
        _, _, node = heapq.heappop(pending)
        others = [item for item in node.inputs if item is not None and item not in inside and item not in constant]
        if node.op_type in ("Add", "Sum") and not node.domain and others:
            ends |= {item for item in node.inputs if item in inside}
            continue
        inside |= set(node.outputs)
        ends |= {value for value in node.outputs if value.is_graph_output()}
        for following in _readers(node.outputs):
            if following not in seen and following in index.order:
                seen.add(following)
                heapq.heappush(pending, (index.order[following], len(seen), following))
        if len(seen) > _LONGEST_PASS:
            return None
    return ends.pop() if len(ends) == 1 else None


def _readers(values: Collection[ir.Value] | Sequence[ir.Value]) -> list[ir.Node]:
    return list(dict.fromkeys(reader for value in values for reader in readers(value)))
