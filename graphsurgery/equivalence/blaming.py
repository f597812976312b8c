"""Which pass made the node that ONNX Runtime complains of."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from graphsurgery.equivalence.protos import all_nodes
from graphsurgery.rewrite import PASS_KEY, SITE_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

__all__ = ["failing_node", "maker_of"]

_FAILING = re.compile(r"while running (\w+) node\. Name:'([^']*)'")
_NAMED = (re.compile(r"Node \((.*?)\) Op \("), re.compile(r"node name: ([^)]*)\)"), re.compile(r"Name:'([^']*)'"))


def failing_node(text: str) -> str:
    """The node at which a run ended, as ``in Gather 'name'``; empty where ``text`` tells of none."""
    found = _FAILING.search(text)
    return f"in {found[1]} {found[2]!r}" if found else ""


def maker_of(text: str, read: Callable[[], onnx.ModelProto]) -> str:
    """Pass and site of the nodes that an exception of ONNX Runtime names, the innermost last: ``pass at site``.

    Empty where no pass made them.  ``read`` gives the model; it is called only where the text names a node.
    """
    names = [name for pattern in _NAMED for name in pattern.findall(text) if name]
    if not names:
        return ""
    told: dict[str, str] = {}
    for node in all_nodes(read()):
        if node.name in names:
            props = {entry.key: entry.value for entry in node.metadata_props}
            if PASS_KEY in props and SITE_KEY in props:
                told[node.name] = f"{props[PASS_KEY]} at {props[SITE_KEY]}"
    return " and ".join(dict.fromkeys(told[name] for name in names if name in told))
