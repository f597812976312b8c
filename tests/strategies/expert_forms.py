"""The forms of a generated expert block: dense, masked and selected loops, grouped, batched."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FORMS", "Graph", "Spec"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One expert block.

    Attributes:
        form: how it is written, one of ``FORMS``.
        experts: E.
        top_k: K.
        hidden: H.
        inner: features inside an expert, I.
        router: how experts are chosen; ``fed``: choice and weights are inputs of the model.
        scaled: the weights are scaled by a constant.
        expert_scale: the weights are scaled by a number of each expert.
        activation: what is done between the projections.
        gate: where the gate is: half of one projection (``split``, ``slices``, ``chunks``), its even columns, one of its
            own, nowhere.
        bias: projections have biases.
        norm: each expert has a norm of its own.
        weighted: where the route weight multiplies.
        turned: weights are stored ``[out, in]``.
        behind: what is between the stored weights and their use.
        shared: a shared expert is added.
        half: float16.
        static: B and S are fixed in the file.
        flat: the rows' order is kept in one axis where the form allows.
        variant: other choices of spelling.
        seed: of the weights.
    """

    form: str = "batched"
    experts: int = 4
    top_k: int = 2
    hidden: int = 4
    inner: int = 5
    router: str = "renormalised"
    scaled: bool = False
    expert_scale: bool = False
    activation: str = "silu"
    gate: str = "split"
    bias: bool = False
    norm: bool = False
    weighted: str = "output"
    turned: bool = False
    behind: str = "nothing"
    shared: bool = False
    half: bool = False
    static: tuple[int, int] | None = None
    flat: bool = True
    variant: int = 0
    seed: int = 0


