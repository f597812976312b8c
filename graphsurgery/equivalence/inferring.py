"""Dims of any value of a model file, where what reads a cache tells its size and the file declares a mere symbol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.errors import InputRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx
    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes, ShapeView
    from graphsurgery.equivalence.protos import Scope

__all__ = ["Inferred"]


class Inferred:
    """What shape inference knows of a model; it is only run when it is asked for the first time.

    What it gets wrong costs feeds, not truth: ONNX Runtime refuses a cache of another size.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._proto = proto
        self._shapes: Shapes | None = None
        self._model: ir.Model | None = None
        self._views: dict[int, tuple[Scope, ShapeView, dict[str, ir.Value]] | None] = {}

    def dims(self, scope: Scope, name: str) -> tuple[int | None, ...] | None:
        """Sizes of the axes of the value ``name``, None for those that are not fixed; None where the rank is unknown."""
        dims = self._shape(scope, name)
        return None if dims is None else tuple(dim if isinstance(dim, int) else None for dim in dims)

    def rows(self, scope: Scope, name: str) -> str | None:
        """The size of the first axis of the value ``name`` in symbols of the file, as it declares it."""
        found = self._view(scope)
        value = found[2].get(name) if found is not None else None
        size = value.shape[0] if value is not None and value.shape else None
        return None if size is None or isinstance(size, int) else size.value

    def _shape(self, scope: Scope, name: str) -> tuple[Dim, ...] | None:
        found = self._view(scope)
        return None if found is None or name not in found[2] else found[1].shape(found[2][name])

    def _view(self, scope: Scope) -> tuple[Scope, ShapeView, dict[str, ir.Value]] | None:
        # With the scope, which must live as long as its id stands for it.
        if id(scope) not in self._views:
            self._views[id(scope)] = self._made(scope)
        return self._views[id(scope)]

    def _made(self, scope: Scope) -> tuple[Scope, ShapeView, dict[str, ir.Value]] | None:
        if scope.caller is None:
            return self._whole(scope)
        outer, call = scope.caller
        found = self._view(outer)
        node = found[2][call.output[0]].producer() if found is not None and call.output[0] in found[2] else None
        if found is None or node is None or self._model is None:
            return None
        function = self._model.functions.get(node.op_identifier())
        if function is None:
            return None
        return scope, found[1].in_call(node), _by_name(function.inputs, function)

    def _whole(self, scope: Scope) -> tuple[Scope, ShapeView, dict[str, ir.Value]] | None:
        import onnx_ir as ir

        from graphsurgery.analysis.shapes import shapes_of

        try:
            self._model = ir.from_proto(self._proto)
            self._shapes = shapes_of(self._model)
        except (InputRefusedError, ir.serde.SerdeError):
            # Whether the model is sound is for ONNX Runtime to say.
            return None
        graph = self._model.graph
        return scope, self._shapes, _by_name([*graph.inputs, *graph.initializers.values()], graph)


def _by_name(values: Iterable[ir.Value], nodes: Iterable[ir.Node]) -> dict[str, ir.Value]:
    everything = [*values, *(value for node in nodes for value in node.outputs)]
    return {value.name: value for value in everything if value.name}
