"""Bounds in the main graph and in the bodies of functions: who edits which, and what callers hand over.

The body of a function is rewritten once for all its calls. The bound comes in as a further parameter; what the callers
have whole, masks above all, they cut themselves and hand over cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.editing.column_bounds import Bounds, ColumnCutter, part_name
from graphsurgery.passes.bounding.writer import ReadWriter
from graphsurgery.rewrite import Rewrite

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body
    from graphsurgery.editing.slice_pushing import Cuts
    from graphsurgery.site_report import Boundary

__all__ = ["Editor", "Editors"]


class Editors:
    """The editors of the bodies of one model.

    Args:
        rewrite: of the main graph.
        bound: C, int64 ``[1]``, at the start of the main graph.
        pass_name: recorded in what is inserted.
        stops: for each body the values that are sliced themselves: caches after the write.
        site: id and scope of what is inserted before :meth:`at_site` says more.
    """

    def __init__(
        self,
        rewrite: Rewrite,
        bound: ir.Value,
        pass_name: str,
        stops: Mapping[Body, Container[ir.Value]],
        site: tuple[str, str],
    ) -> None:
        self.bound = bound
        self._main = rewrite
        self._pass_name = pass_name
        self._stops = stops
        self._made: dict[Body, Editor] = {}
        self._site = site

    def of(self, body: Body) -> Editor:
        """The editor of ``body``."""
        if body not in self._made:
            rewrite = self._main
            if body.function is not None:
                site_id, scope = self._site
                rewrite = Rewrite(self._main.model, self._pass_name, site_id, scope=scope, body=body)
            self._made[body] = Editor(self, rewrite, body, self._stops[body])
        return self._made[body]

    def at_site(self, site_id: str, scope: str) -> None:
        """What follows belongs to this site, wherever it is inserted."""
        self._site = (site_id, scope)
        self._main.at_site(site_id, scope)
        for editor in self._made.values():
            editor.rewrite.at_site(site_id, scope)

    def commit(self, order: Iterable[Body]) -> dict[Body, tuple[Boundary, ...]]:
        """Commit the edit of every body, callees first, since what they no longer take their callers need not make.

        Args:
            order: the bodies of the model, callers first.
        """
        touched = [body for body in order if body in self._made]
        return {body: self._made[body].rewrite.commit() for body in reversed(touched)}


class Editor:
    """Edits one body.

    Attributes:
        rewrite: where its nodes are inserted.
        bounds: C for each N of the body.
        cutter: makes what has C columns.
        writer: writes its sites.
    """

    def __init__(self, editors: Editors, rewrite: Rewrite, body: Body, stops: Container[ir.Value]) -> None:
        self.rewrite = rewrite
        self.bounds = Bounds(rewrite, body.view, self.bound)
        self.cutter = _Cutter(self, rewrite, body, stops)
        self.writer = ReadWriter(rewrite, body.view, self.cutter, self.bounds)
        self._editors = editors
        self._body = body

    def bound(self) -> ir.Value:
        """C, int64 ``[1]``: in a function a parameter."""
        if self._body.function is None:
            return self._editors.bound
        given = [self._editors.of(call.caller).bound() for call in self._body.calls]
        return self.rewrite.parameter(given, "bound")

    def handed_over(self, formal: ir.Value, cuts: Cuts) -> ir.Value | None:
        """The parameter ``formal`` as the callers cut it, each by its own number of slots; None where one cannot."""
        given = self._body.arguments(formal)
        sizes = [[caller.view.dim(value, axis) for axis, _ in cuts] for value, caller in given]
        if not given or any(size is None for each in sizes for size in each):
            return None
        if any(call.node.graph is not call.caller.graph for call in self._body.calls):
            # In a branch or loop of the caller.
            return None
        made = []
        for call, (value, caller) in zip(self._body.calls, given, strict=True):
            editor = self._editors.of(caller)
            spans = []
            for axis, _ in cuts:
                editor.rewrite.before(call.node)
                size = caller.view.dim(value, axis)
                assert size is not None
                spans.append((axis, editor.bounds.span(size, (value, axis))))
            made.append(editor.cutter.get(value, tuple(spans)))
        return self.rewrite.parameter(made, part_name(formal))


class _Cutter(ColumnCutter):
    """A cutter that lets callers cut what they hand over."""

    def __init__(self, editor: Editor, rewrite: Rewrite, body: Body, stops: Container[ir.Value]) -> None:
        super().__init__(rewrite, body.view, stops, editor.bounds)
        self._editor = editor

    def _make(self, value: ir.Value, cuts: Cuts) -> ir.Value:
        if value not in self._stops and self._rewrite.is_parameter(value):
            made = self._editor.handed_over(value, cuts)
            if made is not None:
                return made
        return super()._make(value, cuts)