class Graph:
    """Nodes in the making."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.dtype = np.float16 if spec.half else np.float32
        self.kind = TensorProto.FLOAT16 if spec.half else TensorProto.FLOAT
        self._rng = np.random.default_rng(spec.seed)
        self._count = 0

    def name(self, stem: str) -> str:
        self._count += 1
        return f"{stem.lower()}_{self._count}"

    def op(self, op_type: str, *inputs: str, output: str | None = None, **attributes: object) -> str:
        """One node of one output; reductions but ReduceSum take their axes as an attribute at this opset's age."""
        output = output or self.name(op_type)
        if op_type.startswith("Reduce") and "axes" in attributes:
            inputs = (*inputs, self.ints(list(attributes.pop("axes"))))  # type: ignore[call-overload]
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], name=f"/{output}", **attributes))
        return output

    def two(self, op_type: str, *inputs: str, **attributes: object) -> tuple[str, str]:
        first, second = self.name(op_type), self.name(op_type)
        self.nodes.append(helper.make_node(op_type, list(inputs), [first, second], name=f"/{first}", **attributes))
        return first, second

    def many(self, op_type: str, count: int, *inputs: str, **attributes: object) -> list[str]:
        names = [self.name(op_type) for _ in range(count)]
        self.nodes.append(helper.make_node(op_type, list(inputs), names, name=f"/{names[0]}", **attributes))
        return names

    def constant(self, array: np.ndarray, stem: str = "const") -> str:
        name = self.name(stem)
        self.constants[name] = array
        return name

    def ints(self, numbers: list[int]) -> str:
        return self.constant(np.array(numbers, dtype=np.int64))

    def integer(self, number: int) -> str:
        return self.constant(np.array(number, dtype=np.int64))

    def number(self, number: float) -> str:
        return self.constant(np.array(number, dtype=self.dtype))

    def weight(self, stem: str, shape: tuple[int, ...]) -> str:
        array = self._rng.normal(size=shape) * (1.0 if len(shape) < 2 else 1.2 / np.sqrt(shape[-2])) + (
            1.0 if stem in ("norm", "expert_norm", "expert_scale") else 0.0
        )
        return self.constant(array.astype(self.dtype), f"w_{stem}")

    # ---- parameters ------------------------------------------------------------------------------------------------

    def matrix(self, stem: str, shape: tuple[int, ...]) -> str:
        """A weight of which the last two axes are ``[in, out]``, stored as the spec says."""
        spec = self.spec
        lead, rows, columns = shape[:-2], shape[-2], shape[-1]
        stored = (*lead, columns, rows) if spec.turned else shape
        value = self._stored(stem, stored)
        if not spec.turned:
            return value
        rank = len(shape)
        return self.op("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])

    def _stored(self, stem: str, shape: tuple[int, ...]) -> str:
        spec = self.spec
        if spec.behind == "dequantised":
            array = self._rng.integers(-100, 100, shape).astype(np.int8)
            scale = self.constant(np.array(0.6 / 50, dtype=np.float32))
            value = self.op("DequantizeLinear", self.constant(array, f"q_{stem}"), scale)
            return self.op("Cast", value, to=self.kind) if spec.half else value
        name = self.weight(stem, shape)
        if spec.behind == "identity":
            return self.op("Identity", name)
        if spec.behind == "cast":
            other = np.float32 if spec.half else np.float16
            self.constants[name] = self.constants[name].astype(other)
            return self.op("Cast", name, to=self.kind)
        return name

    # ---- what an expert does ---------------------------------------------------------------------------------------

    def activated(self, value: str) -> str:
        kind = self.spec.activation
        if kind == "silu":
            return self.op("Mul", value, self.op("Sigmoid", value))
        if kind == "gelu":
            erf = self.op("Erf", self.op("Div", value, self.number(1.4142135)))
            return self.op("Mul", self.op("Mul", value, self.op("Add", erf, self.number(1.0))), self.number(0.5))
        if kind == "gelu_tanh":
            cube = self.op("Mul", self.op("Pow", value, self.number(3.0)), self.number(0.044715))
            inner = self.op("Mul", self.op("Add", value, cube), self.number(0.7978845608))
            tanh = self.op("Add", self.op("Tanh", inner), self.number(1.0))
            return self.op("Mul", self.op("Mul", value, self.number(0.5)), tanh)
        if kind == "clamped":
            limited = self.op("Clip", value, "", self.number(1.0))
            return self.op("Mul", limited, self.op("Sigmoid", self.op("Mul", limited, self.number(1.702))))
        return self.op("Pow", self.op("Relu", value), self.number(2.0))

    def halves(self, value: str, rank: int) -> tuple[str, str]:
        """Gate and up of one projection."""
        inner, axis = self.spec.inner, self.ints([rank - 1 if self.spec.variant % 2 else -1])
        if self.spec.gate == "split":
            first, second = self.two("Split", value, self.ints([inner, inner]), axis=-1)
            return first, second
        if self.spec.gate == "slices":
            first = self.op("Slice", value, self.ints([0]), self.ints([inner]), axis)
            return first, self.op("Slice", value, self.ints([inner]), self.ints([2**63 - 1]), axis, self.ints([1]))
        if self.spec.gate == "chunks":
            # What the TorchScript exporter makes of chunk(2): bounds reckoned from the shape of what is cut.
            size = self.op("Gather", self.op("Shape", value), self.ints([-1]), axis=0)
            half = self.op("Div", self.op("Add", size, self.ints([1])), self.ints([2]))
            middle, end = self.op("Mul", half, self.ints([1])), self.op("Mul", half, self.ints([2]))
            return self.op("Slice", value, self.ints([0]), middle, axis), self.op("Slice", value, middle, end, axis)
        ends = self.ints([2**63 - 1])
        return (
            self.op("Slice", value, self.ints([0]), ends, axis, self.ints([2])),
            self.op("Slice", value, self.ints([1]), ends, axis, self.ints([2])),
        )

    def expert(
        self,
        rows: str,
        weight: str,
        project: Callable[[str, str, int, int], str],
        scale: Callable[[str, str], str],
        rank: int,
    ) -> str:
        """What an expert does with ``rows``; ``project`` multiplies, ``scale`` by a vector of each expert."""
        spec = self.spec
        if spec.weighted == "input":
            rows = self.op("Mul", rows, weight)
        if spec.norm:
            square = self.op("ReduceMean", self.op("Mul", rows, rows), axes=[-1], keepdims=1)
            root = self.op("Sqrt", self.op("Add", square, self.number(1e-3)))
            rows = scale(self.op("Div", rows, root), "expert_norm")
        if spec.gate == "none":
            inner = self.activated(project(rows, "up", spec.hidden, spec.inner))
        elif spec.gate == "separate":
            gate = self.activated(project(rows, "gate", spec.hidden, spec.inner))
            inner = self.op("Mul", gate, project(rows, "up", spec.hidden, spec.inner))
        else:
            both = project(rows, "gate_up", spec.hidden, 2 * spec.inner)
            gate, up = self.halves(both, rank)
            inner = (
                self.op("Mul", up, self.activated(gate))
                if spec.variant % 2
                else self.op("Mul", self.activated(gate), up)
            )
        result = project(inner, "down", spec.inner, spec.hidden)
        return self.op("Mul", result, weight) if spec.weighted == "output" and weight else result


# ---- forms ---------------------------------------------------------------------------------------------------------


def _repeated(graph: Graph, tokens: str) -> str:
    """Each row K times, ``[T * K, H]``."""
    spec = graph.spec
    lone = graph.op("Unsqueeze", tokens, graph.ints([1]))
    if spec.variant % 3 == 0:
        repeats = graph.ints([1, spec.top_k, 1])
        if spec.variant % 2 == 0:
            # As TorchScript writes repeat_interleave: the axis is marked among ones.
            marked = graph.op("OneHot", graph.ints([1]), graph.integer(3), graph.ints([1, spec.top_k]))
            repeats = graph.op("Reshape", marked, graph.ints([-1]))
        wide = graph.op("Tile", lone, repeats)
    else:
        wide = graph.op("Expand", lone, graph.ints([1, spec.top_k, 1]))
    return graph.op("Reshape", wide, graph.ints([-1, spec.hidden]))


def batched(graph: Graph, tokens: str, indices: str, weights: str) -> str:
    """Weights gathered for each (token, choice)."""
    spec = graph.spec
    column, flat = spec.variant % 4 == 0, spec.flat
    if flat:
        rows = _repeated(graph, tokens)
        indices = graph.op("Reshape", indices, graph.ints([-1]))
        weight = graph.op("Unsqueeze", graph.op("Reshape", weights, graph.ints([-1])), graph.ints([-1]))
    else:
        rows = graph.op("Unsqueeze", tokens, graph.ints([1]))
        weight = graph.op("Unsqueeze", weights, graph.ints([-1]))

    def pick(stack: str) -> str:
        if spec.variant % 5 == 0:
            return graph.op("Gather", stack, indices, axis=0)
        return graph.op("GatherND", stack, graph.op("Unsqueeze", indices, graph.ints([-1])))

    def project(value: str, stem: str, rows_in: int, columns: int) -> str:
        if column:
            stored = graph._stored(stem, (spec.experts, columns, rows_in))
            made = graph.op("MatMul", pick(stored), graph.op("Unsqueeze", value, graph.ints([-1])))
            made = graph.op("Squeeze", made, graph.ints([-1]))
        else:
            stored = graph.matrix(stem, (spec.experts, rows_in, columns))
            made = graph.op("MatMul", graph.op("Unsqueeze", value, graph.ints([-2])), pick(stored))
            made = graph.op("Squeeze", made, graph.ints([-2]))
        return graph.op("Add", made, pick(graph.weight(f"{stem}_bias", (spec.experts, columns)))) if spec.bias else made

    def scale(value: str, stem: str) -> str:
        return graph.op("Mul", pick(graph.weight(stem, (spec.experts, spec.hidden))), value)

    result = graph.expert(rows, weight, project, scale, 2 if flat else 3)
    if flat:
        result = graph.op("Reshape", result, graph.ints([-1, spec.top_k, spec.hidden]))
    return graph.op("ReduceSum", result, graph.ints([1]), keepdims=0)


def grouped(graph: Graph, tokens: str, indices: str, weights: str) -> str:
    """Rows sorted by expert, each expert on its own run of rows."""
    spec = graph.spec
    flat = graph.op("Reshape", indices, graph.ints([-1]))
    order_values, order = graph.two("TopK", flat, graph.op("Shape", flat), axis=-1, largest=0, sorted=1)
    token = graph.op("Div", order, graph.integer(spec.top_k))
    if spec.variant % 2:
        rows = graph.op("GatherND", tokens, graph.op("Unsqueeze", token, graph.ints([-1])))
    else:
        rows = graph.op("Gather", _repeated(graph, tokens), order, axis=0)
    sorted_weights = graph.op("Gather", graph.op("Reshape", weights, graph.ints([-1])), order, axis=0)
    weight = graph.op("Unsqueeze", sorted_weights, graph.ints([-1]))
    ends = _ends(graph, order_values)
    runs: list[tuple[str, str, str]] = []
    start = graph.integer(0)
    for end in ends:
        lone = graph.op("Squeeze", end, graph.ints([0]))
        runs.append((start, lone, graph.op("Range", start, lone, graph.integer(1))))
        start = lone

    def own(value: str, place: int) -> str:
        first, last, numbers = runs[place]
        if spec.variant % 3 == 0:
            axes = graph.ints([0])
            bounds = [graph.op("Reshape", bound, graph.ints([1])) for bound in (first, last)]
            return graph.op("Slice", value, *bounds, axes)
        return graph.op("Gather", value, numbers, axis=0)

    def project(value: str, stem: str, rows_in: int, columns: int) -> str:
        stack = graph.matrix(stem, (spec.experts, rows_in, columns))
        if spec.variant % 4 == 0:
            parts = [graph.op("Gather", stack, graph.integer(place), axis=0) for place in range(spec.experts)]
        else:
            cut = graph.many("Split", spec.experts, stack, graph.ints([1] * spec.experts), axis=0)
            parts = [graph.op("Squeeze", part, graph.ints([0])) for part in cut]
        made = graph.op("Concat", *[graph.op("MatMul", own(value, n), part) for n, part in enumerate(parts)], axis=0)
        return graph.op("Add", made, pick(graph.weight(f"{stem}_bias", (spec.experts, columns)))) if spec.bias else made

    def pick(stack: str) -> str:
        return graph.op("GatherND", stack, graph.op("Unsqueeze", order_values, graph.ints([-1])))

    def scale(value: str, stem: str) -> str:
        return graph.op("Mul", value, pick(graph.weight(stem, (spec.experts, spec.hidden))))

    result = graph.expert(rows, weight, project, scale, 2)
    numbers = graph.op("Range", graph.integer(0), graph.op("Size", order), graph.integer(1))
    if spec.variant % 5 == 0:
        _, back = graph.two("TopK", order, graph.op("Shape", order), axis=-1, largest=0, sorted=1)
    elif spec.variant % 5 == 1:
        back = graph.op("ScatterElements", graph.op("Mul", order, graph.integer(0)), order, numbers, axis=0)
    else:
        empty = graph.op("Expand", graph.integer(0), graph.op("Shape", order))
        back = graph.op("ScatterND", empty, graph.op("Unsqueeze", order, graph.ints([-1])), numbers)
    result = graph.op("Gather", result, back, axis=0)
    result = graph.op("Reshape", result, graph.ints([-1, spec.top_k, spec.hidden]))
    return graph.op("ReduceSum", result, graph.ints([1]), keepdims=0)


def _ends(graph: Graph, chosen: str) -> list[str]:
    """Where the rows of each expert end, each ``[1]``."""
    spec = graph.spec
    if spec.variant % 2:
        zeros = graph.constant(np.zeros(spec.experts, dtype=np.int64))
        ones = graph.op("Expand", graph.integer(1), graph.op("Shape", chosen))
        counts = graph.op("ScatterElements", zeros, chosen, ones, axis=0, reduction="add")
    else:
        values = graph.ints([0, 1])
        hot = graph.op("OneHot", chosen, graph.integer(spec.experts), values, axis=-1)
        counts = graph.op("ReduceSum", hot, graph.ints([0]), keepdims=0)
    ends = graph.op("CumSum", counts, graph.integer(0))
    return graph.many("Split", spec.experts, ends, graph.ints([1] * spec.experts), axis=0)


def dense(graph: Graph, tokens: str, indices: str, weights: str) -> str:
    """Every expert on every token, the weights zero for those not chosen."""
    spec = graph.spec
    zeros = graph.op(
        "Mul", graph.op("MatMul", tokens, graph.weight("wide", (spec.hidden, spec.experts))), graph.number(0.0)
    )
    spread = graph.op("ScatterElements", zeros, indices, weights, axis=1)
    turned = graph.op("Transpose", spread, perm=[1, 0])
    weight = graph.op("Unsqueeze", turned, graph.ints([-1]))
    if spec.variant % 3 == 0:
        rows = graph.op("Tile", tokens, graph.ints([spec.experts, 1]))
        rows = graph.op("Reshape", rows, graph.ints([spec.experts, -1, spec.hidden]))
    elif spec.variant % 3 == 1:
        rows = graph.op("Expand", graph.op("Unsqueeze", tokens, graph.ints([0])), graph.ints([spec.experts, 1, 1]))
    else:
        rows = graph.op("Unsqueeze", tokens, graph.ints([0])) if spec.weighted == "input" else tokens

    def vector(stem: str, width: int) -> str:
        if spec.variant % 2:
            return graph.weight(stem, (spec.experts, 1, width))
        return graph.op("Unsqueeze", graph.weight(stem, (spec.experts, width)), graph.ints([1]))

    def project(value: str, stem: str, rows_in: int, columns: int) -> str:
        made = graph.op("MatMul", value, graph.matrix(stem, (spec.experts, rows_in, columns)))
        return graph.op("Add", made, vector(f"{stem}_bias", columns)) if spec.bias else made

    def scale(value: str, stem: str) -> str:
        return graph.op("Mul", value, vector(stem, spec.hidden))

    result = graph.expert(rows, weight, project, scale, 3)
    return graph.op("ReduceSum", result, graph.ints([0]), keepdims=0)


def _copy(graph: Graph, rows: str, weight: str, shared: dict[str, str]) -> str:
    """One expert of its own parameters."""
    spec = graph.spec

    def project(value: str, stem: str, rows_in: int, columns: int) -> str:
        matrix = graph.matrix(stem, (rows_in, columns))
        if spec.variant % 4 == 0:
            return graph.op("Gemm", value, matrix, *([graph.weight(f"{stem}_bias", (columns,))] if spec.bias else []))
        made = graph.op("MatMul", value, matrix)
        return graph.op("Add", made, graph.weight(f"{stem}_bias", (columns,))) if spec.bias else made

    def scale(value: str, stem: str) -> str:
        if spec.variant % 2:  # all experts use the same
            return graph.op("Mul", value, shared.setdefault(stem, graph.weight(stem, (spec.hidden,))))
        return graph.op("Mul", value, graph.weight(stem, (spec.hidden,)))

    return graph.expert(rows, weight, project, scale, 2)


def selected(graph: Graph, tokens: str, indices: str, weights: str) -> str:
    """Each expert on the rows that chose it, scattered onto the sum."""
    spec = graph.spec
    total = graph.op("Mul", tokens, graph.number(0.0))
    hot = graph.op("OneHot", indices, graph.integer(spec.experts), graph.ints([0, 1]), axis=-1)
    mask = graph.op("Transpose", hot, perm=[2, 1, 0])
    shared: dict[str, str] = {}
    order = list(range(spec.experts))
    if spec.variant % 2:
        order.reverse()  # experts come in any order: their numbers count
    for expert in order:
        if spec.variant % 3 == 0:
            own = graph.op("Transpose", graph.op("Equal", indices, graph.integer(expert)), perm=[1, 0])
        else:
            own = graph.op("Gather", mask, graph.integer(expert), axis=0)
        pairs = graph.op("NonZero", own)
        choice = graph.op("Gather", pairs, graph.integer(0), axis=0)
        token = graph.op("Gather", pairs, graph.integer(1), axis=0)
        rows = graph.op("Gather", tokens, token, axis=0)
        if spec.variant % 2:
            place = graph.op("Add", graph.op("Mul", token, graph.integer(spec.top_k)), choice)
            weight = graph.op("Gather", graph.op("Reshape", weights, graph.ints([-1, 1])), place, axis=0)
        else:
            both = [graph.op("Unsqueeze", item, graph.ints([1])) for item in (token, choice)]
            weight = graph.op("GatherND", weights, graph.op("Concat", *both, axis=1))
            weight = graph.op("Unsqueeze", weight, graph.ints([1]))
        result = _copy(graph, rows, weight, shared)
        index = graph.op("Unsqueeze", token, graph.ints([1]))
        if spec.variant % 4 == 0 and not spec.half:  # ONNX Runtime has no such kernel for float16
            total = graph.op("ScatterND", total, index, result, reduction="add")
        elif spec.variant % 4 == 1 or spec.half:
            wide = graph.op("Expand", index, graph.op("Shape", result))
            empty = graph.op("ConstantOfShape", graph.op("Shape", total), value=_zero(graph))
            total = graph.op("Add", total, graph.op("ScatterElements", empty, wide, result, axis=0))
        elif spec.variant % 4 == 2:
            wide = graph.op("Expand", index, graph.op("Shape", result))
            total = graph.op("ScatterElements", total, wide, result, axis=0, reduction="add")
        else:
            before = graph.op("Gather", total, token, axis=0)
            total = graph.op("ScatterND", total, index, graph.op("Add", before, result))
    return total


def _zero(graph: Graph) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.zeros(1, graph.dtype))


