"""Mixtures of experts of any size in plain ONNX ops, with random weights, in the forms that exporters write.

:func:`write_mixture` makes the decoder of :mod:`_decoder` with experts in place of its MLP: ``grouped`` and ``batched`` as
transformers' exporter spells them, ``loop`` as Optimum does. :func:`write_wide` makes one dense expert block alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np
import onnx
from _decoder import Builder, DecoderSize, value_info
from onnx import TensorProto, helper

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MixtureSize", "WideSize", "write_mixture", "write_wide"]


@dataclasses.dataclass(frozen=True)
class MixtureSize(DecoderSize):
    """Sizes of a decoder with experts.

    Attributes:
        experts: E.
        top_k: K.
        expert_inner: width I of one expert.
        form: how the block is written.
    """

    experts: int = 32
    top_k: int = 4
    expert_inner: int = 384
    form: Literal["grouped", "batched", "loop"] = "grouped"


@dataclasses.dataclass(frozen=True)
class WideSize:
    """Sizes of one expert block."""

    experts: int = 128
    top_k: int = 8
    hidden: int = 1024
    inner: int = 512


def write_mixture(path: Path, size: MixtureSize, *, seed: int = 0, external: bool = True) -> int:
    """Write the decoder, with its weights in ``<path>.data`` or inside; inputs and outputs as ``write_decoder``.

    Returns:
        Number of nodes.
    """
    return _write(path, _MixtureBuilder(size, np.random.default_rng(seed)).model(), external)


def write_wide(path: Path, size: WideSize, *, seed: int = 0) -> int:
    """Write one dense block: ``x`` float32 ``[T, H]`` in, ``y`` ``[T, H]`` out; every expert runs on every token.

    Returns:
        Number of nodes.
    """
    mixture = MixtureSize(hidden=size.hidden, experts=size.experts, top_k=size.top_k, expert_inner=size.inner, layers=0)
    return _write(path, _MixtureBuilder(mixture, np.random.default_rng(seed)).wide_model(), external=True)


def _write(path: Path, model: onnx.ModelProto, external: bool) -> int:
    options = {"location": path.name + ".data", "size_threshold": 1024, "convert_attribute": False}
    onnx.save_model(model, path, save_as_external_data=external, **(options if external else {}))
    return len(model.graph.node)


class _MixtureBuilder(Builder):
    def __init__(self, size: MixtureSize, random: np.random.Generator) -> None:
        super().__init__(size, random)
        self._mixture = size

    def wide_model(self) -> onnx.ModelProto:
        rows: list[int | str] = ["T", self._mixture.hidden]
        indices, weights = self._route("x")
        self._dense("x", indices, weights, output="y")
        tensors = list(self._tensors.values())
        graph = helper.make_graph(self._nodes, "experts", [value_info("x", rows)], [value_info("y", rows)], tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    def _mlp(self, normed: str) -> str:
        mixture = self._mixture
        rows = self._op("Reshape", normed, self._ints("rows", [-1, mixture.hidden]))
        indices, weights = self._route(rows)
        write = {"grouped": self._grouped, "batched": self._batched, "loop": self._loop}[mixture.form]
        summed = write(rows, indices, weights)
        return self._op("Reshape", summed, self._op("Shape", normed))

    def _route(self, rows: str) -> tuple[str, str]:
        """Chosen experts and their weights ``[T, K]``: softmax, top K, renormalised."""
        mixture = self._mixture
        scores = self._op("Softmax", self._product(rows, "router", mixture.hidden, mixture.experts), axis=-1)
        best, indices = self._ops("TopK", 2, scores, self._ints("top_k", [mixture.top_k]), axis=-1, largest=1, sorted=1)
        total = self._op("ReduceSum", best, self._ints("last", [-1]), keepdims=1)
        return indices, self._op("Div", best, total)

    def _stack(self, name: str, rows: int, columns: int) -> str:
        values = self._random.standard_normal((self._mixture.experts, rows, columns), dtype=np.float32)
        return self._tensor(f"{self._scope}experts.{name}", values * min(rows, columns) ** -0.5)

    def _gated(self, both: str, axis: int) -> str:
        gate, up = self._ops("Split", 2, both, axis=axis, num_outputs=2)
        return self._op("Mul", self._op("Mul", gate, self._op("Sigmoid", gate)), up)

    # ---- dense ------------------------------------------------------------------------------------------------------

    def _dense(self, rows: str, indices: str, weights: str, output: str) -> None:
        """Every expert on every token, the others weighted with zero."""
        mixture = self._mixture
        experts, hidden, inner = mixture.experts, mixture.hidden, mixture.expert_inner
        tokens = self._op("Shape", rows, start=0, end=1)
        grid = self._op("Concat", tokens, self._ints("experts", [experts]), axis=0)
        zeros = self._op("Expand", self._floats("none", 0.0), grid)
        spread = self._op("ScatterElements", zeros, indices, weights, axis=1)
        repeated = self._op(
            "Expand", self._op("Unsqueeze", rows, self._ints("first", [0])), self._ints("copies", [experts, 1, 1])
        )
        both = self._op("MatMul", repeated, self._stack("gate_up", hidden, 2 * inner))
        down = self._op("MatMul", self._gated(both, 2), self._stack("down", inner, hidden))
        by_expert = self._op("Transpose", spread, perm=[1, 0])
        weighted = self._op("Mul", down, self._op("Unsqueeze", by_expert, self._ints("third", [2])))
        self._op("ReduceSum", weighted, self._ints("first", [0]), output=output, keepdims=0)

    # ---- batched ----------------------------------------------------------------------------------------------------

    def _batched(self, rows: str, indices: str, weights: str) -> str:
        """Each token K times, with a copy of its expert's weights each time."""
        mixture = self._mixture
        hidden, inner = mixture.hidden, mixture.expert_inner
        last = self._ints("last", [-1])
        apart = self._op("Unsqueeze", rows, self._ints("second", [1]))
        copies = self._op("Tile", apart, self._ints("tiles", [1, mixture.top_k, 1]))
        copies = self._op("Reshape", copies, self._ints("rows", [-1, hidden]))
        chosen = self._op("Unsqueeze", self._op("Reshape", indices, last), last)
        up = self._op("GatherND", self._stack("gate_up", 2 * inner, hidden), chosen)
        both = self._op("Squeeze", self._op("MatMul", up, self._op("Unsqueeze", copies, last)), last)
        gated = self._op("Unsqueeze", self._gated(both, 1), last)
        down = self._op("MatMul", self._op("GatherND", self._stack("down", hidden, inner), chosen), gated)
        flat = self._op("Unsqueeze", self._op("Reshape", weights, last), last)
        return self._summed(self._op("Mul", self._op("Squeeze", down, last), flat))

    def _summed(self, rows: str) -> str:
        mixture = self._mixture
        choices = self._op("Reshape", rows, self._ints("choices", [-1, mixture.top_k, mixture.hidden]))
        return self._op("ReduceSum", choices, self._ints("second", [1]), keepdims=0)

    # ---- grouped ----------------------------------------------------------------------------------------------------

    def _grouped(self, rows: str, indices: str, weights: str) -> str:
        """Rows sorted by expert, and the product of each expert on its own."""
        mixture = self._mixture
        hidden, inner = mixture.hidden, mixture.expert_inner
        last = self._ints("last", [-1])
        chosen = self._op("Reshape", indices, last)
        count = self._op("Reshape", self._op("Size", chosen), self._ints("one_size", [1]))
        ordered, order = self._ops("TopK", 2, chosen, count, axis=-1, largest=0, sorted=1)
        token = self._op("Unsqueeze", self._op("Div", order, self._ints("choices_of_token", mixture.top_k)), last)
        taken = self._op("GatherND", rows, token)
        place = self._op("Unsqueeze", order, last)
        weight = self._op("GatherND", self._op("Reshape", weights, last), place)
        ends = self._ends(ordered)
        ranges = [
            self._op("Range", first, end, self._ints("one", 1))
            for first, end in zip([self._ints("zero", 0), *ends], ends, strict=False)
        ]
        both = self._each(taken, ranges, self._stack("gate_up", hidden, 2 * inner))
        down = self._each(self._gated(both, 1), ranges, self._stack("down", inner, hidden))
        weighted = self._op("Mul", down, self._op("Unsqueeze", weight, last))
        places = self._op("Range", self._ints("zero", 0), self._op("Size", order), self._ints("one", 1))
        empty = self._op("Expand", self._ints("zero", 0), self._op("Shape", order))
        back = self._op("Unsqueeze", self._op("ScatterND", empty, place, places), last)
        return self._summed(self._op("GatherND", weighted, back))

    def _ends(self, ordered: str) -> list[str]:
        """Where the rows of each expert end: a histogram, added up."""
        experts = self._mixture.experts
        zeros = self._tensor("no_rows", np.zeros(experts))
        ones = self._op("Expand", self._floats("unit", 1.0), self._op("Shape", ordered))
        counts = self._op("ScatterElements", zeros, ordered, ones, axis=0, reduction="add")
        counts = self._op("Cast", counts, to=TensorProto.INT32)
        sums = self._op("Cast", self._op("CumSum", counts, self._ints("zero", 0)), to=TensorProto.INT64)
        parts = self._ops("Split", experts, sums, axis=0, num_outputs=experts)
        return [self._op("Squeeze", part, self._ints("first", [0])) for part in parts]

    def _each(self, rows: str, ranges: list[str], stack: str) -> str:
        experts = self._mixture.experts
        products = []
        for places, part in zip(ranges, self._ops("Split", experts, stack, axis=0, num_outputs=experts), strict=True):
            taken = self._op("Gather", rows, places, axis=0)
            products.append(self._op("MatMul", taken, self._op("Squeeze", part, self._ints("first", [0]))))
        return self._op("Concat", *products, axis=0)

    # ---- loop -------------------------------------------------------------------------------------------------------

    def _loop(self, rows: str, indices: str, weights: str) -> str:
        """Expert after expert as Optimum has them: its tokens by NonZero, their results scattered into zeros and added."""
        mixture = self._mixture
        first, second, third = (self._ints(name, [axis]) for axis, name in enumerate(("first", "second", "third")))
        depth = self._ints("depth", mixture.experts)
        mask = self._op("OneHot", indices, depth, self._ints("off_on", [0, 1]), axis=-1)
        mask = self._op("Transpose", mask, perm=[2, 1, 0])
        total = self._op("ConstantOfShape", self._op("Shape", rows))
        for expert in range(mixture.experts):
            chosen = self._op("Gather", mask, self._ints(f"expert_{expert}", expert), axis=0)
            places = self._op("NonZero", self._op("Cast", chosen, to=TensorProto.BOOL))
            places = self._op("Transpose", places, perm=[1, 0])
            choice, token = self._ops("Split", 2, places, self._ints("halves", [1, 1]), axis=1)
            choice, token = self._op("Squeeze", choice, second), self._op("Squeeze", token, second)
            taken = self._op("Gather", self._op("Unsqueeze", rows, first), token, axis=1)
            taken = self._op("Reshape", taken, self._ints("rows", [-1, mixture.hidden]))
            down = self._op("Mul", self._expert(expert, taken), self._weight_of_rows(weights, choice, token, third))
            row = self._op("Slice", total, self._ints("from", [0, 0]), self._ints("to", [1, 2**31]))
            update = self._op("Expand", down, self._op("Shape", row))
            place = self._op("Expand", self._op("Unsqueeze", token, second), self._op("Shape", update))
            zeros = self._op("ConstantOfShape", self._op("Shape", total))
            total = self._op("Add", total, self._op("ScatterElements", zeros, place, update, axis=0))
        return total

    def _expert(self, expert: int, rows: str) -> str:
        """One gated expert with weights of its own."""
        hidden, inner = self._mixture.hidden, self._mixture.expert_inner
        name = f"experts.{expert}."
        gate = self._product(rows, f"{name}gate_proj", hidden, inner)
        gate = self._op("Mul", gate, self._op("Sigmoid", gate))
        wide = self._op("Mul", gate, self._product(rows, f"{name}up_proj", hidden, inner))
        return self._product(wide, f"{name}down_proj", inner, hidden)

    def _weight_of_rows(self, weights: str, choice: str, token: str, third: str) -> str:
        """The weights of an expert's rows, looked up among those of all choices, ``[n, 1]``."""
        wide = self._op("Unsqueeze", weights, third)
        sizes = self._op("Shape", wide)
        choices = self._op("Gather", sizes, self._ints("place_1", 1), axis=0)
        width = self._op("Gather", sizes, self._ints("places_2", [2]), axis=0)
        flat = self._op("Add", choice, self._op("Mul", token, choices))
        found = self._op("Gather", self._op("Flatten", wide, axis=2), flat, axis=0)
        found = self._op("Reshape", found, self._op("Concat", self._ints("last", [-1]), width, axis=0))
        return self._op("Reshape", found, self._op("Concat", self._op("Shape", flat), width, axis=0))
