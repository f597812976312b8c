"""Reading what an expert does with a row: up from the sum over copies to the tokens, the weights and the parameters.

The walk knows what every axis counts (see :mod:`graphsurgery.patterns.experts.layout`), so that it sees through every
arrangement of rows: repeated K times, sorted by expert, those of one expert, all of them for each expert. Nodes that
only arrange rows leave no trace; every other one becomes a step.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.constants import const_ints, constant_of
from graphsurgery.patterns.experts.contents import Numbers, Pairs, Run, Slots, Space
from graphsurgery.patterns.experts.finish import exclusive
from graphsurgery.patterns.experts.index_numbers import reduced_axes
from graphsurgery.patterns.experts.layout import ROWS, atoms, has_copies, regroup, same_axes
from graphsurgery.patterns.experts.parameters import unify
from graphsurgery.patterns.experts.sites import ROUTE_WEIGHT, TOKEN_ROW
from graphsurgery.patterns.experts.starts import Start, equation_of
from graphsurgery.patterns.experts.terms import Step, Term, UnreadableError, label

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.experts.index_numbers import IndexReader
    from graphsurgery.patterns.experts.layout import Labels
    from graphsurgery.patterns.experts.parameters import ParameterReader

__all__ = ["ELEMENTWISE", "Found", "RowReader"]

ELEMENTWISE = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "Mean", "Where", "Mod", "Cast", "CastLike"),
        *("Sigmoid", "Tanh", "Relu", "Gelu", "Erf", "Exp", "Log", "Sqrt", "Reciprocal", "Neg", "Abs", "Clip", "Sign"),
        *("HardSwish", "HardSigmoid", "Softplus", "Softsign", "Elu", "Selu", "Celu", "LeakyRelu", "ThresholdedRelu"),
        *("PRelu", "Mish", "Swish", "Floor", "Ceil", "Round", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        *("Equal", "And", "Or", "Not", "Xor", "IsNaN", "IsInf"),
    }
)
_MICROSOFT = frozenset({"QuickGelu", "FastGelu", "Gelu", "BiasGelu"})
_REDUCTIONS = frozenset(
    {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd"}
)
_ROW_NORMS = frozenset(
    {
        "Softmax",
        "LogSoftmax",
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "LpNormalization",
    }
)
_LAYOUT = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten"})
_MAX_DEPTH = 120


@dataclasses.dataclass
class Found:
    """What a walk came upon.

    Attributes:
        tokens: values that hold the token rows, by the value that they are views of.
        weights: values that hold a number for each (token, copy).
        roots: the chosen experts.
        nodes: nodes whose rows are those of the experts.
        experts: E, by the chosen experts.
        grouped: whether each expert works on its own rows among those sorted by expert.
        dense: whether every expert works on every token.
        labelled: a parameter that has one part for each copy of the rows.
        matrices: whether rows are multiplied by a matrix.
    """

    tokens: dict[ir.Value, dict[int, ir.Value]] = dataclasses.field(default_factory=dict)
    weights: dict[ir.Value, Labels] = dataclasses.field(default_factory=dict)
    roots: dict[ir.Value, None] = dataclasses.field(default_factory=dict)
    nodes: dict[ir.Node, None] = dataclasses.field(default_factory=dict)
    experts: dict[ir.Value, int] = dataclasses.field(default_factory=dict)
    grouped: bool = False
    dense: bool = False
    labelled: ir.Value | None = None
    matrices: bool = False


class RowReader:
    """Reads the rows of one expert block.

    Args:
        shapes: shapes of the graph.
        numbers: what its integers mean.
        parameters: its parameters.
        constant: values that depend on no input of the model.
        copies: size of the axis of copies; 0 where there is none.
    """

    def __init__(
        self,
        shapes: ShapeView,
        numbers: IndexReader,
        parameters: ParameterReader,
        constant: Collection[ir.Value],
        copies: int,
    ) -> None:
        self.found = Found()
        self._shapes = shapes
        self._numbers = numbers
        self._parameters = parameters
        self._constant = constant
        self._copies = copies
        self._known: dict[tuple[ir.Value, Labels, Space | None], Term] = {}
        self._depth = 0
        self.spread: Callable[[ir.Value, Labels, Space], Term] | None = None
        """Reads a number for each token as the weight of one expert; None where it is no such thing."""
        self.inside: Collection[ir.Node] | None = None
        """Where rows are not repeated, the nodes of the block or copy: what they read from elsewhere are the tokens."""

    def rows(self, value: ir.Value | None, axes: Labels, space: Space | None) -> Term:
        """The term of ``value``, whose axes count ``axes``.

        Raises:
            UnreadableError: it cannot be read.
        """
        if value is None:
            return None
        key = (value, axes, space)
        if key not in self._known:
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise UnreadableError(f"value {value.name!r} is too far above")
            try:
                self._known[key] = self._read(value, axes, space)
            finally:
                self._depth -= 1
        return self._known[key]

    def _read(self, value: ir.Value, axes: Labels, space: Space | None) -> Term:
        if value in self._constant or not any(name in ROWS for name in axes):
            return self._shared(value, axes, space)
        node = value.producer()
        everywhere = space is not None and space.kind == "all"
        if space is not None and everywhere and "f" not in axes and self.spread is not None:
            weight = self.spread(value, axes, space)
            if weight is not None:
                return weight
        if everywhere and (node is None or node not in (self.inside or ())):
            return self._token(value, axes)
        if space is None and self._weight_of_token(value, axes):
            return ROUTE_WEIGHT
        if not has_copies(axes) and not everywhere:
            # What is computed of a token in an arrangement of its own belongs to the experts that read it.
            if "f" in axes and (node is None or "1" not in axes or self._views(value, axes)[1]):
                return self._token(value, axes)
            if "f" not in axes and not self._from_rows(value, axes):
                raise UnreadableError(f"value {value.name!r} has a number for each token")
            assert node is not None
            return self._node(node, value, axes, space)
        if self._copies == 1 and space is None and "f" in axes and self.inside is not None and node not in self.inside:
            return self._token(value, axes)
        if "f" not in axes:
            weight = self._weight(value, axes)
            if weight is not None:
                return weight
        if node is None:
            raise UnreadableError(f"input {value.name!r} has rows for each (token, copy)")
        term = self._node(node, value, axes, space)
        if isinstance(term, Step) and term.per_row and "f" in axes:
            self.found.nodes[node] = None
        return term

    # ---- where a walk ends ----------------------------------------------------------------------------------------

    def _shared(self, value: ir.Value, axes: Labels, space: Space | None) -> Term:
        """A value that does not depend on the token, and perhaps on the expert."""
        shape = self._shapes.shape(value)
        if shape is None:
            raise UnreadableError(f"value {value.name!r} has no known shape")
        counted = [name for name, size in zip(axes, shape, strict=True) if name in ROWS and size != 1]
        if counted == ["c"] and axes[0] == "c":
            self.found.labelled = value
            return self._parameters.stack(value, self._copies)
        if counted:
            raise UnreadableError(f"constant {value.name!r} has a row for each token")
        if "f" in axes and axes[-1] != "f" and "f" not in axes[-1:]:
            small = all(size == 1 for size in shape)
            if not small:
                raise UnreadableError(f"constant {value.name!r} works on columns")
        if space is not None and space.kind != "sorted":
            return self._parameters.part(value)
        return value

    def _token(self, value: ir.Value, axes: Labels) -> Term:
        value, views = self._views(value, axes)
        for known in self.found.tokens.values():
            if any(item in known.values() for item in views.values()):
                known.update({rank: item for rank, item in views.items() if rank not in known})
                return TOKEN_ROW
        self.found.tokens[value] = views
        return TOKEN_ROW

    def _views(self, value: ir.Value, axes: Labels) -> tuple[ir.Value, dict[int, ir.Value]]:
        """What ``value`` arranges, and the arrangements on the way that are plain rows, by rank."""
        views: dict[int, ir.Value] = {}
        while True:
            # One batch row in front of the tokens is no arrangement of its own.
            plain = axes in (("t", "f"), ("b", "s", "f"), ("1", "t", "f"))
            if plain or (self._copies == 1 and "1" not in axes and len(axes) in (2, 3)):
                views[len(axes)] = value
            node = value.producer()
            if node is None or node.domain or node.op_type not in (*_LAYOUT, "Identity", "Expand", "Transpose"):
                break
            source = node.inputs[0]
            above = self.arranged(node, value, axes) if source is not None else None
            if source is None or above is None or (has_copies(above) and self._copies != 1):
                break
            value, axes = source, above
        return value, views

    def _weight(self, value: ir.Value, axes: Labels) -> Term:
        """The route weight, where ``value`` is a number for each (token, copy) that no row was reduced to."""
        plain = tuple(name for name in axes if name != "1")
        alone = self._copies == 1 and plain == ("tc",)
        if not alone and plain not in (("t", "c"), ("b", "s", "c"), ("c", "t"), ("c", "b", "s")):
            return None
        node = value.producer()
        if node is not None and not node.domain and node.op_type in (*_LAYOUT, "Identity", "Expand", "Transpose"):
            return None
        if self._of_experts(value) or self._from_rows(value, axes):
            return None
        self.found.weights[value] = axes
        return ROUTE_WEIGHT

    def _weight_of_token(self, value: ir.Value, axes: Labels) -> bool:
        """Whether ``value`` is the route weight because a token has one choice: any number of the token is one of it."""
        if self._copies != 1 or self.inside is not None or axes not in (("t", "1"), ("tc", "1")):
            return False
        if axes == ("tc", "1") and not self._from_rows(value, axes):
            return False
        self.found.weights[value] = ("t", "c")
        return True

    def _of_experts(self, value: ir.Value) -> bool:
        """Whether ``value`` picks a number that each expert has from a parameter."""
        node = value.producer()
        if node is None or node.domain or node.op_type not in ("Gather", "GatherND"):
            return False
        return node.inputs[0] in self._constant

    def _from_rows(self, value: ir.Value, axes: Labels) -> bool:
        """Whether ``value`` is what the rows of the experts are reduced to (the mean square of a norm)."""
        pending: list[ir.Value] = [value]
        seen: set[ir.Value] = set()
        while pending and len(seen) < 16:
            item = pending.pop()
            node = item.producer()
            if item in seen or node is None or node.domain:
                continue
            seen.add(item)
            if node.op_type in _REDUCTIONS and axes[-1] == "1" and self._reduces_last(node):
                rank = self._shapes.rank(node.inputs[0])  # type: ignore[arg-type]
                return rank == len(axes)
            if node.op_type in ELEMENTWISE:
                pending += [operand for operand in node.inputs if operand is not None and operand not in self._constant]
        return False

    def _reduces_last(self, node: ir.Node) -> bool:
        axes = reduced_axes(node)
        rank = self._shapes.rank(node.inputs[0])  # type: ignore[arg-type]
        return axes is not None and rank is not None and tuple(axis % rank for axis in axes) == (rank - 1,)

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def _node(self, node: ir.Node, value: ir.Value, axes: Labels, space: Space | None) -> Term:
        kind = node.op_type
        if node.domain == "com.microsoft" and kind in _MICROSOFT:
            return self._elementwise(node, axes, space)
        if node.domain == "com.microsoft" and kind == "MatMulNBits":
            return self._packed_product(node, axes, space)
        if node.domain:
            raise UnreadableError(f"{label(node)} is no operator that is known to work on rows")
        if kind in ("Identity", "Dropout"):
            return self.rows(node.inputs[0], axes, space)
        if kind in ELEMENTWISE:
            return self._elementwise(node, axes, space)
        if kind in (*_LAYOUT, "Transpose", "Expand", "Tile"):
            above = self.arranged(node, value, axes)
            if above is None:
                raise UnreadableError(f"{label(node)} arranges rows in a way that cannot be followed")
            return self.rows(node.inputs[0], above, space)
        rule = {
            "MatMul": self._product,
            "Gemm": self._gemm,
            "Einsum": self._einsum,
            "Slice": self._features,
            "Split": self._features,
            "Gather": self._gather,
            "GatherND": self._gather_nd,
            "GatherElements": self._gather_elements,
            "Concat": self._concat,
        }.get(kind)
        if rule is not None:
            return rule(node, value, axes, space)
        if kind in _REDUCTIONS or kind in _ROW_NORMS:
            return self._along_features(node, axes, space)
        raise UnreadableError(f"{label(node)} is no operator that is known to work on rows")

    def _operand_axes(self, value: ir.Value, axes: Labels, sizes: tuple[Dim, ...]) -> Labels:
        """The labels of an operand that is broadcast to ``axes``."""
        shape = self._shapes.shape(value)
        if shape is None or len(shape) > len(axes):
            raise UnreadableError(f"value {value.name!r} has no known shape")
        tail = range(len(axes) - len(shape), len(axes))
        return tuple("1" if shape[place - tail.start] == 1 and sizes[place] != 1 else axes[place] for place in tail)

    def _sizes(self, value: ir.Value) -> tuple[Dim, ...]:
        shape = self._shapes.shape(value)
        if shape is None:
            raise UnreadableError(f"value {value.name!r} has no known shape")
        return shape

    def _elementwise(self, node: ir.Node, axes: Labels, space: Space | None) -> Term:
        sizes = self._sizes(node.outputs[0])
        operands = tuple(
            None if item is None else self.rows(item, self._operand_axes(item, axes, sizes), space)
            for item in node.inputs
        )
        return Step(node, operands)

    def _product(self, node: ir.Node, value: ir.Value, axes: Labels, space: Space | None) -> Term:
        left, right = node.inputs
        assert left is not None
        assert right is not None
        sizes, ranks = self._sizes(value), (len(self._sizes(left)), len(self._sizes(right)))
        if len(axes) < 2 or min(ranks) < 2:
            raise UnreadableError(f"{label(node)} is a product with a vector")

        def batch(item: ir.Value) -> Labels:
            shape = self._sizes(item)[:-2]
            outer = axes[:-2][len(axes) - 2 - len(shape) :]
            wide = sizes[:-2][len(sizes) - 2 - len(shape) :]
            return tuple("1" if s == 1 and w != 1 else name for name, s, w in zip(outer, shape, wide, strict=True))

        if axes[-1] == "f":
            rows, parameter = (*batch(left), axes[-2], "f"), (*batch(right), "f", "f")
            matrix = self._matrix(right, parameter, space)
            return Step(node, (self.rows(left, rows, space), matrix))
        if axes[-2] == "f":
            rows, parameter = (*batch(right), "f", axes[-1]), (*batch(left), "f", "f")
            return Step(node, (self._matrix(left, parameter, space), self.rows(right, rows, space)))
        raise UnreadableError(f"{label(node)} is no product of rows and a parameter")

    def _matrix(self, value: ir.Value | None, axes: Labels, space: Space | None) -> Term:
        self.found.matrices = True
        term = self.rows(value, axes, space)
        if isinstance(term, Step) and term.per_row:
            raise UnreadableError(f"{label(term.node)}, which multiplies rows, is no parameter")
        return term

    def added_up(self, start: Start) -> Term:
        """One of the copies that are added up: a row, or its product with a parameter."""
        if start.parameter is None:
            return self.rows(start.rows, start.axes, None)
        matrix = self._matrix(start.parameter, start.parameter_axes, None)
        row = self.rows(start.rows, start.axes, None)
        product = ir.Node("", "MatMul", (), num_outputs=1)
        return Step(product, (matrix, row) if start.turned else (row, matrix))

    def _einsum(self, node: ir.Node, _: ir.Value, axes: Labels, space: Space | None) -> Term:
        """A product of rows and a parameter, summed over one letter of features."""
        equation = equation_of(node)
        if equation is None or len(equation[0]) != 2 or axes.count("f") != 1:
            raise UnreadableError(f"{label(node)} is no product of rows and a parameter")
        letters, output = equation
        names = dict(zip(output, axes, strict=True))
        new = output[axes.index("f")]
        for place in (0, 1):
            rows, parameter = letters[place], letters[1 - place]
            summed = [letter for letter in rows if letter not in output]
            if new in rows or new not in parameter or len(summed) != 1 or summed[0] not in parameter:
                continue
            if set(rows) | set(parameter) != {*output, summed[0]}:
                continue
            given = names | {summed[0]: "f"}
            matrix = self._matrix(node.inputs[1 - place], tuple(given[letter] for letter in parameter), space)
            row = self.rows(node.inputs[place], tuple(given[letter] for letter in rows), space)
            column = parameter.index(new) < parameter.index(summed[0])
            product = ir.Node("", "MatMul", (), num_outputs=1)
            return Step(product, (matrix, row) if column else (row, matrix))
        raise UnreadableError(f"{label(node)} is no product of rows and a parameter")

    def _gemm(self, node: ir.Node, value: ir.Value, axes: Labels, space: Space | None) -> Term:
        turned = node.attributes.get("transA")
        if axes[-1] != "f" or (turned is not None and turned.as_int()):
            raise UnreadableError(f"{label(node)} is no product of rows and a parameter")
        matrix = node.inputs[1]
        assert matrix is not None
        parameter = self._matrix(matrix, ("f", "f"), space)
        operands = [self.rows(node.inputs[0], axes, space), parameter]
        if len(node.inputs) > 2:
            bias = node.inputs[2]
            sizes = self._sizes(value)
            operands.append(None if bias is None else self.rows(bias, self._operand_axes(bias, axes, sizes), space))
        return Step(node, tuple(operands))

    def _packed_product(self, node: ir.Node, axes: Labels, space: Space | None) -> Term:
        if axes[-1] != "f":
            raise UnreadableError(f"{label(node)} is no product of rows and a parameter")
        packed = [
            None if item is None else self.rows(item, ("f",) * len(self._sizes(item)), space)
            for item in node.inputs[1:]
        ]
        self.found.matrices = True
        return Step(node, (self.rows(node.inputs[0], axes, space), *packed))

    def _features(self, node: ir.Node, value: ir.Value, axes: Labels, space: Space | None) -> Term:
        """A Slice or Split of the features; or a Slice that takes one expert's rows."""
        if node.op_type == "Split":
            axis = node.attributes.get("axis")
            taken: tuple[int, ...] | None = (0 if axis is None else axis.as_int(),)
            rest: tuple[Term, ...] = tuple(node.inputs[1:])
        else:
            if len(node.inputs) < 3:
                raise UnreadableError(f"{label(node)} has its bounds as attributes")
            taken = const_ints(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
            if len(node.inputs) <= 3 or node.inputs[3] is None:
                taken = tuple(range(len(const_ints(node.inputs[1]) or ())))
            rest = tuple(node.inputs[1:])
            run = self._numbers.run(node.inputs[1], node.inputs[2])
            if run is not None and taken is not None and len(taken) == 1:
                return self._run_rows(node, Run(run[0], run[1], ("r",)), axes, space)
        if taken is None or len(taken) != 1 or axes[taken[0] % len(axes)] != "f":
            raise UnreadableError(f"{label(node)} cuts something else than features")
        source = self.rows(node.inputs[0], axes, space)
        return Step(node, (source, *rest), output=node.outputs.index(value), axes=(-1,))

    def _along_features(self, node: ir.Node, axes: Labels, space: Space | None) -> Term:
        if node.op_type in _REDUCTIONS:
            kept = node.attributes.get("keepdims")
            if not self._reduces_last(node) or (kept is not None and not kept.as_int()):
                raise UnreadableError(f"{label(node)} reduces something else than features")
            above, rest = (*axes[:-1], "f"), tuple(node.inputs[1:])
            return Step(node, (self.rows(node.inputs[0], above, space), *rest), axes=(-1,))
        axis = node.attributes.get("axis")
        place = -1 if axis is None else axis.as_int()
        if axes[-1] != "f" or place % len(axes) != len(axes) - 1:
            raise UnreadableError(f"{label(node)} works on something else than features")
        operands = [self.rows(node.inputs[0], axes, space)]
        operands += [None if item is None else self.rows(item, ("f",), space) for item in node.inputs[1:]]
        return Step(node, tuple(operands), axes=(-1,))

    def _concat(self, node: ir.Node, _: ir.Value, axes: Labels, space: Space | None) -> Term:
        axis = node.attributes["axis"].as_int() % len(axes)
        if axes[axis] == "f":
            return Step(node, tuple(self.rows(item, axes, space) for item in node.inputs), axes=(-1,))
        if axes[axis] == "r" and space is not None and space.kind == "sorted":
            self.found.roots[space.root] = None
            copies = [
                self.rows(item, axes, Space("run", space.root, number)) for number, item in enumerate(node.inputs)
            ]
            self.found.nodes[node] = None
            term = unify(copies, self._shapes)
            self.found.grouped = True
            self._count(space.root, len(copies), label(node))
            return term
        if axes[axis] == "c" and space is None and len(node.inputs) == self._copies > 1:
            return self._stacked_copies(node, axis, axes)
        raise UnreadableError(f"{label(node)} puts rows together in a way that cannot be followed")

    def _stacked_copies(self, node: ir.Node, axis: int, axes: Labels) -> Term:
        """What E copies give for all tokens, put side by side."""
        outer, copies = self.inside, []
        for number, item in enumerate(node.inputs):
            producer = item.producer() if item is not None else None
            if item is None or producer is None or self._shapes.dim(item, axis) != 1:
                raise UnreadableError(f"{label(node)} puts rows together in a way that cannot be followed")
            self.inside = exclusive(producer, ())
            space = Space("all", node.outputs[0], number)
            copies.append(self.rows(item, (*axes[:axis], "1", *axes[axis + 1 :]), space))
        self.inside = outer
        self.found.labelled = node.outputs[0]
        self.found.nodes[node] = None
        return unify(copies, self._shapes)

    def _gather_elements(self, node: ir.Node, _: ir.Value, axes: Labels, space: Space | None) -> Term:
        """Of what all experts give, that of the chosen ones."""
        data, index = node.inputs
        assert data is not None
        attribute = node.attributes.get("axis")
        axis = (0 if attribute is None else attribute.as_int()) % len(axes)
        chosen, experts = self._numbers.chosen(index), self._sizes(data)[axis]
        picked = tuple("1" if name == "f" else name for name in axes)
        if chosen is None or not isinstance(experts, int) or space is not None or axes[axis] != "c":
            raise UnreadableError(f"{label(node)} picks in a way that cannot be followed")
        if chosen.axes != picked or not self._numbers.identity(chosen, experts):
            raise UnreadableError(f"{label(node)} picks in a way that cannot be followed")
        every = RowReader(self._shapes, self._numbers, self._parameters, self._constant, experts)
        every.found = self.found
        term = every.rows(data, axes, None)
        if self.found.weights:
            raise UnreadableError(f"{label(node)} picks rows that are weighted already")
        self.found.labelled, self.found.dense = None, True
        self._count(chosen.root, experts, label(node))
        return term

    def _count(self, root: ir.Value, experts: int, where: str) -> None:
        self.found.roots[root] = None
        if self.found.experts.setdefault(root, experts) != experts:
            raise UnreadableError(f"{where} has {experts} experts and others have {self.found.experts[root]}")

    # ---- picking --------------------------------------------------------------------------------------------------

    def _gather(self, node: ir.Node, _: ir.Value, axes: Labels, space: Space | None) -> Term:
        data, index = node.inputs[0], node.inputs[1]
        assert data is not None
        assert index is not None
        attribute = node.attributes.get("axis")
        axis = 0 if attribute is None else attribute.as_int()
        axis += len(self._sizes(data)) if axis < 0 else 0
        rank = len(self._sizes(index))
        taken, before, after = axes[axis : axis + rank], axes[:axis], axes[axis + rank :]
        if taken == ("f",) and constant_of(index) is not None:
            return Step(node, (self.rows(data, axes, space), index), axes=(-1,))
        return self._pick(node, data, index, before, taken, after, space)

    def _gather_nd(self, node: ir.Node, _: ir.Value, axes: Labels, space: Space | None) -> Term:
        data, index = node.inputs
        assert data is not None
        assert index is not None
        attribute = node.attributes.get("batch_dims")
        shape = self._sizes(index)
        if attribute is None or not attribute.as_int():
            pairs = self._numbers.content(index)
            if isinstance(pairs, Pairs) and pairs.axes == ("r", "d"):
                return self._rows_of_pairs(node, pairs, data, axes, space)
        if (attribute is not None and attribute.as_int()) or shape[-1] != 1:
            raise UnreadableError(f"{label(node)} picks in a way that cannot be followed")
        taken = axes[: len(shape) - 1]
        return self._pick(node, data, index, (), (*taken, "1"), axes[len(shape) - 1 :], space)

    def _pick(
        self,
        node: ir.Node,
        data: ir.Value,
        index: ir.Value,
        before: Labels,
        taken: Labels,
        after: Labels,
        space: Space | None,
    ) -> Term:
        content = self._numbers.content(index)
        if isinstance(content, Run):
            return self._run_rows(node, content, (*before, *taken[: taken.index("r") + 1], *after), space)
        if isinstance(content, Slots):
            if space is not None or not same_axes(content.axes, taken):
                raise UnreadableError(f"{label(node)} picks rows in another order than that of the tokens")
            self.found.roots[content.root] = None
            return self.rows(data, (*before, "r", *after), Space("sorted", content.root))
        if isinstance(content, Numbers) and content.kind == "position":
            return self._rows_of(node, content, data, before, taken, after, space)
        chosen = self._numbers.chosen(index)
        if chosen is None or before:
            raise UnreadableError(f"{label(node)} picks rows by {index.name!r}, whose meaning is not known")
        return self._chosen(node, chosen, data, taken, space)

    def _chosen(self, node: ir.Node, chosen: Numbers, data: ir.Value, taken: Labels, space: Space | None) -> Term:
        experts = self._sizes(data)[0]
        met = same_axes(chosen.axes, taken)
        if self._copies == 1 and not met:
            # One choice a token: an axis for it is there or is not.
            met = same_axes(*([name for name in atoms(axes) if name != "c"] for axes in (chosen.axes, taken)))
        if not isinstance(experts, int) or not met or chosen.space != space:
            raise UnreadableError(f"{label(node)} picks by {node.inputs[1].name!r}, whose rows are not those it meets")  # type: ignore[union-attr]
        if not self._numbers.identity(chosen, experts):
            raise UnreadableError(f"{label(node)} picks by numbers that are not those of the experts")
        self._count(chosen.root, experts, label(node))
        return self._parameters.stack(data, experts)

    def _rows_of(
        self,
        node: ir.Node,
        content: Numbers,
        data: ir.Value,
        before: Labels,
        taken: Labels,
        after: Labels,
        space: Space | None,
    ) -> Term:
        # Where one expert is chosen both may be meant: features belong to tokens, weights to (token, choice).
        wanted = ("t", "tc") if "f" in after else ("tc", "t")
        counted = next((name for name in wanted if self._numbers.counts(content, name)), "")
        if content.space != space or not same_axes(content.axes, taken) or not counted:
            raise UnreadableError(f"{label(node)} picks rows by numbers that cannot be followed")
        self.found.roots[content.root] = None
        if counted == "t" and "f" not in after and self.spread is not None and space is not None:
            weight = self.spread(data, (*before, counted, *after), space)
            if weight is not None:
                return weight
        return self.rows(data, (*before, counted, *after), None)

    def _rows_of_pairs(self, node: ir.Node, pairs: Pairs, data: ir.Value, axes: Labels, space: Space | None) -> Term:
        """Rows picked by token and choice."""
        both = len(pairs.parts) == 2 and all(map(self._numbers.counts, pairs.parts, ("t", "c")))
        if any(part.space != space for part in pairs.parts) or not both or axes[0] != "r":
            raise UnreadableError(f"{label(node)} picks rows by numbers that cannot be followed")
        self.found.roots[pairs.root] = None
        return self.rows(data, ("t", "c", *axes[1:]), None)

    def _run_rows(self, node: ir.Node, run: Run, axes: Labels, space: Space | None) -> Term:
        if space != Space("run", run.root, run.number):
            wanted = "another place" if space is None else f"expert {space.number}"
            raise UnreadableError(f"{label(node)} takes the rows of expert {run.number} for {wanted}")
        return self.rows(node.inputs[0], axes, Space("sorted", run.root))

    # ---- arranging ------------------------------------------------------------------------------------------------

    def arranged(self, node: ir.Node, value: ir.Value, axes: Labels) -> Labels | None:
        """The labels of what ``node`` arranges, given those of its output."""
        source = node.inputs[0]
        assert source is not None
        before, after = self._sizes(source), self._sizes(value)
        if node.op_type == "Identity":
            return axes
        if node.op_type == "Transpose":
            order = node.attributes.get("perm")
            moved = list(order.as_ints()) if order is not None else list(range(len(axes)))[::-1]
            return tuple(axes[moved.index(place)] for place in range(len(moved)))
        if node.op_type == "Expand":
            tail = len(axes) - len(before)
            return tuple(
                "1" if size == 1 and after[tail + place] != 1 else axes[tail + place]
                for place, size in enumerate(before)
            )
        if node.op_type == "Tile":
            return self._tiled(node, before, after, axes)
        if axes.count("f") > 1:
            return None
        if node.op_type in ("Unsqueeze", "Squeeze"):
            return self._moved_ones(node, before, axes)
        return regroup(axes, after, before, self._copies)

    def _moved_ones(self, node: ir.Node, before: tuple[Dim, ...], axes: Labels) -> Labels | None:
        places = const_ints(node.inputs[1]) if len(node.inputs) > 1 else None
        if places is None:
            attribute = node.attributes.get("axes")
            places = tuple(attribute.as_ints()) if attribute is not None else None
        if places is None:
            return None
        if node.op_type == "Unsqueeze":
            dropped = {place % len(axes) for place in places}
            return tuple(name for place, name in enumerate(axes) if place not in dropped)
        rest = iter(axes)
        added = {place % len(before) for place in places}
        return tuple("1" if place in added else next(rest) for place in range(len(before)))

    def _tiled(self, node: ir.Node, before: tuple[Dim, ...], after: tuple[Dim, ...], axes: Labels) -> Labels | None:
        labels: list[str] = []
        repeats = self._shapes.shape_value(node.inputs[1])  # type: ignore[arg-type]
        if repeats is None or len(list(repeats)) != len(axes):
            return None
        for name, size, wide, times in zip(axes, before, after, repeats, strict=True):
            if times == 1 or wide == size:
                labels.append(name)
            elif name == "ct" and times == self._copies:
                labels.append("t")
            elif size == 1:
                labels.append("1")
            else:
                return None
        return tuple(labels)
