"""Where a tensor carries the rows (one for each token) and the batch, read from its sizes.

Alphabet: B batch, S query length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis.dims import Unknown, parse_dim, product
from graphsurgery.analysis.slices import Blocked, RowAxis, lift, same_size
from graphsurgery.patterns.matcher import is_op, subgraphs

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.interface import TokenInput

__all__ = [
    "batch_aliases",
    "batch_axis_of",
    "holds_rows",
    "is_batch_major",
    "locate_output",
    "locate_rows",
    "may_be",
    "merges_batch",
    "selector_above",
]

_SELECTORS = ("Slice", "Gather", "GatherND", "GatherElements", "Split", "Compress")
_MAX_NODES = 64
_MAX_VALUES = 4096


def may_be(size: Dim, other: Dim) -> bool:
    """Whether two sizes are the same, or nobody knows: one has no name, being declared without or computed.

    A size of 1 is broadcast to whatever the other is: they are not the same.
    """
    if same_size(size, other):
        return True
    if 1 in (size, other):
        return False
    return _is_unknown(size) or _is_unknown(other)


def locate_rows(shape: tuple[Dim, ...], tokens: TokenInput) -> tuple[RowAxis, int | None] | None:
    """Where a tensor of features carries the rows, and where the batch.

    Returns:
        The row axis and the batch axis (None where flat, packed, or where the batch of 1 has no axis); None where it
        does not hold one row a token.
    """
    rank = len(shape)
    if rank < 2:
        return None
    if tokens.batch is not None and tokens.batch != 1 and rank == 2:
        flat = same_size(shape[0], product((tokens.batch, tokens.length)))
        return (RowAxis(0, flat=True), None) if flat else None
    # Features stand last, but in a convolution, which has them in front: [B, V, S].
    for axis in (rank - 2, *range(rank - 2), *([rank - 1] if rank > 2 and tokens.batch is not None else [])):
        if not same_size(shape[axis], tokens.length):
            continue
        if tokens.batch is None:
            return RowAxis(axis), None
        others = [item for item in range(rank) if item != axis and same_size(shape[item], tokens.batch)]
        if others:
            return RowAxis(axis), others[-1] if others[-1] < axis else others[0]
        if tokens.batch == 1 and rank == 2:
            return RowAxis(axis), None
    return None


def batch_aliases(output: ir.Value, view: ShapeView, batch: Dim) -> list[Dim]:
    """Unknown sizes of a graph output that it declares to be the batch."""
    shape = view.shape(output)
    if shape is None:
        return []
    pairs = zip(shape, _completed(shape, output), strict=True)
    return [size for size, declared in pairs if size != declared and declared == batch]


def locate_output(
    output: ir.Value, view: ShapeView, tokens: TokenInput
) -> tuple[tuple[Dim, ...], RowAxis, int | None] | None:
    """The sizes of a graph output, and where it carries rows and batch; None where it does not hold one row a token.

    A size that cannot be inferred is what the file declares, unless something above picks rows.
    """
    shape = view.shape(output)
    if shape is None:
        return None
    located = locate_rows(shape, tokens)
    if located is None and any(_is_unknown(size) for size in shape) and selector_above(output, view, tokens) is None:
        shape = _completed(shape, output)
        located = locate_rows(shape, tokens)
    return None if located is None else (shape, *located)


def _is_unknown(size: Dim) -> bool:
    return not isinstance(size, int) and isinstance(size.atom, Unknown)


def _completed(shape: tuple[Dim, ...], value: ir.Value) -> tuple[Dim, ...]:
    """``shape`` with what ``value`` declares in place of what is not known."""
    if value.shape is None or len(value.shape) != len(shape):
        return shape
    declared = [size if isinstance(size, int) else parse_dim(size.value or "") for size in value.shape]
    pairs = zip(shape, declared, strict=True)
    return tuple(given if given is not None and _is_unknown(size) else size for size, given in pairs)


def holds_rows(shape: tuple[Dim, ...], rows: RowAxis, tokens: TokenInput) -> bool:
    """Whether the axis ``rows`` can have one row a token: False where its size is known to be another one.

    A flattened tensor whose batches do not lie behind one another shows in this.
    """
    size, length, others = shape[rows.axis], tokens.length, [tokens.batch]
    if rows.flat and tokens.batch is not None:
        length, others = product((tokens.batch, tokens.length)), [tokens.batch, tokens.length]
    if may_be(size, length):
        return True
    if isinstance(size, int) or isinstance(length, int):
        return False
    return not any(other is not None and same_size(size, other) for other in others)


def is_batch_major(value: ir.Value, rows: RowAxis, view: ShapeView, model: ir.Model, tokens: TokenInput) -> bool:
    """Whether the batches of a flattened value lie behind one another, as far as the graph above it tells.

    A model that works on ``[S, B, H]`` flattens the other way: the rows of one batch row are B apart.
    """
    pending, seen = [(value, rows)], {value}
    while pending and len(seen) < _MAX_VALUES:
        current, at = pending.pop(0)
        node = current.producer()
        shape = view.shape(current)
        if not at.flat:
            return shape is None or holds_rows(shape, at, tokens)
        lifted = None if node is None else lift(node, current.index() or 0, at, view, model)
        if node is None or lifted is None or isinstance(lifted, Blocked):
            continue
        for index, need in lifted.rows.items():
            item = node.inputs[index]
            if item is not None and item not in seen:
                seen.add(item)
                pending.append((item, need))
    return True


def batch_axis_of(shape: tuple[Dim, ...], rows: RowAxis, tokens: TokenInput) -> int | None:
    """Where a tensor with a row axis carries the batch; None where its rows are the same for all batches."""
    if tokens.batch is None or rows.flat:
        return None
    near = [axis for axis in (rows.axis - 1, rows.axis + 1) if 0 <= axis < len(shape)]
    if len(shape) > 3 and rows.axis > 1:
        # [B, H, S, D]: there may be as many heads as batch rows.
        near.insert(0, 0)
    far = [axis for axis in range(len(shape)) if axis not in near and axis != rows.axis]
    # A size that nobody knows may be 1: it is not taken for the batch.
    batches = (tokens.batch, *tokens.batch_aliases)
    return next((axis for axis in (*near, *far) if any(same_size(shape[axis], size) for size in batches)), None)


def merges_batch(shape: tuple[Dim, ...], rows: RowAxis, tokens: TokenInput) -> bool:
    """Whether the axis in front of the rows holds the batch together with something else: ``[B*H, S, D]``."""
    if tokens.batch is None or rows.flat or rows.axis != 1:
        return False
    size = shape[0]
    if isinstance(size, int) or isinstance(tokens.batch, int):
        return (
            isinstance(size, int) and isinstance(tokens.batch, int) and size > tokens.batch and not size % tokens.batch
        )
    return len(size.terms) == 1 and product((tokens.batch, size.terms[0][1])) == size


def selector_above(output: ir.Value, view: ShapeView, tokens: TokenInput) -> str | None:
    """The node above ``output`` that picks some of the rows, for a message; None where none is near."""
    pending, seen = [output], set[object]()
    while pending and len(seen) < _MAX_NODES:
        value = pending.pop(0)
        node = value.producer()
        shape = view.shape(value)
        if node is None or node in seen or (shape is not None and locate_rows(shape, tokens)):
            continue
        seen.add(node)
        pending += [inner.outputs[value.index() or 0] for inner in subgraphs(node) if is_op(node, "If")]
        for item in node.inputs:
            if item is None or item.is_initializer():
                continue
            before = view.shape(item)
            if is_op(node, *_SELECTORS) and before is not None and locate_rows(before, tokens):
                return f"{node.op_type} node {node.name!r}" if node.name else f"the {node.op_type} of {value.name!r}"
            pending.append(item)
    return None
