"""Expert blocks (mixture of experts) in every spelling: which experts, which tokens, and what one expert does.

Anchored on the sum over the copies of a token's row. From there up through whatever order the exporter keeps the rows
in, to the tokens, the route weights, the chosen experts and the parameters. Nothing is matched by position or name: which
expert a parameter belongs to is read from the numbers that rows are picked by.

Source of the computation: Shazeer et al. 2017.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.bodies import bodies_of
from graphsurgery.analysis.given_attributes import first_reference
from graphsurgery.analysis.kept import kept
from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.patterns.experts.choices import may_choose
from graphsurgery.patterns.experts.contents import Pairs, Run
from graphsurgery.patterns.experts.dense import (
    SpreadReader,
    adds_nothing,
    compared,
    replace_weight,
    unchosen,
    without_weight,
)
from graphsurgery.patterns.experts.finish import exclusive, finish
from graphsurgery.patterns.experts.fused_operator import read_operator
from graphsurgery.patterns.experts.index_numbers import IndexReader
from graphsurgery.patterns.experts.loop import LoopReader
from graphsurgery.patterns.experts.packed import read_packed_operator
from graphsurgery.patterns.experts.parameters import ParameterReader
from graphsurgery.patterns.experts.rows import RowReader
from graphsurgery.patterns.experts.starts import end_of_pass, start_of
from graphsurgery.patterns.experts.terms import Step, UnreadableError, label
from graphsurgery.patterns.layer_names import layer_of
from graphsurgery.patterns.matcher import holds_graphs, index_of, is_op, readers, subgraphs
from graphsurgery.patterns.site import Done, Refusal
from graphsurgery.patterns.written import EXPERTS_PASS, is_written, layer_in, written_blocks
from graphsurgery.rewrite import PASS_KEY

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.analysis.shapes import ShapeView
    from graphsurgery.patterns.experts.dense import Spread
    from graphsurgery.patterns.experts.rows import Found
    from graphsurgery.patterns.experts.sites import ExpertSite
    from graphsurgery.patterns.experts.starts import Start

__all__ = ["find_experts"]


def find_experts(model: ir.Model, ends: Collection[ir.Node] | None = None) -> list[ExpertSite | Done | Refusal]:
    """Every expert block of the main graph, in graph order, then those of function bodies, each once for all its calls.

    Branches and loop bodies belong to the graph that holds them. What looks like a block and cannot be read is refused.
    What an earlier run has written is told as such, and not read again.

    Args:
        model: the model.
        ends: look at blocks of the main graph that end in one of these nodes only.
    """
    # Shapes are not asked for yet: after another pass they would have to be inferred anew for nothing.
    if not may_choose(model.graph, index_of(model)):
        return []
    shapes = shapes_of(model)
    constant: dict[Body, set[ir.Value]] = {}
    found: list[ExpertSite | Done | Refusal] = []
    for body in bodies_of(model, shapes):
        if ends is not None and body.function is not None:
            break
        constant[body] = kept(model, ("constants", body), functools.partial(_constant_values, body, constant))
        taken = first_reference(body.graph) if body.function is not None else None
        if taken is not None:
            found += _unread(model, body, *taken)
        else:
            found += _Finder(model, body, constant[body], ends).find()
    return [dataclasses.replace(site, id=f"experts:{number}") for number, site in enumerate(found)]


class _Finder:
    def __init__(self, model: ir.Model, body: Body, constant: set[ir.Value], ends: Collection[ir.Node] | None) -> None:
        self._body, self._ends = body, ends
        self._index = index_of(model, body.graph)
        self._shapes = body.view
        self._numbers = IndexReader(self._shapes)
        self._parameters = ParameterReader(self._shapes)
        self._constant = constant
        self._seen: set[ir.Value] = set()  # choices of experts whose block was read or refused

    def find(self) -> list[ExpertSite | Done | Refusal]:
        found: list[tuple[int, ExpertSite | Done | Refusal]] = []
        for node in self._index.nodes("ReduceSum", "MatMul", "Einsum"):
            site = self._summed(node) if self._looked_at(node) and self._is_end(node) else None
            if site is not None:
                found.append((self._index.order[node], site))
        loops = LoopReader(self._shapes, self._index, self._numbers, self._parameters, self._constant)
        for item in loops.sums(self._looked_at):
            if not self._is_end(item.node):
                continue
            try:
                block: ExpertSite | Refusal | None = loops.read(item)
            except UnreadableError as error:
                block = self._refusal(item.node, str(error))
            if block is None:
                continue
            found.append((self._index.order[item.node], block))
            self._seen.add(item.root)
        if self._ends is None:
            found += [(self._index.order[node], self._refusal(node, why)) for node, why in loops.compared()]
            found += self._passes()
            found += self._left_over()
            found += [
                (self._index.order[block[-1]], _done(block))
                for block in written_blocks(self._index, EXPERTS_PASS, "ReduceSum")
            ]
        for operator in ("MoE", "QMoE"):
            fused = self._index.nodes(operator, domain="com.microsoft")
            found += [(self._index.order[node], self._fused(node)) for node in fused if self._is_end(node)]
        found.sort(key=lambda item: item[0])
        return [self._placed(site) for _, site in found]

    def _looked_at(self, node: ir.Node) -> bool:
        """Whether a block may end in ``node``: what surgery has put into a branch or loop is no block of its own."""
        return not is_written(node, EXPERTS_PASS) and (
            node.graph is self._body.graph or PASS_KEY not in node.metadata_props
        )

    def _is_end(self, node: ir.Node) -> bool:
        """Whether blocks that end in ``node`` are asked for."""
        return self._ends is None or node in self._ends

    def _placed(self, site: ExpertSite | Done | Refusal) -> ExpertSite | Done | Refusal:
        """The site, with the function in which it is; a body that has several calls belongs to no layer."""
        body = self._body
        if body.function is None:
            return site
        layer = layer_of(body.calls[0].node) if len(body.calls) == 1 else None
        if isinstance(site, Refusal):
            return dataclasses.replace(site, layer=layer, reason=f"{site.reason}; {body.where}")
        if isinstance(site, Done):
            return dataclasses.replace(site, layer=layer, reason=f"{site.reason}; {body.where}")
        return dataclasses.replace(site, layer=layer, home=body)

    def _passes(self) -> list[tuple[int, ExpertSite | Refusal]]:
        """Blocks of one choice a token whose result is not summed: each of several choices may have a pass of its own."""
        picks: dict[ir.Value, list[ir.Node]] = {}
        for node in self._index.nodes("Gather"):
            if self._looked_at(node) and node.inputs[0] in self._constant and node.inputs[1] not in self._constant:
                chosen = self._numbers.chosen(node.inputs[1])
                if chosen is not None and chosen.root not in self._seen and self._numbers.top_k(chosen.root) == 1:
                    picks.setdefault(chosen.root, []).append(node)
        found: list[tuple[int, ExpertSite | Refusal]] = []
        for root, nodes in picks.items():
            end = end_of_pass(nodes, self._index, self._constant)
            rank = self._shapes.rank(end) if end is not None else None
            last = end.producer() if end is not None else None
            if end is None or last is None or rank != 2 or not any(map(self._picks_matrices, nodes)):
                continue
            try:
                reader = RowReader(self._shapes, self._numbers, self._parameters, self._constant, 1)
                reader.inside = exclusive(last, [root])
                term = reader.rows(end, ("tc", "f"), None)
                if not isinstance(term, Step) or list(reader.found.roots) != [root]:
                    continue
                site: ExpertSite | Refusal = self._chosen(end, term, reader.found, 1)
            except UnreadableError as error:
                site = self._refusal(last, str(error))
            self._seen.add(root)
            found.append((self._index.order[last], site))
        return found

    def _left_over(self) -> list[tuple[int, Refusal]]:
        """Choices of experts that pick matrices, or rows for several experts, and whose block was not found."""
        found: dict[ir.Value, ir.Node] = {}
        masks: dict[ir.Value, list[ir.Node]] = {}
        for node in self._index.nodes("Gather", "GatherND", "NonZero", "Range"):
            if not self._looked_at(node):
                continue
            if node.op_type in ("NonZero", "Range"):
                pairs = self._numbers.content(node.outputs[0])
                if isinstance(pairs, Pairs | Run):
                    masks.setdefault(pairs.root, []).append(node)
            elif node.inputs[0] in self._constant and self._picks_matrices(node):
                chosen = self._numbers.chosen(node.inputs[1])
                if chosen is not None:
                    found.setdefault(chosen.root, node)
        found.update({root: nodes[0] for root, nodes in masks.items() if len(nodes) > 1})
        found = {root: node for root, node in found.items() if _reaches_an_output(node)}
        return [
            (self._index.order[node], _unfound(node, root)) for root, node in found.items() if root not in self._seen
        ]

    def _picks_matrices(self, node: ir.Node) -> bool:
        """Whether what ``node`` picks from a parameter is multiplied as a matrix."""
        if (self._shapes.rank(node.inputs[0]) or 0) < 3 or node.inputs[1] in self._constant:  # type: ignore[arg-type]
            return False
        value = node.outputs[0]
        while True:
            following = readers(value)
            if len(following) != 1:
                return any(is_op(reader, "MatMul") for reader in following)
            if not is_op(following[0], "Transpose", "Cast", "DequantizeLinear", "Identity", "Mul", "Sub"):
                return is_op(following[0], "MatMul")
            value = following[0].outputs[0]

    def _summed(self, node: ir.Node) -> ExpertSite | Refusal | None:
        """The block whose copies ``node`` adds up along an axis of their own."""
        start = start_of(node, self._shapes, self._constant)
        if start is None:
            return None
        copies = start.copies
        reader = self._reader(node, start)
        found, spreads = reader.found, SpreadReader(self._shapes, self._numbers, reader)
        try:
            term = reader.added_up(start)
            if start.weights is not None and isinstance(term, Step):
                weight = reader.rows(start.weights, start.weight_axes, None)
                term = Step(ir.Node("", "Mul", (), num_outputs=1), (term, weight))
            if not isinstance(term, Step) or not found.matrices:
                return None
            if found.roots:
                return self._chosen(_flat(node, self._shapes), term, found, copies)
            if found.labelled is None or len(found.weights) != 1:
                return None
            value, labels = next(iter(found.weights.items()))
            spread = spreads.read(value, labels)
        except UnreadableError as error:
            bound = compared(next(iter(found.weights)), self._shapes) if len(found.weights) == 1 else None
            told = found.roots or spreads.met or (bound is not None and found.labelled is not None)
            return self._refusal(node, bound or str(error)) if told and found.matrices else None
        finally:
            if found.matrices:
                self._seen.update(found.roots, spreads.met)
        self._seen.add(spread.root)
        try:
            return self._dense(node, term, found, spread, copies)
        except UnreadableError as error:
            return self._refusal(node, str(error))

    def _reader(self, node: ir.Node, start: Start) -> RowReader:
        """A reader for the rows that ``node`` sums."""
        copies = start.copies
        reader = RowReader(self._shapes, self._numbers, self._parameters, self._constant, copies)
        if copies > 1:
            return reader
        # One expert a token: nothing need repeat the rows, so that only the choice tells the block from what is above.
        first = RowReader(self._shapes, self._numbers, self._parameters, self._constant, copies)
        with contextlib.suppress(UnreadableError):
            first.added_up(start)
        reader.inside = exclusive(node, [*first.found.roots, *first.found.weights])
        return reader

    def _chosen(self, output: ir.Value, term: Step, found: Found, copies: int) -> ExpertSite:
        """The block that runs the chosen experts."""
        root = next(iter(found.roots))
        if self._numbers.top_k(root) != copies:
            chosen = self._numbers.top_k(root)
            raise UnreadableError(f"it adds up {copies} rows a token, but {chosen} experts are chosen")
        plain = {("t", "c"), ("b", "s", "c")} | ({("tc",), ("tc", "1")} if copies == 1 else set())
        arranged = [value for value, axes in found.weights.items() if axes not in plain]
        if arranged:
            raise UnreadableError(f"value {arranged[0].name!r} holds weights in an order of its own")
        if found.labelled is not None:
            raise UnreadableError(f"parameter {found.labelled.name!r} has a part for each choice")
        form = "dense" if found.dense else "grouped" if found.grouped else "batched"
        return finish(output, term, found, form, self._shapes, self._index)

    def _dense(self, node: ir.Node, term: Step, found: Found, spread: Spread, experts: int) -> ExpertSite:
        """The block that runs all experts on all tokens."""
        if not adds_nothing(term, unchosen(spread)):
            raise UnreadableError("experts that are not chosen add something too")
        unweighted = spread.term is None or spread.weights is None
        replaced = without_weight(term) if unweighted else replace_weight(term, spread.term)
        if not isinstance(replaced, Step):
            raise UnreadableError("its experts multiply by no parameter")
        found.roots[spread.root] = None
        found.experts[spread.root] = experts
        found.weights = {} if spread.weights is None else {spread.weights: ("t", "c")}
        by_expert = spread.by_expert
        return finish(
            _flat(node, self._shapes), replaced, found, "dense", self._shapes, self._index, weights_by_expert=by_expert
        )

    def _fused(self, node: ir.Node) -> ExpertSite | Refusal:
        """The block that is one operator."""
        try:
            read = read_packed_operator if node.op_type == "QMoE" else read_operator
            return read(node, self._shapes)
        except UnreadableError as error:
            text = f"the expert block that is one operator, com.microsoft {label(node)}, cannot be read: {error}"
            return Refusal(id="", kinds=("experts", "op"), layer=layer_of(node), reason=text)

    def _refusal(self, node: ir.Node, reason: str) -> Refusal:
        text = f"the expert block that ends in {node.op_type} {node.name or node.outputs[0].name!r} cannot be read: {reason}"
        return Refusal(id="", kinds=("experts",), layer=layer_of(node), reason=text)


def _flat(node: ir.Node, shapes: ShapeView) -> ir.Value:
    """The sum that ``node`` makes, without the axis of one that a product leaves."""
    value = node.outputs[0]
    if not is_op(node, "MatMul"):
        return value
    following = readers(value)
    reader = following[0] if len(following) == 1 else None
    if reader is not None and not value.is_graph_output():
        if is_op(reader, "Squeeze", "Reshape"):
            return reader.outputs[0]
        attribute = reader.attributes.get("axis")
        axis = 0 if attribute is None else attribute.as_int()
        if is_op(reader, "Gather") and shapes.rank(reader.inputs[1]) == 0 and axis in (1, -2):  # type: ignore[arg-type]
            return reader.outputs[0]
    raise UnreadableError(f"the axis of one that {label(node)} leaves is read")


def _done(block: list[ir.Node]) -> Done:
    reason = "already written by an earlier run of this pass"
    return Done(id="", kinds=("experts",), layer=layer_in(block), reason=reason)


def _reaches_an_output(node: ir.Node) -> bool:
    """Whether anything comes of ``node``: what nothing reads in the end chooses nothing."""
    seen, pending = {node}, [node]
    while pending:
        item = pending.pop()
        if any(value.is_graph_output() for value in item.outputs):
            return True
        following = {reader for value in item.outputs for reader in readers(value)} - seen
        seen |= following
        pending += following
    return False


def _unfound(node: ir.Node, root: ir.Value) -> Refusal:
    reason = f"the sum of the experts that {root.name!r} chooses, for which {label(node)} picks, cannot be found"
    return Refusal(id="", kinds=("experts",), layer=layer_of(node), reason=reason)


def _unread(model: ir.Model, body: Body, node: ir.Node, attribute: ir.Attr) -> list[Refusal]:
    """A refusal for a body that may choose experts, where ``node`` takes an attribute that its calls differ in."""
    index = index_of(model, body.graph)
    routes = index.nodes("TopK", "NonZero", "OneHot") and index.nodes("MatMul", "Gemm", "Einsum")
    if not routes and not any(index.nodes(name, domain="com.microsoft") for name in ("MoE", "QMoE")):
        return []
    reason = (
        f"what may be experts is not read: {label(node)} takes attribute {attribute.name!r} from the calls, which do not "
        f"all give the same; {body.where}"
    )
    return [Refusal(id="", kinds=("experts",), layer=None, reason=reason)]


def _constant_values(body: Body, known: Mapping[Body, set[ir.Value]]) -> set[ir.Value]:
    """The values of ``body``, its branches and loops included, that depend on no input of the model.

    Args:
        body: the main graph or a function.
        known: those of the bodies that call it.
    """
    # An input that is left out depends on nothing either.
    constant: set[ir.Value | None] = {None}
    for formal in body.graph.inputs if body.function is not None else ():
        handed = body.arguments(formal)
        if handed and all(item in known.get(caller, ()) for item, caller in handed):
            constant.add(formal)
    _add_constants(body.graph, constant)
    return {value for value in constant if value is not None}


def _add_constants(graph: ir.Graph, constant: set[ir.Value | None]) -> None:
    constant.update(graph.initializers.values())
    for node in graph:
        if holds_graphs(node):
            for held in subgraphs(node):
                _add_constants(held, constant)
        elif constant.issuperset(node.inputs) and not node.op_type.startswith("Random"):
            constant.update(node.outputs)
