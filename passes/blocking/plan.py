"""How a site is divided, and what a site allows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np

from graphsurgery.analysis.slices import runs_along
from graphsurgery.patterns.matcher import is_op, readers

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.editing.spans import Span
    from graphsurgery.patterns.attention.masks import Mask
    from graphsurgery.patterns.attention.sites import AttentionSite

__all__ = ["BlockPlan", "Heads", "State", "keys_blockable", "row_guards", "unclear_operand"]


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """How one site is divided.

    Attributes:
        q_blocks: number of query blocks.
        kv_blocks: number of key blocks.
        head_blocks: number of head blocks.
        lanes: lanes with running statistics of their own in each key block.
        q_block_size: rows of a query block where a Loop walks over them; None where they are written out.
        kv_block_size: columns of a key block where a Loop walks over them.
        min_rows: below this many rows an If takes the unblocked path; 0 for no If.
        skip: what becomes of keys that the mask leaves to no row of a query block: ``trim`` reads only those from the
            first to the last that is needed; ``if`` does not compute a key block without a needed one, ``where``
            computes it and discards it; ``none``.
        fold: whether query heads of a group are folded into rows.
        mask: the mask that tells which keys are needed; None where nothing may be dropped.
    """

    q_blocks: int = 1
    kv_blocks: int = 1
    head_blocks: int = 1
    lanes: int = 1
    q_block_size: int | None = None
    kv_block_size: int | None = None
    min_rows: int = 0
    skip: Literal["none", "trim", "if", "where"] = "none"
    fold: bool = True
    mask: Mask | None = None


@dataclasses.dataclass
class State:
    """A running softmax: maximum ``[B, H, s, 1]``, sum ``[B, H, s, 1]`` and weighted values ``[B, H, s, Dv]``."""

    maximum: ir.Value
    total: ir.Value
    weighted: ir.Value | None

    def parts(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """What a Loop carries."""
        assert self.weighted is not None
        return self.maximum, self.total, self.weighted


@dataclasses.dataclass(frozen=True)
class Heads:
    """A block of query heads, and the key heads that serve it.

    Attributes:
        span: the query heads.
        whole: whether that is all of them.
        groups: first and last (exclusive) key head, where every query head of the block has one of its own group.
        repeats: query heads for each of these key heads.
        gather: key head of each query head, where groups are cut by the block; empty otherwise.
    """

    span: Span
    whole: bool
    groups: tuple[int, int] | None
    repeats: int
    gather: tuple[int, ...] = ()


def unclear_operand(site: AttentionSite, view: ShapeView, *, columns: bool) -> str | None:
    """Why an operand of the chain cannot be cut to blocks; None where all can.

    Args:
        site: the attention.
        view: shapes around it.
        columns: whether blocks take some of the keys. A mask whose columns have a name of their own is as long as the
            keys, or is broadcast over them: all of it serves where all keys are taken.
    """
    for value in site.chain_operands():
        shape = view.shape(value)
        if shape is None:
            return f"the shape of {value.name!r} is not known"
        sides = ((-1, site.total, "keys"), (-2, site.length, "queries"))
        for axis, length, what in sides:
            size = shape[axis] if len(shape) >= -axis else 1
            if what == "keys" and not columns and not isinstance(size, int):
                continue
            if size != 1 and not runs_along(size, length) and not (site.sink is not None and value is site.sink.value):
                return f"{value.name!r} has {size} positions where there are {length} {what}"
    return None


def row_guards(site: AttentionSite) -> tuple[ir.Node, ...]:
    """The Where behind each value product that replaces rows without an attended key; none where they are unlike."""
    found = [_row_guard(site, item.node.outputs[0]) for item in site.value_products]
    guards = tuple(guard for guard in found if guard is not None)
    if len(guards) != len(found):
        return ()
    first, *others = ([item for item in guard.inputs if item not in site.attended] for guard in guards)
    return guards if all(inputs == first for inputs in others) else ()


def _row_guard(site: AttentionSite, output: ir.Value) -> ir.Node | None:
    following = readers(output)
    if len(following) != 1 or output.is_graph_output() or not is_op(following[0], "Where"):
        return None
    guard = following[0]
    position = next(index for index, item in enumerate(guard.inputs) if item is output)
    other = guard.inputs[3 - position] if position else None
    number = site.body.constant(other)
    return guard if number is not None and number.size == 1 else None


def keys_blockable(site: AttentionSite) -> str | None:
    """Why the keys of ``site`` cannot be blocked; None where they can."""
    allowed = {site.sink.join, site.sink.cut} if site.sink else set()
    behind_join = False
    for node in site.chain:
        if site.sink is not None and node is site.sink.join:
            behind_join = True
            continue
        if node in site.stabiliser:
            continue
        if behind_join:
            return f"node {node.name!r} ({node.op_type}) changes scores and sink together"
        if is_op(node, "ReduceMax", "Concat"):
            return f"node {node.name!r} ({node.op_type}) works along the keys"
    for node in site.tail:
        # A Reshape in the tail only puts batch and heads on one axis: the recogniser takes no other.
        if node in allowed or is_op(node, "Cast", "CastLike", "Identity", "IsNaN", "Reshape"):
            continue
        if is_op(node, "Dropout") and len(node.inputs) < 3:
            continue
        if is_op(node, "Where") and _is_zero(node.inputs[1], site.body):
            continue
        return f"node {node.name!r} ({node.op_type}) works on the probabilities"
    return None


def _is_zero(value: ir.Value | None, body: Body) -> bool:
    number = body.constant(value)
    return number is not None and bool(np.all(number == 0))
