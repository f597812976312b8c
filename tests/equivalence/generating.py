"""Models decoded side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.equivalence.builders import (
    Graph,
    copy,
)

if TYPE_CHECKING:
    import onnx

    from graphsurgery.equivalence import VerifyReport


def lengths(report: VerifyReport) -> dict[str, tuple[int, ...]]:
    return {prompt.name: prompt.lengths for prompt in report.prompts}


def behind(model: onnx.ModelProto, output: str, write) -> onnx.ModelProto:
    """A copy in which ``write(graph, value)`` makes the output anew from what it was; what else reads it stays."""
    model = copy(model)
    for node in model.graph.node:
        node.input[:] = ["was" if name == output else name for name in node.input]
        node.output[:] = ["was" if name == output else name for name in node.output]
    g = Graph()
    write(g, "was")
    g.nodes[-1].output[0] = output
    model.graph.node.extend(g.nodes)
    model.graph.initializer.extend(g.tensors)
    return model
