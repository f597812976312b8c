"""Route weights spread over all experts: ``[T, E]``, zero (or what becomes zero) for those that were not chosen.

A dense block runs every expert on every token and lets the weights pick. It may run the chosen ones only if the
others add exactly nothing; that is worked out on the body itself, not assumed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.analysis.constants import const_int, const_ints, const_scalar, constant_of
from graphsurgery.patterns.experts.contents import Numbers, OneHot
from graphsurgery.patterns.experts.index_numbers import is_filled, reduced_axes
from graphsurgery.patterns.experts.rows import ELEMENTWISE
from graphsurgery.patterns.experts.sites import ROUTE_WEIGHT
from graphsurgery.patterns.experts.starts import equation_of
from graphsurgery.patterns.experts.terms import Stack, Step, Term, UnreadableError, label

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.experts.index_numbers import IndexReader
    from graphsurgery.patterns.experts.layout import Labels
    from graphsurgery.patterns.experts.rows import RowReader

__all__ = ["Spread", "SpreadReader", "adds_nothing", "compared", "replace_weight", "unchosen", "without_weight"]

_COMPARISONS = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_NEAR = 24
_EQUATION = (["tak", "tke"], "tae")
"""What a MatMul of three axes computes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Spread:
    """Weights of all experts for each token.

    Attributes:
        term: the weight of one expert, from the route weight; None where it is 1 for those that were chosen.
        root: the chosen experts.
        weights: their weights ``[T, K]``, or with ``by_expert`` those of all, ``[T, E]``; None where all are 1.
        fill: what stands in the place of the route weight for an expert that was not chosen.
        number: the expert whose weights these are; None where all are held.
    """

    term: Term
    root: ir.Value
    weights: ir.Value | None
    fill: float
    number: int | None = None
    by_expert: bool = False


