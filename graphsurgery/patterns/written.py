"""What earlier runs have written: told from what they left on their nodes, whatever form it has now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.patterns.layer_names import layer_of
from graphsurgery.rewrite import PASS_KEY, SITE_KEY

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphsurgery.patterns.matcher import GraphIndex

__all__ = ["BLOCKS_PASS", "EXPERTS_PASS", "is_written", "layer_in", "written_blocks"]

BLOCKS_PASS = "block-attention"
EXPERTS_PASS = "gather-experts"
"""Names of the passes that write whole blocks anew: their nodes carry them."""


def is_written(node: ir.Node, pass_name: str) -> bool:
    """Whether ``node`` is part of what ``pass_name`` has written."""
    return node.metadata_props.get(PASS_KEY) == pass_name


def written_blocks(index: GraphIndex, pass_name: str, *marks: str) -> list[list[ir.Node]]:
    """The blocks of a graph that earlier runs of a pass have written: the nodes of each, in graph order.

    Nodes of one run's site that read each other are a block, whether they are in one graph or in its branches and
    loops; a function that was inlined has left one in each place of its calls.

    Args:
        index: of the graph.
        pass_name: who wrote them.
        marks: operators of which each block has one; anything else is a part of a block that is a function of its own,
            or what blocks have in common.
    """
    nodes = [node for node in index.order if node.metadata_props.get(PASS_KEY) == pass_name]
    above = {node: node for node in nodes}

    def top(node: ir.Node) -> ir.Node:
        while above[node] is not node:
            above[node] = above[above[node]]
            node = above[node]
        return node

    for node in nodes:
        holder = index.owner.get(node.graph)  # type: ignore[arg-type]
        for other in (*(value.producer() for value in node.inputs if value is not None), holder):
            if other is not None and other in above and _site(other) == _site(node):
                above[top(other)] = top(node)
    blocks: dict[ir.Node, list[ir.Node]] = {}
    for node in nodes:
        blocks.setdefault(top(node), []).append(node)
    return [block for block in blocks.values() if any(node.op_type in marks for node in block)]


def layer_in(block: list[ir.Node]) -> int | None:
    """The layer that the nodes of a block name, the last of them first."""
    return next((layer for node in reversed(block) if (layer := layer_of(node)) is not None), None)


def _site(node: ir.Node) -> str:
    return node.metadata_props.get(SITE_KEY, "")
