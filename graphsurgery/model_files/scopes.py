"""Names in a protobuf that lead somewhere: each is made once, is there for whoever reads it, and calls fit what they call.

What is refused here ONNX Runtime refuses too, with a message of its own for each kind; what it accepts is accepted:
nodes of the main graph in any order, parameters and initializers of a body that hide outer names, and anything in
functions that nothing calls.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from graphsurgery.analysis._order import HOLDERS
from graphsurgery.errors import InputRefusedError, InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import onnx

    Identifier = tuple[str, str, str]

__all__ = ["refuse_broken_scopes"]

_GRAPH_TYPES = frozenset({5, 10})
"""GRAPH and GRAPHS of ``onnx.AttributeProto``."""
_DEFAULT = frozenset({"", "ai.onnx"})
_REMEDY = "export the model again, or repair it"


def refuse_broken_scopes(proto: onnx.ModelProto, path: Path, *, nested: bool = True) -> None:
    """Check the main graph and every function that it calls, their bodies included; linear in nodes.

    Args:
        proto: the model.
        path: its file, for the message.
        nested: False where no node is known to hold a graph: nothing is looked for in them then.

    Raises:
        InputRefusedError: a value is made twice or by nothing, two nodes of a graph share a name, or a call does not fit
            its function. The message names node and value.
    """
    functions = {(item.domain, item.name, item.overload): item for item in proto.functions}
    check = _Check(path, functions, nested)
    check.graph(proto.graph, _Scope("", None))
    for identifier in check.reached():
        check.function(functions[identifier])


class _Scope:
    """The names of one graph, in the graphs around it.

    Attributes:
        where: of what it is, for messages: empty for the main graph.
        made: names of all values that are there, wherever in the graph they are made.
        outer: the scope around it.
        so_far: names of values that are there already, as far as the walk has come.
    """

    def __init__(self, where: str, outer: _Scope | None) -> None:
        self.where = where
        self.outer = outer
        self.made: set[str] = set()
        self.so_far: set[str] = set()

    def knows(self, name: str) -> bool:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.made:
                return True
            scope = scope.outer
        return False

    def hides(self, name: str) -> bool:
        """Whether ``name`` is there in a graph around this one."""
        scope = self.outer
        while scope is not None:
            if name in scope.so_far:
                return True
            scope = scope.outer
        return False


class _Check:
    def __init__(self, path: Path, functions: dict[Identifier, onnx.FunctionProto], nested: bool) -> None:
        self._path = path
        self._functions = functions
        self._nested = nested
        self._called: dict[Identifier, None] = {}

    def reached(self) -> Iterator[Identifier]:
        """The functions that are called, those that the ones before them call included."""
        done = 0
        while done < len(self._called):
            # Looking at one function may append others.
            for identifier in list(self._called)[done:]:
                done += 1
                yield identifier

    def graph(self, graph: onnx.GraphProto, scope: _Scope) -> None:
        given = [item.name for item in graph.input]
        given += [item.name for item in graph.initializer]
        given += [item.values.name for item in graph.sparse_initializer]
        self._scope(given, graph.node, [item.name for item in graph.output], scope)

    def function(self, function: onnx.FunctionProto) -> None:
        scope = _Scope(f" of function {function.domain}::{function.name}", None)
        inputs = list(function.input)
        passed = next((name for name in function.output if name in inputs), None)
        if passed is not None:
            what = f"output {passed!r}{scope.where} is one of its inputs"
            raise self._refused(what, "put an Identity node between them")
        self._scope(inputs, function.node, list(function.output), scope)

    def _scope(
        self, given: Sequence[str], nodes: Iterable[onnx.NodeProto], outputs: Sequence[str], scope: _Scope
    ) -> None:
        nodes = list(nodes)  # each look at a repeated field makes its messages anew
        self._define(given, nodes, scope)
        made = scope.made
        read = set(itertools.chain.from_iterable([node.input for node in nodes]))
        known = all(name in made or not name or scope.knows(name) for name in read)
        if not known or self._functions or self._nested:
            for node in nodes:
                self._node(node, scope)
        for name in outputs:
            if name not in made:
                what = f"output {name!r}{scope.where or ' of the model'}"
                if scope.knows(name):
                    raise self._refused(f"{what} is a value of a graph around it", "put an Identity node there")
                raise self._refused(f"{what} is made by nothing")

    def _define(self, given: Sequence[str], nodes: Sequence[onnx.NodeProto], scope: _Scope) -> None:
        """All names of a graph, wherever in it they are made."""
        made = scope.made
        made.update(given)
        scope.so_far.update(given)
        # All at once, since nearly always no name is there twice; where one is, a second walk tells which.
        called = [name for node in nodes if (name := node.name)]
        results = [name for name in itertools.chain.from_iterable([node.output for node in nodes]) if name]
        count = len(made)
        made.update(results)
        if len(made) < count + len(results) or len(set(called)) < len(called):
            raise self._twice(given, nodes, scope.where)

    def _twice(self, given: Sequence[str], nodes: Sequence[onnx.NodeProto], where: str) -> InputRefusedError:
        """The error for the first node with the name of another, or that makes what is made already."""
        made = dict.fromkeys(given, "")
        names: set[str] = set()
        for node in nodes:
            called = node.name
            if called in names:
                return self._refused(f"two nodes{where} are called {called!r}", "give them names of their own")
            if called:
                names.add(called)
            for name in filter(None, node.output):
                if name in made:
                    first = f"node {made[name]!r} makes" if made[name] else "an input or initializer is"
                    return self._refused(f"{_who(node)}{where} makes {name!r}, which {first} already")
                made[name] = called or node.op_type
        raise InternalError(f"No name is there twice{where}.")

    def _node(self, node: onnx.NodeProto, scope: _Scope) -> None:
        where, made = scope.where, scope.made
        for name in node.input:
            if name and name not in made and not scope.knows(name):
                raise self._refused(f"{_who(node)}{where} reads {name!r}, which nothing makes")
        if self._functions:
            self._call(node, where)
        if self._nested:
            self._bodies(node, scope)

    def _bodies(self, node: onnx.NodeProto, scope: _Scope) -> None:
        """The graphs that ``node`` holds, if it does; what it makes is there from then on."""
        where = scope.where
        # Looking at the attributes of every node would take longer than all the rest.
        holds = node.domain not in _DEFAULT or node.op_type in HOLDERS
        for attribute in node.attribute if holds else ():
            if attribute.type in _GRAPH_TYPES:
                for body in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                    self.graph(body, _Scope(f" in a body of {_who(node)}{where}", scope))
        outputs = node.output
        if scope.outer is not None:
            hidden = next((name for name in outputs if name and scope.hides(name)), None)
            if hidden is not None:
                raise self._refused(f"{_who(node)}{where} makes {hidden!r}, which a graph around it has already")
        scope.so_far.update(outputs)

    def _call(self, node: onnx.NodeProto, where: str) -> None:
        identifier = (node.domain, node.op_type, node.overload)
        function = self._functions.get(identifier)
        if function is None:
            return
        self._called.setdefault(identifier)
        for what, ours, theirs in (
            ("values to", node.input, function.input),
            ("results of", node.output, function.output),
        ):
            if len(ours) > len(theirs):
                verb = "hands" if what == "values to" else "takes"
                callee = f"{what} function {function.domain}::{function.name}"
                raise self._refused(f"{_who(node)}{where} {verb} {len(ours)} {callee}, which has {len(theirs)}")

    def _refused(self, what: str, remedy: str = _REMEDY) -> InputRefusedError:
        return InputRefusedError(f"{self._path}: {what}; {remedy}.")


def _who(node: onnx.NodeProto) -> str:
    return f"node {node.name!r} ({node.op_type})" if node.name else f"a node {node.op_type}"
