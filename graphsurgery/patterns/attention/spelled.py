"""Attention in spellings of their own: products written as Einsum or with an operand turned, keys times queries, queries
in groups on five axes, a softmax by hand or over another axis than the last.

What these say is what a MatMul on ``[B, H, S, D]``, a Softmax and a MatMul say; here it is read how each operand has
its axes, so that a pass can write it so. Nothing is taken that a plain reading would have taken.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

from graphsurgery.analysis.constants import const_ints
from graphsurgery.patterns.attention.climbing import MAX_CHAIN, chain_above
from graphsurgery.patterns.attention.products import is_product
from graphsurgery.patterns.attention.sites import FusedAttention
from graphsurgery.patterns.matcher import is_op, readers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.shapes import ShapeView

__all__ = ["SpelledAttention", "SpelledProduct", "axes_behind", "is_softmax_by_hand", "read_spelled"]

_CHAIN = frozenset({
    "Transpose", "Add", "Sub", "Mul", "Div", "Tanh", "Where", "Cast", "CastLike", "Identity", "Clip", "Max", "Min", "Neg", "Dropout",
})  # fmt: skip
_TAIL = frozenset({"Cast", "CastLike", "Identity", "Dropout", "Transpose"})
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class SpelledProduct:
    """A product of two operands.

    Attributes:
        node: MatMul, FusedMatMul or Einsum.
        left: the operand with the queries: the queries themselves, or the probabilities.
        right: the keys or values.
        left_axes: one letter for each axis of ``left``.
        right_axes: the same of ``right``.
        result_axes: the same of the result.
        scale: what the product itself multiplies by.
    """

    node: ir.Node
    left: ir.Value
    right: ir.Value
    left_axes: str
    right_axes: str
    result_axes: str
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpelledAttention(FusedAttention):
    """An attention that is to be written anew before it can be blocked; ``node`` is the value product.

    Attributes:
        scores: the score product; its result is ``[B, H, S, T]`` in any order, or ``[B, G, R, S, T]``.
        chain: the nodes from the scores to the softmax, both excluded, in execution order.
        softmax: the last node of the softmax, by which the probabilities are known.
        softmax_input: what the softmax is taken of.
        tail: the nodes from the softmax to the value product, both excluded.
        values: the value product.
        groups: G and R where the heads are two axes; None where they are one.
    """

    scores: SpelledProduct
    chain: tuple[ir.Node, ...]
    softmax: ir.Node
    softmax_input: ir.Value
    tail: tuple[ir.Node, ...]
    values: SpelledProduct
    groups: tuple[int, int] | None


def is_softmax_by_hand(node: ir.Node, view: ShapeView) -> bool:
    """Whether ``node`` divides exponentials by their sum along the last axis, the maximum subtracted before."""
    return _by_hand(node, view) is not None


def _by_hand(node: ir.Node, view: ShapeView) -> ir.Value | None:
    """What the softmax that ends in ``node`` is taken of."""
    if not is_op(node, "Div") or len(node.inputs) != 2:
        return None
    above, total = node.inputs
    power = above.producer() if above is not None else None
    added = total.producer() if total is not None else None
    if not is_op(power, "Exp") or not is_op(added, "ReduceSum") or added is None or power is None:
        return None
    shifted = power.inputs[0].producer() if power.inputs[0] is not None else None
    if added.inputs[0] is not above or not _over_last(added, view) or shifted is None or not is_op(shifted, "Sub"):
        return None
    source, maximum = shifted.inputs
    reduced = maximum.producer() if maximum is not None else None
    if source is None or not is_op(reduced, "ReduceMax") or reduced is None or reduced.inputs[0] is not source:
        return None
    return source if _over_last(reduced, view) else None


def _over_last(node: ir.Node, view: ShapeView) -> bool:
    """Whether a reduction keeps its last axis, which it reduces, as one of size 1."""
    keeps, given = node.attributes.get("keepdims"), node.attributes.get("axes")
    if keeps is not None and keeps.as_int() != 1:
        return False
    axes = tuple(given.as_ints()) if given is not None else const_ints(node.inputs[1]) if len(node.inputs) > 1 else None
    rank = view.rank(node.outputs[0])
    return axes is not None and rank is not None and len(axes) == 1 and axes[0] % rank == rank - 1


def read_spelled(last: ir.Node, number: int, layer: int | None, body: Body) -> SpelledAttention | None:
    """The attention around the softmax that ends in ``last``; None where it is none of these spellings."""
    view = body.view
    source = last.inputs[0] if is_op(last, "Softmax") else _by_hand(last, view)
    rank = view.rank(last.outputs[0])
    if source is None or rank not in (4, 5):
        return None
    axis = _softmax_axis(last, rank, body) if is_op(last, "Softmax") else rank - 1
    found, down = _up(source), _down(last)
    if axis is None or found is None or down is None:
        return None
    (scores, chain), (tail, product) = found, down
    if any(node.graph is not last.graph for node in (scores, *chain, *tail, product)):
        return None
    turned = any(is_op(node, "Transpose") for node in (*chain, *tail))
    order = axes_behind(chain, scores.outputs[0], tuple(range(rank))).get(source)
    if order is None or (turned and rank == 5):
        return None
    score_product = _score_product(scores, rank, order[axis], view)
    if score_product is None:
        return None
    axes = score_product.result_axes
    by_softmax = "".join(axes[place] for place in order)
    weights = (tail or (last,))[-1].outputs[0]
    in_tail = axes_behind(tail, last.outputs[0], tuple(by_softmax))
    value_product = _value_product(product, weights, "".join(in_tail[weights]), view)
    if value_product is None:
        return None
    groups = None
    if rank == 5:
        sizes = [view.dim(scores.outputs[0], axis) for axis in (1, 2)]
        numbers = [size for size in sizes if isinstance(size, int)]
        if len(numbers) != 2 or not all(_fits(value, numbers, view) for value in _outside(scores, chain)):
            return None
        groups = (numbers[0], numbers[1])
    elif (turned or axes != "bhst") and not all(view.rank(value) is not None for value in _outside(scores, chain)):
        return None
    plain = (
        is_op(last, "Softmax") and not turned and _is_plain(score_product, "bhsd") and _is_plain(value_product, "bhst")
    )
    if plain or _read_elsewhere((scores, *chain, *_softmax_nodes(last), *tail), product):
        return None
    return SpelledAttention(
        id=f"attention:{number}",
        kinds=("attention", "spelled", "full"),
        layer=layer,
        node=product,
        operator="attention of a spelling of its own",
        query=score_product.left,
        past=None,
        body=body,
        scores=score_product,
        chain=chain,
        softmax=last,
        softmax_input=source,
        tail=tail,
        values=value_product,
        groups=groups,
    )


def axes_behind(nodes: Sequence[ir.Node], start: ir.Value, axes: tuple[T, ...]) -> dict[ir.Value, tuple[T, ...]]:
    """What each axis of ``start`` is called, followed through ``nodes``, which are element by element or transpose."""
    known = {start: axes}
    for node in nodes:
        through = next((item for item in node.inputs if item in known), None)
        if through is None:
            continue
        order = known[through]
        if is_op(node, "Transpose"):
            perm = node.attributes.get("perm")
            places = perm.as_ints() if perm is not None else range(len(order) - 1, -1, -1)
            order = tuple(order[place] for place in places)
        known[node.outputs[0]] = order
    return known


def _is_plain(product: SpelledProduct, left: str) -> bool:
    """Whether a product is written as the plain reading takes it: no Einsum, its left operand as it is."""
    return not is_op(product.node, "Einsum") and product.left_axes == left and product.node.inputs[0] is product.left


def _softmax_axis(node: ir.Node, rank: int, body: Body) -> int | None:
    """The axis that a Softmax runs over; None where each call chooses it, or where it runs over the rest of them."""
    attribute = node.attributes.get("axis")
    if attribute is not None and attribute.is_ref():
        return None
    by_axis = (node.version or body.opset) >= 13
    axis = (attribute.as_int() if attribute is not None else -1 if by_axis else 1) % rank
    return axis if by_axis or axis == rank - 1 else None


def _softmax_nodes(last: ir.Node) -> tuple[ir.Node, ...]:
    if is_op(last, "Softmax"):
        return (last,)
    power, added = (item.producer() for item in last.inputs if item is not None)
    assert power is not None
    assert added is not None
    shifted = power.inputs[0].producer() if power.inputs[0] is not None else None
    assert shifted is not None
    maximum = shifted.inputs[1].producer() if shifted.inputs[1] is not None else None
    assert maximum is not None
    return (maximum, shifted, power, added, last)


def _up(source: ir.Value) -> tuple[ir.Node, tuple[ir.Node, ...]] | None:
    """The score product, and the nodes of one operand chain between it and the softmax, in execution order."""
    products, chain = chain_above(source, _is_product, lambda node: not node.domain and node.op_type in _CHAIN)
    return (products[0], chain) if len(products) == 1 else None


def _down(last: ir.Node) -> tuple[tuple[ir.Node, ...], ir.Node] | None:
    """The nodes behind the softmax, and the product with the values."""
    tail: list[ir.Node] = []
    value = last.outputs[0]
    while len(tail) < MAX_CHAIN:
        following = readers(value)
        if len(following) != 1 or value.is_graph_output():
            return None
        node = following[0]
        if _is_product(node):
            return tuple(tail), node
        if node.domain or node.op_type not in _TAIL or node.inputs[0] is not value:
            return None
        tail.append(node)
        value = node.outputs[0]
    return None


def _is_product(node: ir.Node) -> bool:
    return is_product(node) or is_op(node, "Einsum")


def _letters(node: ir.Node, view: ShapeView) -> tuple[str, str, str] | None:
    """A letter for each axis of both operands and of the result of a product of two, each letter once in each."""
    if len(node.inputs) != 2 or any(item is None for item in node.inputs):
        return None
    if not is_op(node, "Einsum"):
        return _letters_of_product(node, view)
    attribute = node.attributes.get("equation")
    if attribute is None or attribute.is_ref():
        return None
    text = attribute.as_string().replace(" ", "")
    operands, arrow, result = text.partition("->")
    left, comma, right = operands.partition(",")
    if not arrow or not comma or not (left + right + result).isalpha():
        return None
    if any(len(set(part)) != len(part) for part in (left, right, result)):
        return None
    return left, right, result


def _letters_of_product(node: ir.Node, view: ShapeView) -> tuple[str, str, str] | None:
    """The same of a MatMul or FusedMatMul whose operands have equally many axes."""
    ranks = {view.rank(item) for item in node.inputs if item is not None}
    if len(ranks) != 1 or (rank := ranks.pop()) is None or not 3 <= rank <= 5:
        return None
    batch = "abc"[: rank - 2]
    names = ("transA", "transB", "transBatchA", "transBatchB")
    if any(name in node.attributes and node.attributes[name].is_ref() for name in names):
        return None
    turned = {name: name in node.attributes and bool(node.attributes[name].as_int()) for name in names}
    sides = []
    for last, side in ((("m", "k"), "A"), (("k", "n"), "B")):
        row, column = last[::-1] if turned[f"trans{side}"] else last
        # With transBatch the first axis is the rows', and those of the batch follow.
        sides.append(row + batch + column if turned[f"transBatch{side}"] else batch + row + column)
    return sides[0], sides[1], batch + "mn"


def _renamed(parts: tuple[str, str, str], names: dict[str, str]) -> tuple[str, str, str] | None:
    if any(letter not in names for part in parts for letter in part):
        return None
    left, right, result = ("".join(names[letter] for letter in part) for part in parts)
    return left, right, result


def _scale(node: ir.Node) -> float:
    alpha = node.attributes.get("alpha")
    return 1.0 if alpha is None else alpha.as_float()


def _score_product(node: ir.Node, rank: int, axis: int, view: ShapeView) -> SpelledProduct | None:
    """The score product with its axes by letters: of batch, heads, rows s, keys t (``axis``) and features d."""
    first, second = node.inputs[0], node.inputs[1]
    parts = _letters(node, view)
    if parts is None or first is None or second is None or len(parts[2]) != rank:
        return None
    left, right, result = parts
    summed = [letter for letter in left if letter not in result]
    if len(summed) != 1 or summed[0] not in right or (rank == 5 and axis != 4):
        return None
    if rank == 5:
        names = dict(zip(result, "bkgst", strict=True))
    else:
        both = [letter for letter in result if letter in left and letter in right]
        rows = [letter for letter in result if letter not in both and letter != result[axis]]
        if len(both) != 2 or len(rows) != 1:
            return None
        names = {both[0]: "b", both[1]: "h", rows[0]: "s", result[axis]: "t"}
    renamed = _renamed(parts, names | {summed[0]: "d"})
    if renamed is None:
        return None
    left, right, result = renamed
    if "t" in left and "s" in right:
        left, right, first, second = right, left, second, first
    shared = {"b", "k"} if rank == 5 else {"b", "h"}
    every_head = rank == 5 and not is_op(node, "Einsum")
    if set(left) != {*result, "d"} - {"t"} or set(right) != shared | {"d", "t"} | ({"g"} if every_head else set()):
        return None
    if not _is_static(view.dim(first, left.index("d"))):
        return None
    return SpelledProduct(node, first, second, left, right, result, _scale(node))


def _value_product(node: ir.Node, weights: ir.Value, axes: str, view: ShapeView) -> SpelledProduct | None:
    """The value product with its axes by the letters of ``axes`` and ``d``, now the features of the values."""
    first, second = node.inputs[0], node.inputs[1]
    parts = _letters(node, view)
    if parts is None or first is None or second is None:
        return None
    left, right, result = parts
    if second is weights and first is not weights:
        left, right, first, second = right, left, second, first
    if first is not weights or len(left) != len(axes):
        return None
    names = dict(zip(left, axes, strict=True))
    own = [letter for letter in right if letter not in names]
    if len(own) != 1:
        return None
    renamed = _renamed((left, right, result), names | {own[0]: "d"})
    if renamed is None:
        return None
    left, right, result = renamed
    shared = {"b", "k"} if len(axes) == 5 else {"b", "h"}
    every_head = len(axes) == 5 and not is_op(node, "Einsum")
    wanted = shared | {"d", "t"} | ({"g"} if every_head else set())
    if set(right) != wanted or set(result) != {*axes, "d"} - {"t"}:
        return None
    if not _is_static(view.dim(second, right.index("d"))):
        return None
    return SpelledProduct(node, first, second, left, right, result, _scale(node))


def _is_static(size: object) -> bool:
    return isinstance(size, int)


def _outside(scores: ir.Node, chain: tuple[ir.Node, ...]) -> list[ir.Value]:
    inside = {output for node in (scores, *chain) for output in node.outputs}
    return [item for node in chain for item in node.inputs if item is not None and item not in inside]


def _fits(value: ir.Value, groups: list[int], view: ShapeView) -> bool:
    """Whether an operand beside scores on five axes can have its two axes of heads made one."""
    shape = view.shape(value)
    if shape is None or len(shape) > 5:
        return False
    if len(shape) < 3 or all(size == 1 for size in shape[-4:-2]):
        return True
    return len(shape) >= 4 and list(shape[-4:-2]) == groups and all(isinstance(size, int) for size in shape)


def _read_elsewhere(nodes: tuple[ir.Node, ...], product: ir.Node) -> bool:
    """Whether anything else reads what is made on the way."""
    inside = {*nodes, product}
    return any(
        value.is_graph_output()
        or any(reader not in inside and not is_op(reader, "Shape", "Size") for reader in readers(value))
        for node in nodes
        for value in node.outputs
    )
