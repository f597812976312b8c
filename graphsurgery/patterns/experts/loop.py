"""Expert blocks that are written out expert by expert: E copies, each adding what it gives onto the sum.

A copy works on the rows that chose its expert and scatters what it gives back, or it works on all rows and masks. Which
expert a copy is, is read from what the chosen experts are compared with; all copies are proved to do the same.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis.constants import const_int
from graphsurgery.patterns.experts.contents import Numbers, Space
from graphsurgery.patterns.experts.dense import SpreadReader, adds_nothing, compared, without_weight
from graphsurgery.patterns.experts.finish import exclusive, finish
from graphsurgery.patterns.experts.index_numbers import is_filled
from graphsurgery.patterns.experts.parameters import unify
from graphsurgery.patterns.experts.rows import ELEMENTWISE, RowReader
from graphsurgery.patterns.experts.sites import ROUTE_WEIGHT
from graphsurgery.patterns.experts.terms import Step, Term, UnreadableError, label
from graphsurgery.patterns.matcher import is_op

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import onnx_ir as ir

    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.experts.dense import Spread
    from graphsurgery.patterns.experts.index_numbers import IndexReader
    from graphsurgery.patterns.experts.layout import Labels
    from graphsurgery.patterns.experts.parameters import ParameterReader
    from graphsurgery.patterns.experts.sites import ExpertSite
    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["LoopReader", "Sum"]

_BEHIND = ELEMENTWISE | {"Cast", "Gemm", "Identity", "MatMul", "MatMulNBits", "Slice", "Split"}
"""Operators that may stand between the weight of an expert and the sum, where it weighs what the expert is given."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Copy:
    """What one expert adds: ``value``, for the rows that chose it (``selected``) or for all."""

    root: ir.Value
    number: int
    value: ir.Value
    kind: str


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """A sum of copies; ``parts`` are copies and other sums, ``base`` what they are added onto."""

    node: ir.Node
    output: ir.Value
    parts: tuple[_Copy | Sum, ...]
    base: ir.Value | None = None

    @property
    def root(self) -> ir.Value:
        """The chosen experts."""
        return _root(self)

    def copies(self) -> list[_Copy]:
        """All copies, in the order in which they are added."""
        found: list[_Copy] = []
        pending: list[_Copy | Sum] = [self]
        while pending:
            item = pending.pop()
            if isinstance(item, Sum):
                pending += reversed(item.parts)
            else:
                found.append(item)
        return found

    def bases(self) -> list[ir.Value]:
        """What the copies are added onto."""
        found, pending = [], [self]
        while pending:
            item = pending.pop()
            found += [] if item.base is None else [item.base]
            pending += [part for part in item.parts if isinstance(part, Sum)]
        return found


