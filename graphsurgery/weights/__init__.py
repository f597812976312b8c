"""Weights that surgery makes out of the weights of the export: expressions over source tensors.

A pass says what a new weight *is*, not what its bytes are: a :class:`View` of a source, a :class:`Stack` of parts, a
:class:`Transpose`, nested as needed. ``Rewrite.weight`` registers the initializer. Views, and stacks whose parts lie
one behind the other in one file, are references to the data file that is there; everything else is streamed into a new
data file when the model is saved. No weight is read before that. The expression is kept in the initializer's metadata
(:data:`WEIGHT_KEY`), so that whoever checks the result can derive its value from the sources.
"""

from graphsurgery.weights.evaluating import evaluate
from graphsurgery.weights.expressions import (
    Expression,
    Part,
    SourceName,
    Stack,
    Transpose,
    View,
    dtype_of,
    shape_of,
    simplify,
    sources_of,
)
from graphsurgery.weights.obstacles import obstacle
from graphsurgery.weights.records import WEIGHT_KEY, parse_record, record_of
from graphsurgery.weights.tensors import WeightTensor, bytes_moved, realise

__all__ = [
    "WEIGHT_KEY",
    "Expression",
    "Part",
    "SourceName",
    "Stack",
    "Transpose",
    "View",
    "WeightTensor",
    "bytes_moved",
    "dtype_of",
    "evaluate",
    "obstacle",
    "parse_record",
    "realise",
    "record_of",
    "shape_of",
    "simplify",
    "sources_of",
]
