"""Integers of an expert block: which expert, which token, which choice, which row.

Exporters compute row numbers with divisions, remainders, comparisons and casts, histograms with scaled floats. What
such a chain gives is worked out on samples: for a number of an expert on all numbers 0..:data:`MAX_EXPERTS` - 1, for the
number of a (token, choice) on the first :data:`TOKENS` tokens; so any spelling is told by what it computes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphsurgery.analysis.constants import const_int, const_ints, constant_of
from graphsurgery.patterns.experts.contents import Bounds, Content, Numbers, OneHot, Pairs, Run, Slots, Space
from graphsurgery.patterns.experts.layout import atoms, regroup, same_axes
from graphsurgery.patterns.matcher import is_op, through

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.experts.layout import Labels

__all__ = [
    "MAX_EXPERTS",
    "TOKENS",
    "IndexReader",
    "is_filled",
    "keeps_no_axis",
    "reduced_axes",
]

MAX_EXPERTS = 4096
TOKENS = 64


_LAYOUT = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Transpose", "Expand", "Tile"})
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Equal": np.equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Max": np.maximum,
    "Min": np.minimum,
}


class IndexReader:
    """Reads what integer values of a graph mean for the expert blocks in it; each value is worked out once."""

    def __init__(self, shapes: ShapeView) -> None:
        self._shapes = shapes
        self._known: dict[ir.Value, Content | None] = {}

    def content(self, value: ir.Value | None) -> Content | None:
        """What ``value`` means; None where it means nothing."""
        if value is None:
            return None
        if value not in self._known:
            self._known[value] = None
            self._known[value] = self._read(value)
        return self._known[value]

    def chosen(self, value: ir.Value | None) -> Numbers | None:
        """``value`` read as numbers of experts: what is computed from such, or the chosen experts themselves."""
        if value is None:
            return None
        known = self.content(value)
        if known is not None:
            return known if isinstance(known, Numbers) and known.kind == "chosen" else None
        return self._root(value)

    def identity(self, numbers: Numbers, experts: int) -> bool:
        """Whether numbers of experts are still the numbers that were chosen."""
        return np.array_equal(numbers.samples[:experts], np.arange(experts))

    def counts(self, numbers: Content | None, label: str) -> bool:
        """Whether numbers of positions count ``tc`` both, ``t`` tokens, ``c`` choices (one choice: both are tokens)."""
        if not isinstance(numbers, Numbers) or numbers.kind != "position":
            return False
        choices = self.top_k(numbers.root)
        positions = np.arange(TOKENS * choices)
        wanted = {"tc": positions, "t": positions // choices, "c": positions % choices}[label]
        return np.array_equal(numbers.samples, wanted)

    def experts_of(self, root: ir.Value) -> int | None:
        """E, from what the experts were chosen among; None where that is not known."""
        node = through(self._all_choices(root)).producer()
        if node is not None and node.op_type == "Concat" and not node.domain and node.inputs:
            # One after the other, each among what the ones before have left.
            rank, axis = self._shapes.rank(node.outputs[0]), _number(node, "axis", -1)
            each = {self.experts_of(item) if item is not None else None for item in node.inputs}
            return each.pop() if len(each) == 1 and rank is not None and axis % rank == rank - 1 else None
        if not self.distinct(root) or node is None or node.inputs[0] is None:
            return None
        size = self._shapes.dim(node.inputs[0], -1)
        return size if isinstance(size, int) else None

    def top_k(self, root: ir.Value) -> int:
        """K."""
        if keeps_no_axis(root):
            return 1
        size = self._shapes.dim(root, -1)
        assert isinstance(size, int)
        return size

    def distinct(self, root: ir.Value) -> bool:
        """Whether no expert is chosen twice for a token."""
        root = self._all_choices(root)
        node = through(root).producer()
        if node is not None and node.op_type == "Concat" and not node.domain:
            return self._one_by_one(node)
        if node is not None and node.op_type == "ArgMax" and not node.domain and node.inputs[0] is not None:
            rank = self._shapes.rank(node.inputs[0])
            return rank is not None and _number(node, "axis", 0) % rank == rank - 1
        if node is None or node.op_type != "TopK" or node.domain or node.outputs[1] is not through(root):
            return False
        axis, rank = node.attributes.get("axis"), self._shapes.rank(root)
        return axis is None or rank is None or axis.as_int() % rank == rank - 1

    def _one_by_one(self, node: ir.Node) -> bool:
        """Whether each of the choices that ``node`` joins is the best of what those before it have left."""
        before: list[ir.Value] = []
        for item in node.inputs:
            choice = through(item) if item is not None else None
            maker = choice.producer() if choice is not None else None
            if choice is None or maker is None or maker.op_type != "ArgMax" or not self.distinct(choice):
                return False
            scores, taken = maker.inputs[0], set[ir.Value]()
            while scores is not None and (mask := scores.producer()) is not None and is_op(mask, "ScatterElements"):
                low = mask.inputs[2].producer() if mask.inputs[2] is not None else None
                filled = constant_of(low.inputs[0] if low is not None and is_op(low, "Expand") else mask.inputs[2])
                if filled is None or not bool(np.all(filled == -np.inf)) or mask.inputs[1] is None:
                    return False
                taken.add(through(mask.inputs[1]))
                scores = mask.inputs[0]
            # What masks the scores otherwise may leave too few of them.
            if scores is None or not set(before) <= taken or is_op(scores.producer(), "Where", "ScatterND"):
                return False
            before.append(choice)
        return bool(before)

    def _all_choices(self, root: ir.Value) -> ir.Value:
        """The choices of a token of which ``root`` is a part: those of the first places, or of one."""
        while True:
            whole = through(root)
            node = whole.producer()
            if node is None or node.domain or node.op_type not in ("Gather", "Slice", "Split"):
                return root
            source = node.inputs[0]
            if source is None or not self._cuts_choices(node, source):
                return root
            root = source

    def _cuts_choices(self, node: ir.Node, source: ir.Value) -> bool:
        """Whether ``node`` takes one place or a row of places of the last axis."""
        rank = self._shapes.rank(source)
        if rank is None:
            return False
        if node.op_type == "Slice":
            axes = const_ints(node.inputs[3]) if len(node.inputs) > 3 else None
            return axes is not None and [axis % rank for axis in axes] == [rank - 1]
        if node.op_type == "Gather" and const_int(node.inputs[1]) is None:
            return False
        return _number(node, "axis", 0) % rank == rank - 1

    # ---- reading --------------------------------------------------------------------------------------------------

    def _root(self, value: ir.Value) -> Numbers | None:
        """``value``, or what it lays out, as the chosen experts."""
        shape, dtype = self._shapes.shape(value), self._shapes.dtype(value)
        if shape is None or dtype not in (ir.DataType.INT64, ir.DataType.INT32) or constant_of(value) is not None:
            return None
        node = value.producer()
        if node is not None and not node.domain and (node.op_type in _LAYOUT or node.op_type == "Cast"):
            source = self.chosen(node.inputs[0])
            laid = self._laid(source, node, value) if source is not None else None
            if laid is not None:
                self._known[value] = laid
                return laid if isinstance(laid, Numbers) else None
        if keeps_no_axis(value) and len(shape) in (1, 2) and self.distinct(value):
            axes: Labels = ("t",) if len(shape) == 1 else ("b", "s")
        elif len(shape) not in (2, 3) or not isinstance(shape[-1], int):
            return None
        else:
            axes = ("t", "c") if len(shape) == 2 else ("b", "s", "c")
        numbers = Numbers(value, "chosen", np.arange(MAX_EXPERTS, dtype=np.int64), axes)
        self._known[value] = numbers
        return numbers

    def _read(self, value: ir.Value) -> Content | None:
        node = value.producer()
        if node is None or node.domain:
            return None
        kind = node.op_type
        if kind in _LAYOUT:
            source = self.content(node.inputs[0])
            return self._laid(source, node, value) if source is not None else None
        rule = getattr(self, f"_read_{kind.lower()}", None)
        if rule is not None:
            found: Content | None = rule(node, value)
            return found
        if kind in _BINARY or kind in ("Div", "Mod", "Not", "Clip", "Floor", "Trunc", "Where", "Neg"):
            return self._computed(node)
        return None

    def _laid(self, source: Content, node: ir.Node, value: ir.Value) -> Content | None:
        if node.op_type in ("Identity", "Cast"):
            return self._cast(source, node)
        if isinstance(source, Bounds):
            return source
        axes = self._laid_axes(source, node, value)
        return None if axes is None else dataclasses.replace(source, axes=axes)

    def _cast(self, source: Content, node: ir.Node) -> Content:
        if node.op_type == "Identity" or not isinstance(source, Numbers):
            return source
        dtype = ir.DataType(node.attributes["to"].as_int()).numpy()
        return dataclasses.replace(source, samples=source.samples.astype(dtype))

    def _laid_axes(self, source: Content, node: ir.Node, value: ir.Value) -> Labels | None:
        assert not isinstance(source, Bounds)
        axes = source.axes
        before, after = self._shapes.shape(node.inputs[0]), self._shapes.shape(value)  # type: ignore[arg-type]
        if before is None or after is None or len(before) != len(axes):
            return None
        if node.op_type == "Transpose":
            order = node.attributes.get("perm")
            moved = order.as_ints() if order is not None else range(len(axes))[::-1]
            return tuple(axes[place] for place in moved)
        if node.op_type in ("Expand", "Tile"):
            # Only what repeats nothing: a repetition along the features is the business of a ScatterElements.
            padded = ("1",) * (len(after) - len(axes)) + tuple(axes)
            sizes = (1,) * (len(after) - len(before)) + tuple(before)
            return tuple(
                "1" if size == 1 and wide != 1 else name for name, size, wide in zip(padded, sizes, after, strict=True)
            )
        places = const_ints(node.inputs[1]) if node.op_type == "Unsqueeze" and len(node.inputs) > 1 else None
        if places is not None:
            added, rest = {place % len(after) for place in places}, iter(axes)
            return tuple("1" if place in added else next(rest) for place in range(len(after)))
        return regroup(axes, before, after, self.top_k(source.root))

    def _computed(self, node: ir.Node) -> Content | None:
        found: Numbers | None = None
        operands: list[Any] = []
        compares = node.op_type in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
        for item in node.inputs:
            content = self.content(item)
            if content is None and compares:
                content = self.chosen(item)
            if isinstance(content, Numbers):
                if found is not None and (content.kind != found.kind or content.space != found.space):
                    return None
                if found is not None and (content.root is not found.root or not same_axes(content.axes, found.axes)):
                    return None
                found = found or content
                operands.append(content.samples)
                continue
            if content is not None:
                return None
            constant = self._constant(item)
            if item is not None and (constant is None or constant.size != 1):
                return self._against_experts(node)
            operands.append(None if constant is None else constant.reshape(-1)[0])
        if found is None:
            return None
        with np.errstate(all="ignore"):
            samples = _evaluate(node, operands)
        return None if samples is None else dataclasses.replace(found, samples=samples)

    def _constant(self, value: ir.Value | None) -> np.ndarray | None:
        if value is None:
            return None
        constant = constant_of(value)
        known = self._shapes.shape_value(value) if constant is None else None
        ints = known.ints() if known is not None else None
        return constant if ints is None else np.asarray(ints, dtype=np.int64)

    def _against_experts(self, node: ir.Node) -> Content | None:
        """``Equal`` of the chosen experts and all numbers 0..E-1 along an axis of its own."""
        if node.op_type != "Equal" or len(node.inputs) != 2:
            return None
        first, second = node.inputs
        for left, right in ((first, second), (second, first)):
            numbers, every = self.chosen(left), constant_of(right)
            if numbers is None or every is None:
                continue
            count = every.size
            rank = len(self._shapes.shape(node.outputs[0]) or ())
            spread = next((place for place, size in enumerate(every.shape[::-1]) if size == count), None)
            if spread is None or not np.array_equal(every.reshape(-1), np.arange(count)):
                return None
            axes = ["1"] * (rank - len(numbers.axes)) + list(numbers.axes)
            if axes[rank - 1 - spread] != "1" or not self.identity(numbers, count):
                return None
            axes[rank - 1 - spread] = "e"
            return OneHot(numbers.root, tuple(axes), count)
        return None

    def _read_cast(self, node: ir.Node, _: ir.Value) -> Content | None:
        source = self.content(node.inputs[0])
        return None if source is None else self._cast(source, node)

    def _read_topk(self, node: ir.Node, value: ir.Value) -> Content | None:
        """A full sort of the chosen experts, or of the positions that such a sort gave."""
        source = node.inputs[0]
        if source is None or self._shapes.dtype(source) not in (ir.DataType.INT64, ir.DataType.INT32):
            return None
        largest = node.attributes.get("largest")
        if self._shapes.shape(source) != self._shapes.shape(value) or largest is None or largest.as_int():
            return None
        known = self.content(source)
        if isinstance(known, Numbers) and known.kind == "position" and known.space is not None:
            full = known.space.kind == "sorted" and self.counts(known, "tc")
            return Slots(known.root, ("tc",)) if full and value is node.outputs[1] else None
        numbers = self.chosen(source)
        if numbers is None or numbers.axes not in (("tc",), ("r",)) or numbers.space is not None:
            return None
        if not np.array_equal(numbers.samples, np.arange(MAX_EXPERTS)):
            return None
        space = Space("sorted", numbers.root)
        if value is node.outputs[0]:
            return Numbers(numbers.root, "chosen", numbers.samples, ("r",), space)
        positions = np.arange(TOKENS * self.top_k(numbers.root), dtype=np.int64)
        return Numbers(numbers.root, "position", positions, ("r",), space)

    def _read_gathernd(self, node: ir.Node, _: ir.Value) -> Content | None:
        index = self.content(node.inputs[1])
        if isinstance(index, Numbers) and index.axes[-1:] == ("1",) and _number(node, "batch_dims", 0) == 0:
            return self._picked(node.inputs[0], dataclasses.replace(index, axes=index.axes[:-1]))
        if isinstance(index, Run | Slots) and index.axes[-1:] == ("1",) and _number(node, "batch_dims", 0) == 0:
            return self._picked(node.inputs[0], dataclasses.replace(index, axes=index.axes[:-1]))
        return None

    def _read_gather(self, node: ir.Node, _: ir.Value) -> Content | None:
        axis = _number(node, "axis", 0)
        source = self.content(node.inputs[0])
        place = const_int(node.inputs[1])
        if isinstance(source, Bounds) and place is not None:
            place += source.length if place < 0 else 0
            return dataclasses.replace(source, offset=source.offset + place, length=1)
        if isinstance(source, OneHot) and place is not None:
            return self._one_expert(source, axis, place, node)
        if isinstance(source, Pairs) and place is not None and source.axes[axis] == "d":
            kept = ("1",) * len(self._shapes.shape(node.inputs[1]) or ())  # type: ignore[arg-type]
            axis %= len(source.axes)
            axes = source.axes[:axis] + kept + source.axes[axis + 1 :]
            return dataclasses.replace(source.parts[place], axes=axes)
        if isinstance(source, Numbers) and place == 0 and source.axes[axis] == "1":
            return dataclasses.replace(source, axes=source.axes[:axis] + source.axes[axis % len(source.axes) + 1 :])
        index = self.content(node.inputs[1])
        return self._picked(node.inputs[0], index) if axis == 0 and index is not None else None

    def _read_nonzero(self, node: ir.Node, _: ir.Value) -> Content | None:
        """The (token, choice) pairs that chose one expert, in the order of the mask's axes."""
        mask = self.content(node.inputs[0])
        if not isinstance(mask, Numbers) or mask.kind not in ("chosen", "any") or mask.space is not None:
            return None
        places = np.nonzero(mask.samples)[0]
        if len(places) != 1:
            return None
        choices = self.top_k(mask.root)
        positions = np.arange(TOKENS * choices, dtype=np.int64)
        space = Space("selected", mask.root, int(places[0]))
        counted = {"t": positions // choices, "c": positions % choices, "tc": positions, "1": positions * 0}
        if any(name not in counted for name in mask.axes):
            return None
        parts = tuple(Numbers(mask.root, "position", counted[name], ("r",), space) for name in mask.axes)
        if len(parts) == 1:
            return dataclasses.replace(parts[0], axes=("1", "r"))
        return Pairs(mask.root, parts, ("d", "r"))

    def _read_reducemax(self, node: ir.Node, _: ir.Value) -> Content | None:
        """Whether an expert was chosen at all for a token."""
        mask, axes = self.content(node.inputs[0]), reduced_axes(node)
        if not isinstance(mask, Numbers) or mask.kind != "chosen" or mask.samples.dtype.kind not in "biuf":
            return None
        if axes is None or len(axes) != 1 or mask.axes[axes[0]] != "c":
            return None
        place = axes[0] % len(mask.axes)
        kept = node.attributes.get("keepdims")
        left = ("1",) if kept is None or kept.as_int() else ()
        return dataclasses.replace(mask, kind="any", axes=mask.axes[:place] + left + mask.axes[place + 1 :])

    def _one_expert(self, source: OneHot, axis: int, place: int, node: ir.Node) -> Content | None:
        axis += len(source.axes) if axis < 0 else 0
        if source.axes[axis] != "e":
            return None
        samples = np.arange(MAX_EXPERTS) == (place + source.experts if place < 0 else place)
        kept = self._shapes.shape(node.inputs[1])  # type: ignore[arg-type]
        axes = source.axes[:axis] + ("1",) * len(kept or ()) + source.axes[axis + 1 :]
        return Numbers(source.root, "chosen", samples, axes)

    def _picked(self, source: ir.Value | None, index: Content) -> Content | None:
        """Numbers in the order that ``index`` gives."""
        if isinstance(index, Numbers) and self.counts(index, "tc"):
            known = self.content(source) or self.chosen(source)
            if isinstance(known, Numbers) and known.axes == ("tc",) and known.space is None:
                return (
                    dataclasses.replace(known, axes=index.axes, space=index.space) if known.root is index.root else None
                )
        if isinstance(index, Run):
            known = self.content(source)
            if isinstance(known, Numbers) and known.space == Space("sorted", index.root):
                return dataclasses.replace(known, axes=index.axes, space=Space("run", index.root, index.number))
        return None

    def _read_scatternd(self, node: ir.Node, _: ir.Value) -> Content | None:
        """Row numbers put where each row came from: where each (token, choice) went."""
        index = self.content(node.inputs[1])
        if not isinstance(index, Numbers) or index.kind != "position" or index.space is None:
            return None
        if index.space.kind != "sorted" or not self.counts(index, "tc") or index.axes != ("r", "1"):
            return None
        return Slots(index.root, ("tc",)) if self._counts_up(node.inputs[2]) else None

    def _counts_up(self, value: ir.Value | None) -> bool:
        node = value.producer() if value is not None else None
        while node is not None and not node.domain and node.op_type in _LAYOUT | {"Cast"}:
            value = node.inputs[0]
            node = value.producer() if value is not None else None
        if node is None or node.op_type != "Range":
            return False
        return const_int(node.inputs[0]) == 0 and const_int(node.inputs[2]) == 1

    def _read_scatterelements(self, node: ir.Node, value: ir.Value) -> Content | None:
        reduction = node.attributes.get("reduction")
        if reduction is not None and reduction.as_string() == "add":
            return self._histogram(node, value)
        index = self.content(node.inputs[1])
        if isinstance(index, Numbers) and index.kind == "position" and index.axes == ("r",) and index.space is not None:
            full = index.space.kind == "sorted" and self.counts(index, "tc")
            return Slots(index.root, ("tc",)) if full and self._counts_up(node.inputs[2]) else None
        return None

    def _histogram(self, node: ir.Node, value: ir.Value) -> Content | None:
        numbers, shape = self.chosen(node.inputs[1]), self._shapes.shape(value)
        if numbers is None or shape is None or len(shape) != 1 or not isinstance(shape[0], int):
            return None
        if atoms(numbers.axes) not in (("t", "c"), ("r",)) or not self.identity(numbers, shape[0]):
            return None
        if not is_filled(node.inputs[0], 0) or not is_filled(node.inputs[2], 1):
            return None
        return Bounds(numbers.root, 0, shape[0], counts=True)

    def _read_reducesum(self, node: ir.Node, value: ir.Value) -> Content | None:
        source = self.content(node.inputs[0])
        shape = self._shapes.shape(value)
        if isinstance(source, Numbers):
            return self._read_reducemax(node, value)
        if not isinstance(source, OneHot) or shape is None or shape not in ((source.experts,), (1, source.experts)):
            return None
        return Bounds(source.root, 0, source.experts, counts=True)

    def _read_cumsum(self, node: ir.Node, _: ir.Value) -> Content | None:
        source = self.content(node.inputs[0])
        if not isinstance(source, Bounds) or not source.counts or _number(node, "reverse", 0):
            return None
        return Bounds(source.root, -1 if _number(node, "exclusive", 0) else 0, source.length)

    def _read_split(self, node: ir.Node, value: ir.Value) -> Content | None:
        source = self.content(node.inputs[0])
        size = self._shapes.shape(value)
        if isinstance(source, Bounds) and size == (1,):
            place = node.outputs.index(value)
            return dataclasses.replace(source, offset=source.offset + place, length=1)
        axis = _number(node, "axis", 0)
        if isinstance(source, Numbers) and source.axes[axis] == "1" and len(node.outputs) == 1:
            return source
        if isinstance(source, Pairs) and source.axes[axis] == "d" and len(node.outputs) == len(source.parts):
            axes = tuple("1" if name == "d" else name for name in source.axes)
            return dataclasses.replace(source.parts[node.outputs.index(value)], axes=axes)
        return None

    def _read_slice(self, node: ir.Node, value: ir.Value) -> Content | None:
        source, shape = self.content(node.inputs[0]), self._shapes.shape(value)
        starts = const_ints(node.inputs[1]) if len(node.inputs) > 1 else None
        steps = const_ints(node.inputs[4]) if len(node.inputs) > 4 else (1,)
        if isinstance(source, Pairs) and shape is not None and starts is not None and len(starts) == 1:
            taken = const_ints(node.inputs[3]) if len(node.inputs) > 3 else (0,)
            if taken is None or source.axes[taken[0]] != "d" or shape[taken[0]] != 1:
                return None
            axes = tuple("1" if name == "d" else name for name in source.axes)
            return dataclasses.replace(source.parts[starts[0]], axes=axes)
        if not isinstance(source, Bounds) or starts is None or len(starts) != 1 or steps != (1,):
            return None
        if shape is None or len(shape) != 1 or not isinstance(shape[0], int):
            return None
        start = starts[0] + source.length if starts[0] < 0 else starts[0]
        return dataclasses.replace(source, offset=source.offset + start, length=shape[0])

    def _read_concat(self, node: ir.Node, _: ir.Value) -> Content | None:
        parts = [self.content(item) for item in node.inputs]
        listed = [item for item in parts if isinstance(item, Numbers)]
        if len(listed) == len(parts):
            axis = node.attributes["axis"].as_int()
            first = listed[0]
            if any(item.axes != first.axes or item.space != first.space for item in listed) or first.axes[axis] != "1":
                return None
            axis %= len(first.axes)
            return Pairs(first.root, tuple(listed), first.axes[:axis] + ("d",) + first.axes[axis + 1 :])
        if len(node.inputs) != 2 or constant_of(node.inputs[0]) is None:
            return None
        source = self.content(node.inputs[1])
        if isinstance(source, Bounds) and not source.counts and const_ints(node.inputs[0]) == (0,):
            return Bounds(source.root, source.offset - 1, source.length + 1)
        return None

    def _read_range(self, node: ir.Node, _: ir.Value) -> Content | None:
        if const_int(node.inputs[2]) != 1:
            return None
        number = self.run(node.inputs[0], node.inputs[1])
        return None if number is None else Run(number[0], number[1], ("r",))

    def run(self, start: ir.Value | None, end: ir.Value | None) -> tuple[ir.Value, int] | None:
        """The chosen experts and the number of the one whose sorted rows are ``start`` to ``end``."""
        last = self.content(end)
        if not isinstance(last, Bounds) or last.length != 1 or last.counts:
            return None
        first = self.content(start)
        if first is None:
            ahead = self._constant(start)
            return (
                (last.root, 0)
                if ahead is not None and ahead.size == 1 and not ahead.any() and last.offset == 0
                else None
            )
        if not isinstance(first, Bounds) or first.length != 1 or first.counts or first.root is not last.root:
            return None
        return (last.root, last.offset) if first.offset == last.offset - 1 else None

    def _read_onehot(self, node: ir.Node, _: ir.Value) -> Content | None:
        numbers = self.chosen(node.inputs[0])
        depth, values = const_int(node.inputs[1]), constant_of(node.inputs[2])
        if numbers is None or depth is None or values is None or not np.array_equal(values.astype(np.float64), (0, 1)):
            return None
        if not self.identity(numbers, depth):
            return None
        axis = _number(node, "axis", -1)
        axis += len(numbers.axes) + 1 if axis < 0 else 0
        return OneHot(numbers.root, (*numbers.axes[:axis], "e", *numbers.axes[axis:]), depth)


def keeps_no_axis(root: ir.Value) -> bool:
    """Whether ``root`` is one choice a token with no axis for it, ``[T]``: of an ArgMax, or one of those of a TopK."""
    node = through(root).producer()
    if node is None or node.domain:
        return False
    if node.op_type == "ArgMax":
        return not _number(node, "keepdims", 1)
    if node.op_type != "Gather" or node.inputs[0] is None:
        return False
    place, above = constant_of(node.inputs[1]), through(node.inputs[0]).producer()
    return place is not None and place.ndim == 0 and above is not None and above.op_type == "TopK" and not above.domain


def _number(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def reduced_axes(node: ir.Node) -> tuple[int, ...] | None:
    """The axes that a reduction sums over; None where they are not known or all are."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return const_ints(node.inputs[1])
    attribute = node.attributes.get("axes")
    return None if attribute is None else tuple(attribute.as_ints())


def is_filled(value: ir.Value | None, number: float) -> bool:
    """Whether every element of ``value`` is ``number``, seen through what only repeats it."""
    while value is not None:
        constant = constant_of(value)
        if constant is not None:
            return bool(constant.size) and bool(np.all(constant == number))
        node = value.producer()
        if node is None or node.domain:
            return False
        if node.op_type == "ConstantOfShape":
            fill = node.attributes.get("value")
            return (0.0 if fill is None else float(fill.as_tensor().numpy().reshape(-1)[0])) == number
        if node.op_type == "Mul" and number == 0:
            return any(constant_of(item) is not None and is_filled(item, 0) for item in node.inputs)
        if node.op_type not in _LAYOUT | {"Cast", "CastLike"}:
            return False
        value = node.inputs[0]
    return False


def _evaluate(node: ir.Node, operands: list[Any]) -> np.ndarray | None:
    kind = node.op_type
    if kind in _BINARY:
        result = operands[0]
        for item in operands[1:]:
            result = _BINARY[kind](result, item)
        return np.asarray(result)
    if kind == "Div":
        first, second = np.asarray(operands[0]), np.asarray(operands[1])
        if first.dtype.kind not in "iu":
            return np.asarray(first / second)
        quotient = np.floor_divide(np.abs(first), np.where(second == 0, 1, np.abs(second)))
        return np.asarray(quotient * np.sign(first) * np.sign(second), dtype=first.dtype)
    if kind == "Mod":
        return np.asarray(np.fmod(*operands) if _number(node, "fmod", 0) else np.mod(*operands))
    if kind == "Clip":
        result = np.asarray(operands[0])
        for item, limit in zip(operands[1:], (np.maximum, np.minimum), strict=False):
            result = result if item is None else limit(result, item)
        return np.asarray(result)
    if kind == "Where":
        return np.asarray(np.where(*operands))
    unary = {"Not": np.logical_not, "Floor": np.floor, "Trunc": np.trunc, "Neg": np.negative}
    return np.asarray(unary[kind](operands[0])) if kind in unary else None
