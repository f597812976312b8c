"""What layers are called: numbers and class names from scopes that exporters leave, where they do.

Names decide nothing but names: layers are found and proved by structure.
"""

from __future__ import annotations

import ast
import collections
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.bodies import Body

__all__ = ["class_of", "inner_name", "layer_in", "layer_number", "layer_of", "role_of"]

_NUMBERED = re.compile(r"(?:^|[./_])(?:layers?|blocks?|h|resblocks|block|stages?)[./_](\d+)(?![0-9])")
_SCOPE = re.compile(r".*?(?:^|[./_])(?:layers?|blocks?|h|resblocks|block)[./_]\d+[./_]?")
_VISION = re.compile(r"(?:^|[./_: ])(?:vision|visual|image_encoder|vit|siglip)(?:[./_]|$)", re.IGNORECASE)
_UNSAFE = re.compile(r"\W+")
_LAYER = re.compile(r"(?:layers?|blocks?|h|encoder|decoder)[._/](\d+)(?:[._/]|$)")
_VOTES = 200  # nodes that are asked


def _texts(node: ir.Node) -> Iterable[str]:
    props = node.metadata_props
    yield props.get("namespace", "")
    yield props.get("pkg.torch.onnx.name_scopes", "")
    yield node.name or ""
    if node.outputs:
        yield node.outputs[0].name or ""


def layer_number(nodes: Sequence[ir.Node]) -> int | None:
    """The number of the layer that most of ``nodes`` name; None where none does."""
    votes: collections.Counter[int] = collections.Counter()
    for node in nodes[-_VOTES:]:
        for text in _texts(node):
            found = _NUMBERED.search(text)
            if found is not None:
                votes[int(found[1])] += 1
                break
    return votes.most_common(1)[0][0] if votes else None


def class_of(nodes: Sequence[ir.Node]) -> str | None:
    """The class of the module that most of ``nodes`` are in, where the exporter tells (``LlamaDecoderLayer``)."""
    votes: collections.Counter[str] = collections.Counter()
    for node in nodes[-_VOTES:]:
        name = _class(node)
        # The base class of all modules tells nothing.
        if name and name != "Module":
            votes[name] += 1
    return votes.most_common(1)[0][0] if votes else None


def _class(node: ir.Node) -> str | None:
    """The class of the scope whose path ends in a number: ``model.layers.3: ...LlamaDecoderLayer``."""
    for entry in node.metadata_props.get("namespace", "").split("/"):
        path, _, kind = entry.partition(":")
        if re.search(r"\.\d+$", path.strip()) and kind.strip():
            return _UNSAFE.sub("_", kind.strip().rpartition(".")[2]).strip("_")
    props = node.metadata_props
    try:
        scopes = ast.literal_eval(props.get("pkg.torch.onnx.name_scopes", "[]"))
        kinds = ast.literal_eval(props.get("pkg.torch.onnx.class_hierarchy", "[]"))
    except (ValueError, SyntaxError):
        return None
    for path, kind in zip(scopes, kinds, strict=False):
        if re.search(r"\.\d+$", str(path)):
            return _UNSAFE.sub("_", str(kind).rpartition(".")[2]).strip("_")
    return None


def role_of(nodes: Sequence[ir.Node], *, keeps_state: bool) -> str:
    """``vision``, ``encoder`` or ``decoder``: a layer that keeps a cache is a decoder's, whatever its model is called; else by scopes."""
    texts = collections.Counter(
        role
        for node in nodes[-_VOTES:]
        for text in _texts(node)
        for role, pattern in (
            ("vision", _VISION),
            ("encoder", re.compile("encoder")),
            ("decoder", re.compile("decoder")),
        )
        if pattern.search(text.rpartition(":")[0] or text)
    )
    if texts["vision"] and not keeps_state:
        return "vision"
    if keeps_state or texts["decoder"] > texts["encoder"]:
        return "decoder"
    return "encoder" if texts["encoder"] else "layer"


def inner_name(name: str) -> str:
    """``name`` without the scope of its layer: ``self_attn.q_proj.weight`` of ``model.layers.3.self_attn.q_proj.weight``."""
    found = _SCOPE.match(name)
    short = name[found.end() :] if found is not None else name
    return short.strip("/.") or name


def layer_in(node: ir.Node, body: Body) -> int | None:
    """The layer of ``node`` in ``body``: that of the call where a function has one, none where it has several."""
    if body.function is None:
        return layer_of(node)
    return layer_of(body.calls[0].node) if len(body.calls) == 1 else None


def layer_of(node: ir.Node) -> int | None:
    """The layer that a node belongs to, by its scope metadata or its name."""
    for text in (node.metadata_props.get("namespace", ""), node.name or "", node.outputs[0].name or ""):
        match = _LAYER.search(text)
        if match is not None:
            return int(match[1])
    return None