def masked(graph: Graph, tokens: str, indices: str, weights: str) -> str:
    """Each expert on all rows, times its weight or zero."""
    spec = graph.spec
    total: str | None = None
    shared: dict[str, str] = {}
    spread = None
    if spec.variant % 3 == 0:
        wide = graph.weight("wide", (spec.hidden, spec.experts))
        zeros = graph.op("Mul", graph.op("MatMul", tokens, wide), graph.number(0.0))
        spread = graph.op("ScatterElements", zeros, indices, weights, axis=1)
    for expert in range(spec.experts):
        own = graph.op("Equal", indices, graph.integer(expert))
        if spread is not None:
            weight = graph.op("Gather", spread, graph.ints([expert]), axis=1)
        elif spec.variant % 3 == 1:
            numbers = graph.op("Mul", graph.op("Cast", own, to=graph.kind), weights)
            weight = graph.op("ReduceSum", numbers, graph.ints([-1]), keepdims=1)
        else:
            numbers = graph.op("Where", own, weights, graph.number(0.0))
            weight = graph.op("ReduceSum", numbers, graph.ints([-1]), keepdims=0)
            weight = graph.op("Unsqueeze", weight, graph.ints([-1]))
        result = _copy(graph, tokens, weight, shared)
        total = result if total is None else graph.op("Add", total, result)
    assert total is not None
    return total


