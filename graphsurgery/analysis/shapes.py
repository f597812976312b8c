"""Symbolic shapes, element types and small tensor contents of every value of a model, without reading weights.

One forward walk, linear in nodes. What it believes, in this order:

1. initializers: their exact shape, and their contents where they are small integers inside the ``.onnx`` file;
2. graph inputs: the shapes that the file declares (two inputs that use one name have one size);
3. everything else: what the op's rule infers. Shapes that the file declares for intermediate values and outputs are
   often stale after earlier surgery, so they are used only where inference knows nothing at all of a value: its op has
   no rule (a vendor domain), or the rank of an input is not known.

A named size that is an axis of an integer or boolean input (token ids, positions, masks) is taken to be at least 1: no
language model runs on no tokens. Other named sizes, such as the length of a cache, may be 0.

A size that nobody knows is an anonymous unknown (``?7``), the same one wherever it is provably the same size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis._facts import ShapeValue
from graphsurgery.analysis._frame import Frame, Session
from graphsurgery.analysis.kept import drop_kept

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim

__all__ = ["ShapeValue", "ShapeView", "Shapes", "forget", "invalidate", "shapes_of"]

_CACHE_KEY = "graphsurgery.analysis.shapes"
_STALE_KEY = "graphsurgery.analysis.shapes_before"


class ShapeView:
    """Shapes of the values of one context: the main graph with its subgraphs, or a function body in one call."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    @property
    def frame(self) -> Frame:
        """The walk behind the view, for the analyses of this package."""
        return self._frame

    def shape(self, value: ir.Value) -> tuple[Dim, ...] | None:
        """The sizes of the axes of ``value``; None where its rank is unknown (or it is a sequence)."""
        return self._frame.fact(value).shape

    def rank(self, value: ir.Value) -> int | None:
        """The number of axes of ``value``; None where unknown."""
        shape = self._frame.fact(value).shape
        return None if shape is None else len(shape)

    def dim(self, value: ir.Value, axis: int) -> Dim | None:
        """The size of one axis of ``value`` (negative: from the end); None where unknown or where there is no such axis."""
        shape = self._frame.fact(value).shape
        if shape is None or not -len(shape) <= axis < len(shape):
            return None
        return shape[axis]

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """The element type of ``value``, inferred where the file does not say; None where unknown."""
        return self._frame.fact(value).dtype

    def shape_value(self, value: ir.Value) -> ShapeValue | None:
        """The symbolic contents of a small integer (or boolean) tensor; None where nothing is known of them."""
        return self._frame.fact(value).value

    def in_call(self, node: ir.Node) -> ShapeView:
        """The shapes inside the body of the local function that ``node`` calls, for this very call.

        Raises:
            ValueError: if ``node`` does not call a local function in this context.
        """
        frame = self._frame.calls.get(node)
        if frame is None:
            raise ValueError(
                f"Node {node.name!r} ({node.domain}::{node.op_type}) calls no local function in this context."
            )
        return ShapeView(frame)


class Shapes(ShapeView):
    """The shapes of a model as it is now; the model is not changed, later edits are not seen."""

    def __init__(self, model: ir.Model, earlier: Shapes | None = None) -> None:
        """Walk ``model``; time is linear in its nodes and no tensor outside the file is read.

        Args:
            model: the model.
            earlier: its shapes before an edit: what the edit has not touched is taken over.

        Raises:
            InputRefusedError: if a node has inputs or attributes that its operator does not allow.
        """
        before = None if earlier is None else earlier._frame  # noqa: SLF001
        unknowns = 0 if before is None else before.session.unknowns
        frame = Frame(Session(model, unknowns), model.opset_imports, None, earlier=before)
        for value in model.graph.inputs:
            frame.fact(value)
        frame.walk(model.graph)
        frame.forget_earlier()
        super().__init__(frame)

    @property
    def renewed(self) -> int:
        """How many nodes stand as they stood in the earlier shapes."""
        return self._frame.renewed


def shapes_of(model: ir.Model) -> Shapes:
    """The shapes of ``model``, computed once until :func:`invalidate`."""
    cached = model.meta.get(_CACHE_KEY)
    if not isinstance(cached, Shapes):
        earlier = model.meta.pop(_STALE_KEY, None)
        cached = Shapes(model, earlier if isinstance(earlier, Shapes) else None)
        model.meta[_CACHE_KEY] = cached
    return cached


def invalidate(model: ir.Model) -> None:
    """The cached shapes of ``model``, and all else that is kept of it, are out of date; to be called after every edit.

    An edit replaces nodes and edges. Where something may have changed the attributes of a node, call :func:`forget`.
    """
    drop_kept(model)
    cached = model.meta.pop(_CACHE_KEY, None)
    if cached is not None:
        model.meta[_STALE_KEY] = cached


def forget(model: ir.Model) -> None:
    """Forget all that is known of the shapes of ``model``, and all else that is kept of it."""
    drop_kept(model)
    model.meta.pop(_CACHE_KEY, None)
    model.meta.pop(_STALE_KEY, None)
