"""Carrying out a plan of :mod:`graphsurgery.analysis.folding`: constants go in, branches are inlined, dead nodes go."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.names import Names
from graphsurgery.patterns.matcher import all_graphs, subgraphs
from graphsurgery.rewrite import remove_dead

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np

    from graphsurgery.analysis.folding import BodyPlan, Folding, FunctionVariant
    from graphsurgery.rewrite import Rewrite

__all__ = ["FoldedBody", "apply_folding"]


@dataclasses.dataclass
class FoldedBody:
    """A function body after the edit.

    Attributes:
        function: the function: the one that was there, or a copy for some of its calls.
        variant: what it is for.
        values: the value of the body for each value that ``variant`` speaks of; empty where they are the same.
    """

    function: ir.Function
    variant: FunctionVariant
    values: Mapping[ir.Value, ir.Value]


def apply_folding(rewrite: Rewrite, folding: Folding) -> list[FoldedBody]:
    """Edit the model as ``folding`` says; the caller commits ``rewrite``.

    A function whose calls need different constants gets a copy for each kind of call; one that is not called any more
    is removed.

    Returns:
        The bodies of all functions that are called.
    """
    model = rewrite.model
    bodies = _bodies(model, folding)
    by_variant = {id(body.variant): body.function for body in bodies}
    called = {id(variant) for variants in folding.functions.values() for variant in variants}
    for plan, values in [(folding.main, {}), *((body.variant.plan, body.values) for body in bodies)]:
        for node, variant in plan.calls.items() if plan is not None else ():
            call = _moved_node(node, values)
            function = by_variant[id(variant)]
            call.op_type, call.overload = function.name, function.overload
    editor = _Editor(rewrite, [folding.main, *(body.variant.plan for body in bodies if body.variant.plan is not None)])
    editor.edit(folding.main, {}, None)
    for body in bodies:
        if body.variant.plan is not None:
            editor.edit(body.variant.plan, body.values, body.function)
    assert called
    return bodies
