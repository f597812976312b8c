"""Expert blocks (mixture of experts) in every spelling: which experts, which tokens, and what one expert does.

Anchored on the sum over the copies of a token's row. From there up through whatever order the exporter keeps the rows
in, to the tokens, the route weights, the chosen experts and the parameters. Nothing is matched by position or name: which
expert a parameter belongs to is read from the numbers that rows are picked by.

Source of the computation: Shazeer et al. 2017.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.patterns.attention import layer_of
from graphsurgery.patterns.expert_sites import ExpertSite
from graphsurgery.patterns.experts_numbers import IndexReader
from graphsurgery.patterns.experts_parameters import ParameterReader
from graphsurgery.patterns.experts_rows import RowReader, reduced_axes
from graphsurgery.patterns.experts_terms import Step, UnreadableError, body_of
from graphsurgery.patterns.matcher import GraphIndex, is_op, readers
from graphsurgery.patterns.site import Refusal

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.patterns.experts_layout import Labels
    from graphsurgery.patterns.experts_rows import Found

__all__ = ["find_experts"]

_MAX_COPIES = 4096


def find_experts(model: ir.Model) -> list[ExpertSite | Refusal]:
    """Every expert block of the main graph, in graph order; what looks like one and cannot be read is refused."""
    return _Finder(model).find()


class _Finder:
    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._index = GraphIndex(model)
        self._shapes: Shapes = shapes_of(model)
        self._numbers = IndexReader(self._shapes)
        self._parameters = ParameterReader(self._shapes)
        self._constant = _constant_values(model)

    def find(self) -> list[ExpertSite | Refusal]:
        found: list[tuple[int, ExpertSite | Refusal]] = []
        for node in self._index.nodes("ReduceSum"):
            if node.graph is self._model.graph:
                site = self._summed(node)
                if site is not None:
                    found.append((self._index.order[node], site))
        found.sort(key=lambda item: item[0])
        return [dataclasses.replace(site, id=f"experts:{number}") for number, (_, site) in enumerate(found)]

    def _summed(self, node: ir.Node) -> ExpertSite | Refusal | None:
        """The block whose copies ``node`` adds up along an axis of their own."""
        start = self._summed_axes(node)
        if start is None:
            return None
        axes, copies = start
        reader = RowReader(self._shapes, self._numbers, self._parameters, self._constant, copies)
        try:
            term = reader.rows(node.inputs[0], axes, None)
            if not isinstance(term, Step) or not (reader.found.roots and reader.found.matrices):
                return None
            return self._site(node, node.outputs[0], term, reader.found, copies)
        except UnreadableError as error:
            if not (reader.found.roots and reader.found.matrices):
                return None
            return self._refusal(node, str(error))

    def _summed_axes(self, node: ir.Node) -> tuple[Labels, int] | None:
        source = node.inputs[0]
        shape = self._shapes.shape(source) if source is not None else None
        reduced = reduced_axes(node)
        if shape is None or reduced is None or len(reduced) != 1 or not 3 <= len(shape) <= 4:
            return None
        axis = reduced[0] % len(shape)
        copies = shape[axis]
        if not isinstance(copies, int) or not 1 <= copies <= _MAX_COPIES or not isinstance(shape[-1], int):
            return None
        if axis == len(shape) - 1:
            return None
        outer = [place for place in range(len(shape) - 1) if place != axis]
        names = ("t",) if len(outer) == 1 else ("b", "s")
        labels = dict(zip(outer, names, strict=True))
        labels[axis], labels[len(shape) - 1] = "c", "f"
        return tuple(labels[place] for place in range(len(shape))), copies

    # ---- the site -------------------------------------------------------------------------------------------------

    def _refusal(self, node: ir.Node, reason: str) -> Refusal:
        text = f"the expert block that ends in {node.op_type} {node.name or node.outputs[0].name!r} cannot be read: {reason}"
        return Refusal(id="", kinds=("experts",), layer=layer_of(node), reason=text)

    def _site(self, node: ir.Node, output: ir.Value, term: Step, found: Found, copies: int) -> ExpertSite:
        if len(found.roots) != 1:
            names = " and ".join(repr(item.name) for item in found.roots)
            raise UnreadableError(f"its rows are picked by different choices of experts ({names})")
        if len(found.weights) > 1:
            names = " and ".join(repr(item.name) for item in found.weights)
            raise UnreadableError(f"its rows meet different weights ({names})")
        root = next(iter(found.roots))
        weights = next(iter(found.weights), None)
        if self._numbers.top_k(root) != copies:
            raise UnreadableError(
                f"it adds up {copies} rows a token, but {self._numbers.top_k(root)} experts are chosen"
            )
        tokens = self._tokens(found, output)
        boundary = {item for item in (tokens, root, weights) if item is not None}
        interior = _interior(node, boundary)
        self._check_readers(found, interior, node)
        body = body_of(term)
        experts = next(iter({size for size in self._experts_of(body)}))
        hidden, many = self._shapes.dim(tokens, -1), self._shapes.shape(root)
        assert isinstance(hidden, int) and many is not None
        form = (
            "grouped"
            if any(is_op(inner, "Concat") for inner in interior) and "sorted" in self._spaces(found)
            else "batched"
        )
        return ExpertSite(
            id="",
            kinds=("experts", form),
            layer=layer_of(node),
            form=form,
            tokens=tokens,
            indices=root,
            weights=weights,
            output=output,
            body=body,
            experts=experts,
            top_k=copies,
            tokens_dim=_tokens_dim(many),
            hidden=hidden,
            interior=tuple(sorted(interior, key=self._index.order.__getitem__)),
        )

    def _spaces(self, found: Found) -> set[str]:
        return {"sorted"} if any(is_op(node, "Concat") for node in found.nodes) else set()

    def _experts_of(self, body) -> list[int]:
        from graphsurgery.patterns.expert_sites import ExpertTensor

        sizes = []
        for step in body:
            for item in step.operands:
                if isinstance(item, ExpertTensor):
                    shape = self._shapes.shape(item.values[0])
                    sizes.append(shape[0] if item.stacked else len(item.values))
        return sizes

    def _tokens(self, found: Found, output: ir.Value) -> ir.Value:
        rank = self._shapes.rank(output)
        if len(found.tokens) != 1:
            names = " and ".join(repr(item.name) for item in found.tokens)
            raise UnreadableError(f"its rows start from different values ({names})")
        views = next(iter(found.tokens.values()))
        if rank not in views:
            raise UnreadableError(f"its tokens are nowhere of the rank of its output {output.name!r}")
        return views[rank]

    def _check_readers(self, found: Found, interior: dict[ir.Node, None], last: ir.Node) -> None:
        for node in found.nodes:
            if node in interior:
                continue
            for value in node.outputs:
                if value.is_graph_output():
                    raise UnreadableError(f"its value {value.name!r} is an output of the model")
            outside = next(
                (r for value in node.outputs for r in readers(value) if r not in interior and r not in found.nodes),
                None,
            )
            if outside is not None:
                raise UnreadableError(
                    f"its value {node.outputs[0].name!r} is read elsewhere by {outside.op_type} {outside.name!r}"
                )
        for node in found.nodes:
            if node not in interior:
                raise UnreadableError(f"its value {node.outputs[0].name!r} is read elsewhere")


def _tokens_dim(shape):
    from graphsurgery.analysis.dims import product

    return product(shape[:-1])


def _interior(last: ir.Node, boundary: set[ir.Value]) -> dict[ir.Node, None]:
    """``last`` and the nodes above it, up to ``boundary``, that nothing else reads."""
    inside: dict[ir.Node, None] = {last: None}
    unread: dict[ir.Node, int] = {}
    pending = [last]
    while pending:
        node = pending.pop()
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if value is None or producer is None or value in boundary or producer in inside:
                continue
            left = unread.get(producer)
            if left is None:
                left = sum(len(item.uses()) + item.is_graph_output() for item in producer.outputs)
                left += sum(item in boundary for item in producer.outputs)
            unread[producer] = left - 1
            if left == 1:
                inside[producer] = None
                pending.append(producer)
    return inside


def _constant_values(model: ir.Model) -> set[ir.Value]:
    """The values of the main graph that depend on no input."""
    constant = {value for value in model.graph.initializers.values()}
    for node in model.graph:
        if all(value is None or value in constant for value in node.inputs) and not node.op_type.startswith("Random"):
            if not any(a.type.name.startswith("GRAPH") for a in node.attributes.values()):
                constant.update(node.outputs)
    return constant