def _spread(graph: Graph, indices: str, weights: str) -> str:
    """The weights of all experts, ``[T, E]``, as a sum over the choices."""
    spec = graph.spec
    every = graph.ints(list(range(spec.experts)))
    hot = graph.op("Equal", graph.op("Unsqueeze", indices, graph.ints([-1])), every)
    numbers = graph.op("Cast", hot, to=graph.kind)
    if spec.form == "einsum" and spec.variant % 3 == 1:
        return graph.op("Einsum", numbers, weights, equation="tke,tk->te")
    if spec.form == "einsum" and spec.variant % 3 == 2:
        product = graph.op("MatMul", graph.op("Unsqueeze", weights, graph.ints([1])), numbers)
        return graph.op("Gather", product, graph.integer(0), axis=1)
    product = graph.op("Mul", numbers, graph.op("Unsqueeze", weights, graph.ints([-1])))
    return graph.op("ReduceSum", product, graph.ints([1]), keepdims=0)


def einsum(graph: Graph, tokens: str, indices: str, weights: str) -> str:
    """Every expert on every token, or weights of the chosen ones, in Einsum."""
    spec = graph.spec
    picked = spec.variant % 2 == 1
    inner = "tk" if picked else "et"
    # The last product and the sum over the experts in one operator.
    fused = not picked and spec.variant % 4 == 0 and not spec.bias

    def project(value: str, stem: str, rows_in: int, columns: int) -> str:
        stored = graph._stored(stem, (spec.experts, *((columns, rows_in) if spec.turned else (rows_in, columns))))
        letters = "ji" if spec.turned else "ij"
        rows = "ti" if value == tokens else f"{inner}i"
        if picked:
            stored = graph.op("Gather", stored, indices, axis=0)
        lead = "tk" if picked else "e"
        if fused and stem == "down":
            spread = _spread(graph, indices, weights)
            return graph.op("Einsum", value, stored, spread, equation=f"{rows},e{letters},te->tj")
        made = graph.op("Einsum", value, stored, equation=f"{rows},{lead}{letters}->{inner}j")
        return graph.op("Add", made, vector(f"{stem}_bias", columns)) if spec.bias else made

    def vector(stem: str, width: int) -> str:
        stack = graph.weight(stem, (spec.experts, width))
        return graph.op("Gather", stack, indices, axis=0) if picked else graph.op("Unsqueeze", stack, graph.ints([1]))

    def scale(value: str, stem: str) -> str:
        return graph.op("Mul", value, vector(stem, spec.hidden))

    result = graph.expert(tokens, "", project, scale, 3)
    if picked and spec.variant % 3 == 0:
        product = graph.op("MatMul", graph.op("Unsqueeze", weights, graph.ints([1])), result)
        if spec.variant > 6:
            return graph.op("Gather", product, graph.integer(0), axis=1)
        return graph.op("Squeeze", product, graph.ints([1]))
    if picked:
        return graph.op("Einsum", result, weights, equation="tkh,tk->th")
    if fused:
        return result
    return graph.op("Einsum", result, _spread(graph, indices, weights), equation="eth,te->th")


def outputs(graph: Graph, tokens: str, indices: str, weights: str) -> str:
    """What all experts give, side by side, weighed or picked."""
    spec = graph.spec
    shared: dict[str, str] = {}
    parts = [graph.op("Unsqueeze", _copy(graph, tokens, "", shared), graph.ints([1])) for _ in range(spec.experts)]
    every = graph.op("Concat", *parts, axis=1)
    if spec.variant % 2:
        wide = graph.op("Unsqueeze", indices, graph.ints([-1]))
        wide = graph.op("Expand", wide, graph.ints([1, 1, spec.hidden]))
        every = graph.op("GatherElements", every, wide, axis=1)
    else:
        weights = _spread(graph, indices, weights)
    product = graph.op("Mul", every, graph.op("Unsqueeze", weights, graph.ints([-1])))
    return graph.op("ReduceSum", product, graph.ints([1]), keepdims=0)


FORMS: dict[str, Callable[[Graph, str, str, str], str]] = {
    "dense": dense,
    "selected": selected,
    "masked": masked,
    "grouped": grouped,
    "batched": batched,
    "einsum": einsum,
    "outputs": outputs,
}