class SpreadReader:
    """Reads route weights that are spread over all experts.

    Attributes:
        met: the choices by which weights are spread, those that cannot be followed among them.
    """

    def __init__(self, shapes: ShapeView, numbers: IndexReader, rows: RowReader) -> None:
        self.met: set[ir.Value] = set()
        self._shapes = shapes
        self._numbers = numbers
        self._rows = rows

    def read(self, value: ir.Value, axes: Labels) -> Spread:
        """What ``value`` holds; ``axes`` says which axis counts the experts (``c``), if any does.

        Raises:
            UnreadableError: it is nothing of the kind.
        """
        node = value.producer()
        if node is None or node.domain:
            raise UnreadableError(f"value {value.name!r} holds no weights that are spread over the experts")
        kind = node.op_type
        lone = self._lone(value, axes)
        if lone is not None:
            return lone
        if kind in ("Identity", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Expand"):
            source = node.inputs[0]
            above = self._rows.arranged(node, value, axes)
            if source is None or above is None:
                raise UnreadableError(f"{label(node)} arranges weights in a way that cannot be followed")
            return self.read(source, above)
        if kind == "ScatterElements":
            return self._scattered(node, axes)
        if kind == "ReduceSum":
            return self._summed(node, axes)
        if kind == "Softmax":
            return self._shared_out(node, axes)
        if kind in ("Einsum", "MatMul"):
            return self._multiplied(node, axes)
        if kind in ELEMENTWISE:
            return self._computed(node, axes)
        if kind == "Gather" and node.inputs[0] is not None and self._is_select(node):
            attribute, rank = node.attributes.get("axis"), len(axes) + 1
            axis = (0 if attribute is None else attribute.as_int()) % rank
            return self.read(node.inputs[0], (*axes[:axis], "1", *axes[axis:]))
        if kind in ("Gather", "Slice", "Split"):
            return self._column(node, value, axes)
        raise UnreadableError(f"{label(node)} spreads weights in a way that cannot be followed")

    def _lone(self, value: ir.Value, axes: Labels) -> Spread | None:
        """Whether one expert is the one that was chosen: a mask that no sum over choices is needed for."""
        content = self._numbers.content(value)
        if isinstance(content, OneHot) and self._numbers.top_k(content.root) == 1:
            held = [("c" if name == "e" else name) for name in content.axes if name not in "c1"]
            if (
                held == [name for name in axes if name != "1"]
                and self._shapes.dim(value, content.axes.index("e")) == content.experts
            ):
                return Spread(None, content.root, None, 0.0)
        if not isinstance(content, Numbers) or content.kind != "chosen" or content.space is not None:
            return None
        if self._numbers.top_k(content.root) != 1 or np.count_nonzero(content.samples) != 1 or "c" in axes:
            return None
        if [name for name in content.axes if name not in "c1"] != [name for name in axes if name != "1"]:
            return None
        return Spread(None, content.root, None, 0.0, _only(content.samples))

    def _scattered(self, node: ir.Node, axes: Labels) -> Spread:
        base, index, updates = node.inputs
        axis = node.attributes.get("axis")
        place = 0 if axis is None else axis.as_int()
        numbers = self._numbers.chosen(index)
        if numbers is not None:
            self.met.add(numbers.root)
        plain = ("t", "c") if len(axes) == 2 else ("b", "s", "c")
        if numbers is None or axes != plain or place % len(axes) != len(axes) - 1 or numbers.axes != plain:
            raise UnreadableError(f"{label(node)} puts weights where that cannot be followed")
        experts = self._shapes.dim(node.outputs[0], -1)
        fill = self._filled(base)
        reduction = node.attributes.get("reduction")
        added = reduction is not None and reduction.as_string() == "add"
        if reduction is not None and reduction.as_string() not in ("none", "add"):
            raise UnreadableError(f"{label(node)} reduces weights by {reduction.as_string()!r}")
        if not isinstance(experts, int) or not self._numbers.identity(numbers, experts) or fill is None:
            raise UnreadableError(f"{label(node)} puts weights where that cannot be followed")
        if not self._numbers.distinct(numbers.root):
            raise UnreadableError(f"{numbers.root.name!r} may choose an expert twice for a token")
        assert updates is not None
        if added and fill != 0:
            raise UnreadableError(f"{label(node)} adds to what is not zero")
        if is_filled(updates, 1):
            return Spread(None, numbers.root, None, 1.0 if fill == 1 else fill)
        return Spread(ROUTE_WEIGHT, numbers.root, updates, fill)

    def _shared_out(self, node: ir.Node, axes: Labels) -> Spread:
        """A softmax over all experts, of which those that were not chosen have scores of minus infinity."""
        axis, source = node.attributes.get("axis"), node.inputs[0]
        place = len(axes) - 1 if axis is None and len(axes) == 2 else -2 if axis is None else axis.as_int()
        if source is None or place % len(axes) != len(axes) - 1 or axes not in (("t", "c"), ("b", "s", "c")):
            raise UnreadableError(f"{label(node)} gives weights in another arrangement than [T, E]")
        found = self.read(source, axes)
        if found.number is not None or unchosen(found) != -np.inf:
            raise UnreadableError(f"{label(node)} shares weights among experts that were not chosen too")
        return dataclasses.replace(found, term=ROUTE_WEIGHT, weights=node.outputs[0], fill=0.0, by_expert=True)

    def _is_select(self, node: ir.Node) -> bool:
        """Whether a Gather only takes away an axis of one element."""
        attribute = node.attributes.get("axis")
        axis = 0 if attribute is None else attribute.as_int()
        return self._shapes.rank(node.inputs[1]) == 0 and self._shapes.dim(node.inputs[0], axis) == 1  # type: ignore[arg-type]

    def _column(self, node: ir.Node, value: ir.Value, axes: Labels) -> Spread:
        """The weights of one expert among those of all."""
        source, attribute = node.inputs[0], node.attributes.get("axis")
        rank = self._shapes.rank(source) if source is not None else None
        axis, place, kept = (0 if attribute is None else attribute.as_int()), None, True
        if node.op_type == "Gather":
            place, kept = const_int(node.inputs[1]), self._shapes.rank(value) == rank
        elif node.op_type == "Split" and self._shapes.dim(value, axis) == 1:
            place = node.outputs.index(value)
        elif node.op_type == "Slice" and len(node.inputs) > 3:
            taken, start = const_ints(node.inputs[3]), const_ints(node.inputs[1])
            if taken is not None and start is not None and len(taken) == len(start) == 1:
                axis, place = taken[0], start[0] if self._shapes.dim(value, taken[0]) == 1 else None
        if source is None or rank is None or place is None:
            raise UnreadableError(f"{label(node)} takes weights in a way that cannot be followed")
        axis %= rank
        experts = self._shapes.dim(source, axis)
        if kept and axes[axis] != "1":
            raise UnreadableError(f"{label(node)} takes the weights of something else than an expert")
        above = (*axes[:axis], "c", *axes[axis + kept :])
        found = self.read(source, above)
        if found.number is not None or not isinstance(experts, int):
            raise UnreadableError(f"{label(node)} takes weights in a way that cannot be followed")
        return dataclasses.replace(found, number=place + experts if place < 0 else place)

    def _filled(self, base: ir.Value | None) -> float | None:
        for number in (0.0, -np.inf):
            if is_filled(base, number):
                return float(number)
        return filled_with(base)

    def _summed(self, node: ir.Node, axes: Labels) -> Spread:
        """The sum over the choices of weights that are zero for every choice but that of the expert."""
        source = node.inputs[0]
        rank = self._shapes.rank(source) if source is not None else None
        reduced = reduced_axes(node)
        product = source.producer() if source is not None else None
        if reduced is None or len(reduced) != 1 or rank is None or product is None or product.domain:
            raise UnreadableError(f"{label(node)} sums weights in a way that cannot be followed")
        mask, weights = self._masked(product)
        content = self._numbers.content(mask)
        if isinstance(content, OneHot):
            wanted = content.axes
            number = None
        elif isinstance(content, Numbers) and content.kind == "chosen":
            wanted = content.axes
            number = _only(content.samples)
        else:
            raise UnreadableError(f"{label(node)} sums weights in a way that cannot be followed")
        spread_axes = tuple("k" if name == "c" else "c" if name == "e" else name for name in wanted)
        place = reduced[0] % rank
        if len(spread_axes) != rank or spread_axes[place] != "k":
            raise UnreadableError(f"{label(node)} sums weights along another axis than that of the choices")
        kept = node.attributes.get("keepdims")
        left = ("1",) if kept is None or kept.as_int() else ()
        result = spread_axes[:place] + left + spread_axes[place + 1 :]
        if tuple(name for name in result if name != "1") != tuple(name for name in axes if name != "1"):
            raise UnreadableError(f"{label(node)} gives weights in another arrangement than the rows have")
        if isinstance(content, OneHot) and content.experts != self._shapes.dim(mask, spread_axes.index("c")):  # type: ignore[arg-type]
            raise UnreadableError(f"{label(node)} sums weights in a way that cannot be followed")
        if weights is None:
            return Spread(None, content.root, None, 0.0, number)
        return Spread(ROUTE_WEIGHT, content.root, self._choices(weights), 0.0, number)

    def _multiplied(self, node: ir.Node, axes: Labels) -> Spread:
        """The same sum as a product: ``tke,tk->te``, or ``[T, 1, K]`` times ``[T, K, E]``."""
        equation = _EQUATION if node.op_type == "MatMul" else equation_of(node)
        ranks = [self._shapes.rank(item) if item is not None else None for item in node.inputs]
        if equation is not None and ranks == [len(letters) for letters in equation[0]] and len(ranks) == 2:
            letters, output = equation
            for place in (0, 1):
                mask, weights = node.inputs[place], node.inputs[1 - place]
                content = self._numbers.content(mask)
                if mask is None or weights is None or not isinstance(content, OneHot):
                    continue
                names = {"c": "k", "e": "c"}
                known = dict(zip(letters[place], (names.get(name, name) for name in content.axes), strict=True))
                each = [
                    "1" if self._shapes.dim(weights, axis) == 1 and letter not in known else known.get(letter)
                    for axis, letter in enumerate(letters[1 - place])
                ]
                rows = [name for name in known.values() if name not in ("k", "c", "1")]
                result = [known[letter] for letter in output if letter in known]
                if (
                    [name for name in each if name != "1"] == [*rows, "k"]
                    and "k" not in result
                    and [name for name in result if name != "1"] == [name for name in axes if name != "1"]
                    and content.experts == self._shapes.dim(mask, list(known.values()).index("c"))
                ):
                    return Spread(ROUTE_WEIGHT, content.root, self._choices(weights), 0.0)
        raise UnreadableError(f"{label(node)} sums weights in a way that cannot be followed")

    def _masked(self, product: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
        """The mask and the weights of their product."""
        if product.op_type == "Where" and is_filled(product.inputs[2], 0):
            return product.inputs[0], product.inputs[1]
        if product.op_type == "Mul":
            for place in (0, 1):
                if self._numbers.content(product.inputs[place]) is not None:
                    return product.inputs[place], product.inputs[1 - place]
        if product.op_type in ("Cast", "OneHot", "Identity", "Transpose"):
            return product.outputs[0], None
        raise UnreadableError(f"{label(product)} masks weights in a way that cannot be followed")

    def _choices(self, weights: ir.Value) -> ir.Value:
        """``weights`` as ``[T, K]``."""
        value = weights
        while True:
            shape = self._shapes.shape(value)
            if shape is not None and (len(shape) == 2 or (len(shape) == 3 and 1 not in shape[1:])):
                return value
            node = value.producer()
            if node is None or node.op_type not in ("Unsqueeze", "Reshape", "Expand", "Identity") or not node.inputs[0]:
                raise UnreadableError(f"value {weights.name!r} holds no weight for each (token, choice)")
            value = node.inputs[0]

    def _computed(self, node: ir.Node, axes: Labels) -> Spread:
        """An element-wise function of spread weights, and of constants or of what leaves zero as it is."""
        found: Spread | None = None
        operands: list[Term] = []
        others: list[ir.Value] = []
        for item in node.inputs:
            if item is None or const_scalar(item) is not None:
                operands.append(item)
                continue
            try:
                spread = self.read(item, axes) if found is None else None
            except UnreadableError:
                spread = None
            if spread is None:
                others.append(item)
            else:
                found = spread
                operands.append(spread.term)
        if found is None:
            raise UnreadableError(f"{label(node)} holds no weights that are spread over the experts")
        if not others and found.term is not None:
            return dataclasses.replace(found, term=Step(node, tuple(operands)))
        return self._of_all(node, axes, found, others)

    def _of_all(self, node: ir.Node, axes: Labels, found: Spread, others: list[ir.Value]) -> Spread:
        """Weights of all experts of which those that were not chosen became zero (a mask, and what follows one)."""
        first = node.inputs[0]
        masks = node.op_type == "Mul" or (node.op_type == "Div" and first not in others)
        masks |= node.op_type == "Cast" and not others
        masks |= node.op_type == "Where" and is_filled(node.inputs[2], 0) and first not in others
        if not masks or unchosen(found) != 0:
            raise UnreadableError(f"{label(node)} computes weights from more than one value")
        if found.number is not None and len(others) == 1 and self._numbers.top_k(found.root) == 1:
            sizes = self._shapes.shape(others[0])
            if sizes is not None and len(sizes) == len(axes) and (sizes[-1] == 1 or "1" not in axes):
                return dataclasses.replace(found, term=ROUTE_WEIGHT, weights=others[0], fill=0.0)
        if found.number is not None and not others:
            return found
        if axes not in (("t", "c"), ("b", "s", "c")):
            raise UnreadableError(f"{label(node)} gives weights in another arrangement than [T, E]")
        if not others:
            return found
        return dataclasses.replace(found, term=ROUTE_WEIGHT, weights=node.outputs[0], fill=0.0, by_expert=True)


def compared(value: ir.Value, shapes: ShapeView) -> str | None:
    """That ``value`` weighs experts by comparing their scores with a bound, in words; None where it does not.

    How many experts that leaves is not known: scores that are the same are all in or all out.
    """
    experts = shapes.dim(value, -1)
    pending, seen = [value], {value}
    while pending and len(seen) < _NEAR:
        node = pending.pop(0).producer()
        if node is None or node.domain:
            continue
        if node.op_type in _COMPARISONS and shapes.dim(node.outputs[0], -1) == experts:
            return (
                f"{label(node)} compares scores with a bound for the weights {value.name!r}, so that nothing says how "
                "many experts a token gets"
            )
        if node.op_type in ELEMENTWISE | {"Softmax", "Transpose", "Unsqueeze", "Squeeze", "Reshape", "Identity"}:
            following = [item for item in node.inputs if item is not None and item not in seen]
            seen.update(following)
            pending += following
    return None


def unchosen(spread: Spread) -> float | None:
    """The weight of an expert that was not chosen; None where it is not known."""
    if spread.term is None:
        return spread.fill
    with np.errstate(all="ignore"):
        return _number(spread.term, spread.fill, {})


def filled_with(value: ir.Value | None) -> float | None:
    """The number that every element of ``value`` is, seen through what only repeats it."""
    while value is not None:
        constant = constant_of(value)
        if constant is not None:
            first = constant.reshape(-1)[:1]
            return float(first[0]) if constant.size and bool(np.all(constant == first)) else None
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type == "ConstantOfShape":
            fill = node.attributes.get("value")
            return 0.0 if fill is None else float(fill.as_tensor().numpy().reshape(-1)[0])
        if node.op_type not in ("Reshape", "Unsqueeze", "Squeeze", "Expand", "Tile", "Identity", "Cast", "CastLike"):
            return None
        value = node.inputs[0]
    return None


def _only(samples: np.ndarray) -> int:
    """The one expert for which a mask holds."""
    places = np.nonzero(samples)[0]
    if len(places) != 1 or samples[places[0]] != 1:
        raise UnreadableError("a mask holds for another number of experts than one")
    return int(places[0])


def replace_weight(term: Term, weight: Term) -> Term:
    """``term`` with another route weight."""
    return _replaced(term, weight, {})


def _replaced(term: Term, weight: Term, done: dict[Step, Step]) -> Term:
    if term is ROUTE_WEIGHT:
        return weight
    if not isinstance(term, Step) or not term.per_row:
        return term
    if term not in done:
        operands = tuple(_replaced(item, weight, done) for item in term.operands)
        same = all(new is old for new, old in zip(operands, term.operands, strict=True))
        done[term] = term if same else dataclasses.replace(term, operands=operands)
    return done[term]


def without_weight(term: Term) -> Term:
    """``term`` for a chosen expert, whose weight is 1: nothing is multiplied or masked any more.

    Raises:
        UnreadableError: the mask does something else than that.
    """
    result = _unweighted(term, {})
    pending, seen = [result], set()
    while pending:
        item = pending.pop()
        if item is ROUTE_WEIGHT:
            raise UnreadableError("what masks its experts is computed with")
        if isinstance(item, Step) and item not in seen:
            seen.add(item)
            pending += item.operands
    return result


def _unweighted(term: Term, done: dict[Step, Term]) -> Term:
    if not isinstance(term, Step) or not term.per_row:
        return term
    if term not in done:
        operands = tuple(_unweighted(item, done) for item in term.operands)
        kind = term.node.op_type
        if kind == "Mul" and ROUTE_WEIGHT in operands:
            done[term] = operands[1] if operands[0] is ROUTE_WEIGHT else operands[0]
        elif kind == "Where" and operands[0] is ROUTE_WEIGHT:
            done[term] = operands[1]
        elif kind == "Cast" and operands[0] is ROUTE_WEIGHT:
            done[term] = ROUTE_WEIGHT
        else:
            done[term] = dataclasses.replace(term, operands=operands)
    return done[term]


# ---- what an expert adds that was not chosen ----------------------------------------------------------------------

_UNARY: dict[str, Callable[[float], float]] = {
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Tanh": np.tanh,
    "Relu": lambda x: max(x, 0.0),
    "Exp": np.exp,
    "Sqrt": np.sqrt,
    "Neg": lambda x: -x,
    "Abs": abs,
    "Reciprocal": lambda x: 1 / x,
    "Cast": lambda x: x,
    "Gelu": lambda x: 0.0 if x == 0 else float("nan"),
    "Erf": lambda x: 0.0 if x == 0 else float("nan"),
    "HardSwish": lambda x: 0.0 if x == 0 else float("nan"),
    "Mish": lambda x: 0.0 if x == 0 else float("nan"),
    "Swish": lambda x: 0.0 if x == 0 else float("nan"),
    "QuickGelu": lambda x: 0.0 if x == 0 else float("nan"),
    "Softsign": lambda x: x / (1 + abs(x)),
    "Elu": lambda x: 0.0 if x == 0 else float("nan"),
    "Selu": lambda x: 0.0 if x == 0 else float("nan"),
    "Celu": lambda x: 0.0 if x == 0 else float("nan"),
    "LeakyRelu": lambda x: 0.0 if x == 0 else float("nan"),
}
_KEEPS_ZERO = frozenset({"MatMul", "Slice", "Split", "Gather", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"})


def adds_nothing(term: Term, fill: float | None) -> bool:
    """Whether what ``term`` gives is zero wherever the route weight is ``fill``."""
    if fill is None:
        return False
    with np.errstate(all="ignore"):
        return _number(term, fill, {}) == 0


def _number(term: Term, fill: float, done: dict[Step, float | None]) -> float | None:
    """The number that all elements of ``term`` are; None where that is not known."""
    if term is ROUTE_WEIGHT:
        return fill
    if isinstance(term, Step):
        if term not in done:
            done[term] = _step_number(term, [_number(item, fill, done) for item in term.operands])
        return done[term]
    if term is None or isinstance(term, Stack) or not hasattr(term, "producer"):
        return None
    scalar = const_scalar(term)  # type: ignore[arg-type]
    return None if scalar is None else float(scalar)


def _step_number(step: Step, operands: list[float | None]) -> float | None:
    kind, first = step.node.op_type, operands[0]
    if kind in ("MatMul", "Gemm"):
        # Gemm has a bias, which may be left out.
        added = [number for number, item in zip(operands[2:], step.operands[2:], strict=True) if item is not None]
        return 0.0 if 0 in operands[:2] and all(number == 0 for number in added) else None
    if kind == "Mul":
        if 0 in operands:
            return 0.0
        return None if None in operands else float(np.prod([item for item in operands if item is not None]))
    if kind in ("Add", "Sub", "Max", "Min", "Div") and None not in operands:
        return _binary(kind, [item for item in operands if item is not None])
    if kind == "Div":
        return 0.0 if first == 0 else None
    if kind == "Concat":
        return 0.0 if all(item == 0 for item in operands) else None
    if kind == "Where" and first == 0:
        return operands[2]
    if kind == "Where":
        return operands[1] if operands[1] is not None and operands[1] == operands[2] else None
    if first is None:
        return None
    if kind == "Clip":
        return _clipped(first, operands[1:])
    if kind in _KEEPS_ZERO:
        return 0.0 if first == 0 else None
    function = _UNARY.get(kind)
    return None if function is None else float(function(first))


def _clipped(number: float, limits: list[float | None]) -> float:
    for limit, bound in zip(limits, (max, min), strict=False):
        number = number if limit is None else bound(number, limit)
    return number


def _binary(kind: str, numbers: list[float]) -> float:
    if kind == "Add":
        return float(sum(numbers))
    if kind in ("Max", "Min"):
        return max(numbers) if kind == "Max" else min(numbers)
    left, right = np.float64(numbers[0]), np.float64(numbers[1])
    return float(left - right) if kind == "Sub" else float(left / right)