class LoopReader:
    """Finds and reads blocks that are written out."""

    def __init__(
        self,
        shapes: ShapeView,
        index: GraphIndex,
        numbers: IndexReader,
        parameters: ParameterReader,
        constant: Collection[ir.Value],
    ) -> None:
        self._shapes = shapes
        self._index = index
        self._numbers = numbers
        self._parameters = parameters
        self._constant = constant
        self._sums: dict[ir.Value, Sum] = {}
        self._spreads: dict[tuple[ir.Value, Labels], Spread | None] = {}
        self._columns: dict[ir.Value, dict[int, ir.Node]] = {}
        self._masks: dict[ir.Value, tuple[ir.Value, int] | None] = {}

    # ---- sums of copies -------------------------------------------------------------------------------------------

    def sums(self, looked_at: Callable[[ir.Node], bool]) -> list[Sum]:
        """The sums of copies that no other sum of copies goes on with, in graph order; of nodes that are looked at."""
        taken: set[Sum] = set()
        for node in self._index.nodes("ScatterND", "ScatterElements", "Add", "Sum"):
            if not looked_at(node):
                continue
            found = self._added(node) if node.op_type in ("Add", "Sum") else self._scattered(node)
            if found is not None:
                self._sums[node.outputs[0]] = found
                taken.update(part for part in found.parts if isinstance(part, Sum))
        return [item for item in self._sums.values() if item not in taken]

    def _scattered(self, node: ir.Node) -> Sum | None:
        data, index, updates = node.inputs
        content = self._numbers.content(index)
        if not isinstance(content, Numbers) or content.space is None or content.space.kind != "selected":
            return None
        if content.axes != ("r", "1") or not self._numbers.counts(content, "t") or updates is None or data is None:
            return None
        axis = node.attributes.get("axis")
        if node.op_type == "ScatterElements" and axis is not None and axis.as_int() != 0:
            return None
        attribute = node.attributes.get("reduction")
        reduction = "none" if attribute is None else attribute.as_string()
        space = content.space
        if reduction != "add":
            added = self._read_back(data, updates, content)
            if not self._numbers.distinct(space.root) or reduction != "none":
                return None
            if added is not None:
                updates = added
            elif not is_filled(data, 0):
                return None
        copy = _Copy(space.root, space.number, updates, "selected")
        if is_filled(data, 0):
            return Sum(node, node.outputs[0], (copy,))
        before = self._sums.get(data)
        if before is not None and before.copies()[0].root is space.root:
            return Sum(node, node.outputs[0], (before, copy))
        return Sum(node, node.outputs[0], (copy,), data)

    def _read_back(self, data: ir.Value, updates: ir.Value, content: Numbers) -> ir.Value | None:
        """What is added, where ``updates`` are the same rows of ``data`` and something more."""
        node = updates.producer()
        while node is not None and is_op(node, "Reshape", "Expand", "Identity") and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        if node is None or not is_op(node, "Add"):
            return None
        for place in (0, 1):
            read, more = node.inputs[place], node.inputs[1 - place]
            picked = read.producer() if read is not None else None
            if picked is None or not is_op(picked, "Gather", "GatherND") or picked.inputs[0] is not data:
                continue
            rows = self._numbers.content(picked.inputs[1])
            if isinstance(rows, Numbers) and rows.space == content.space and self._numbers.counts(rows, "t"):
                return more
        return None

    def _added(self, node: ir.Node) -> Sum | None:
        parts: list[_Copy | Sum] = []
        others: list[ir.Value] = []
        for item in node.inputs:
            part = self._part(item) if item is not None else None
            if part is not None:
                parts.append(part)
            elif item is not None and not is_filled(item, 0):
                others.append(item)
        if len(parts) == 2 and not others and isinstance(parts[0], Sum) != isinstance(parts[1], Sum):
            whole, copy = sorted(parts, key=lambda part: isinstance(part, _Copy))
            if isinstance(whole, Sum) and _root(whole) is not _root(copy):
                # The copies of another choice go on where those of one have been added up.
                return Sum(node, node.outputs[0], (copy,), whole.output)
        if not parts or len(others) > 1 or len({_root(part) for part in parts}) != 1:
            return None
        copies = [(part.root, part.number) for part in parts if isinstance(part, _Copy)]
        if len(set(copies)) < len(copies) or any(item in self._constant for item in others):
            return None  # a sum within one expert
        if others and (len(parts) > 1 or (isinstance(parts[0], Sum) and len(parts[0].copies()) > 1)):
            return None  # a whole sum is added to something else
        return Sum(node, node.outputs[0], tuple(parts), others[0] if others else None)

    def _part(self, value: ir.Value) -> _Copy | Sum | None:
        if value in self._sums:
            return self._sums[value]
        node = value.producer()
        while is_op(node, "Cast", "Identity") and node is not None and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        shape = self._shapes.shape(value)
        if node is None or shape is None or len(shape) not in (2, 3) or shape[-1] == 1:
            return None
        found = self._mask(node.outputs[0])
        return None if found is None else _Copy(*found, value, "all")

    def _mask(self, value: ir.Value) -> tuple[ir.Value, int] | None:
        """The choice and the number of the one expert whose weight meets the rows on their way to ``value``.

        It may meet what the expert gives or what it is given; each value is looked at once.
        """
        stack = [value]
        while stack:
            item = stack[-1]
            if item in self._masks:
                stack.pop()
                continue
            node = item.producer()
            own = self._own_mask(item)
            if own is not None or node is None or not self._computes_rows(item, node):
                self._masks[item] = own
                continue
            rows = [given for given in node.inputs if given is not None and given not in self._constant]
            waiting = [given for given in rows if given not in self._masks]
            if waiting:
                stack += waiting
                continue
            found = {mask for given in rows if (mask := self._masks[given]) is not None}
            self._masks[item] = found.pop() if len(found) == 1 else None
        return self._masks[value]

    def _computes_rows(self, value: ir.Value, node: ir.Node) -> bool:
        """Whether ``node`` may be a step of one expert, behind the weight: no sum of experts is."""
        if node.domain not in ("", "com.microsoft") or node.op_type not in _BEHIND or value in self._sums:
            return False
        return (self._shapes.rank(value) or 0) in (2, 3)

    def _own_mask(self, value: ir.Value) -> tuple[ir.Value, int] | None:
        node = value.producer()
        if node is None or node.domain or node.op_type not in ("Mul", "Where") or self._shapes.dim(value, -1) == 1:
            return None
        for item in node.inputs:
            if item is None or item in self._constant or self._shapes.dim(item, -1) != 1:
                continue
            rank = self._shapes.rank(item)
            spread = self._spread(item, ("t", "1") if rank == 2 else ("b", "s", "1"))
            if spread is not None and spread.number is not None:
                return spread.root, spread.number
            if spread is None:
                self._note_column(item, node)
        return None

    def _note_column(self, item: ir.Value, node: ir.Node) -> None:
        """Keep that ``node`` weighs rows by one column of a value that is not known to be weights of chosen experts."""
        cut = item.producer()
        while (
            is_op(cut, "Unsqueeze", "Squeeze", "Reshape", "Identity") and cut is not None and cut.inputs[0] is not None
        ):
            cut = cut.inputs[0].producer()
        if cut is None or not is_op(cut, "Slice", "Gather", "Split") or cut.inputs[0] is None:
            return
        place = cut.outputs.index(item) if cut.op_type == "Split" and item in cut.outputs else const_int(cut.inputs[1])
        if place is not None:
            self._columns.setdefault(cut.inputs[0], {})[place] = node

    def compared(self) -> list[tuple[ir.Node, str]]:
        """Products of each expert with a weight that comparisons of scores leave, one for all, and what is wrong with it."""
        found = []
        for value, columns in self._columns.items():
            if len(columns) > 1 and len(columns) == self._shapes.dim(value, -1):
                why = compared(value, self._shapes)
                found += [] if why is None else [(max(columns.values(), key=self._index.order.__getitem__), why)]
        return found

    def _spread(self, value: ir.Value, axes: Labels) -> Spread | None:
        key = (value, axes)
        if key not in self._spreads:
            rows = RowReader(self._shapes, self._numbers, self._parameters, self._constant, 0)
            try:
                self._spreads[key] = SpreadReader(self._shapes, self._numbers, rows).read(value, axes)
            except UnreadableError:
                self._spreads[key] = None
        return self._spreads[key]

    # ---- the block ------------------------------------------------------------------------------------------------

    def read(self, item: Sum) -> ExpertSite | None:
        """The block whose sum is ``item``; None where there is but one copy.

        Raises:
            UnreadableError: it cannot be read.
        """
        copies = sorted(item.copies(), key=lambda copy: copy.number)
        if len(copies) < 2:
            return None
        root = copies[0].root
        self._check_numbers(root, [copy.number for copy in copies])
        base = self._base(item)
        choices = self._numbers.top_k(root)
        reader = RowReader(self._shapes, self._numbers, self._parameters, self._constant, choices)
        weights: dict[ir.Value | None, bool] = {}
        terms = [self._copy_term(reader, copy, item.node, weights) for copy in copies]
        term = unify(terms, self._shapes)
        if weights.pop(None, False):
            if weights:
                raise UnreadableError("only some of its experts have weights")
            term = without_weight(term)
        if not isinstance(term, Step) or not reader.found.matrices:
            raise UnreadableError("its experts multiply by no parameter")
        reader.found.roots[root] = None
        reader.found.experts[root] = len(copies)
        reader.found.weights.update({value: ("t", "c") for value in weights if value is not None})
        by_expert = any(weights.values())
        return finish(
            item.output,
            term,
            reader.found,
            "loop",
            self._shapes,
            self._index,
            weights_by_expert=by_expert,
            base=base,
        )

    def _base(self, item: Sum) -> ir.Value | None:
        """What the copies are added onto."""
        bases = item.bases()
        if len(bases) > 1:
            raise UnreadableError(f"its experts are added onto {bases[0].name!r} and {bases[1].name!r}")
        if bases and self._shapes.shape(bases[0]) != self._shapes.shape(item.output):
            raise UnreadableError(f"its experts are added onto {bases[0].name!r}, which is broadcast")
        return bases[0] if bases else None

    def _check_numbers(self, root: ir.Value, numbers: list[int]) -> None:
        experts = self._numbers.experts_of(root)
        if experts is None:
            raise UnreadableError(f"nothing says how many experts {root.name!r} is chosen among")
        missing = sorted(set(range(experts)) - set(numbers))
        if missing:
            listed = ", ".join(map(str, missing[:8]))
            raise UnreadableError(
                f"of {experts} experts, {listed} is missing"
                if len(missing) == 1
                else f"of {experts} experts, {listed} are missing"
            )
        if len(numbers) != experts or numbers != list(range(experts)):
            twice = next((n for n in numbers if numbers.count(n) > 1 or n >= experts), -1)
            raise UnreadableError(f"expert {twice} of {experts} is added more than once or is none of them")

    def _copy_term(self, reader: RowReader, copy: _Copy, last: ir.Node, weights: dict[ir.Value | None, bool]) -> Term:
        space = Space(copy.kind, copy.root, copy.number)
        spreads: list[Spread] = []

        def spread_weight(value: ir.Value, axes: Labels, where: Space) -> Term:
            spread = self._spread(value, axes)
            if spread is None or spread.number != where.number or spread.root is not where.root:
                return None
            spreads.append(spread)
            if spread.term is None or spread.weights is None:
                weights[None] = True
                return ROUTE_WEIGHT
            weights[spread.weights] = spread.by_expert
            return spread.term

        reader.spread = spread_weight
        rank = self._shapes.rank(copy.value)
        if copy.kind == "selected":
            return reader.rows(copy.value, ("r", "f"), space)
        node = copy.value.producer()
        assert node is not None
        reader.inside = exclusive(node, ())
        term = reader.rows(copy.value, ("t", "f") if rank == 2 else ("b", "s", "f"), space)
        return self._masked(term, spreads, last)

    def _masked(self, term: Term, spreads: list[Spread], last: ir.Node) -> Term:
        if not spreads:
            raise UnreadableError(f"a copy that {label(last)} adds has no weight")
        # The spread's own term already stands in the place of the weight: a chosen expert's is computed from the route
        # weight, another one's from the fill.
        if not adds_nothing(term, spreads[0].fill):
            raise UnreadableError("experts that are not chosen add something too")
        return term


def _root(part: _Copy | Sum) -> ir.Value:
    while isinstance(part, Sum):
        part = part.parts[0]
    return part.root
