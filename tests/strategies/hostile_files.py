"""Damaged and hostile model files: bytes, protobuf fields and graphs changed at random, with the nesting kept right."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

__all__ = ["CANARY", "HOSTILE_LOCATIONS", "damaged", "mutate"]

CANARY = "secret.bin"
"""A file beside the model's directory, at which hostile locations point."""

HOSTILE_LOCATIONS = (
    f"../{CANARY}",
    f"./../{CANARY}",
    f"sub/../../{CANARY}",
    f"..\\{CANARY}",
    "/etc/passwd",
    "/dev/zero",
    "C:\\data",
    "//host/share",
    "",
    ".",
    "..",
    "sub/",
    "a\0b",
    "x" * 5000,
    "model.onnx",
    "\u202edata",
    "~/data",
    "data\n",
)
_NUMBERS = ("-1", "0", "1", "4096", str(2**31), str(2**63), str(2**64), "9" * 400, "1e3", "0x10", " 4", "٤", "", "NaN")
_DIMS = (-(2**63), -1, 0, 1, 3, 2**31, 2**40, 2**63 - 1)
_VARINTS = (0, 1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1)


# ---- bytes ----------------------------------------------------------------------------------------------------------------


def edit_bytes(chance: random.Random, data: bytes) -> bytes:
    """Flip, remove, repeat or cut bytes, wherever they are."""
    if not data:
        return data
    place = chance.randrange(len(data))
    length = chance.choice((1, 2, 8, 64, 1024))
    kind = chance.randrange(5)
    if kind == 0:
        return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]
    if kind == 1:
        return data[:place] + data[place + length :]
    if kind == 2:
        return data[:place] + data[place : place + length] + data[place:]
    if kind == 3:
        return data[:place] + chance.randbytes(length) + data[place + length :]
    return data[:place]


# ---- protobuf fields ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Field:
    """One field: its number and wire type, and its bytes behind the tag (without the length)."""

    number: int
    wire: int
    payload: bytes


def edit_fields(chance: random.Random, data: bytes) -> bytes:
    """Change one field somewhere in a serialised model; the lengths of the messages around it stay right."""
    return _edit_message(chance, data, onnx.ModelProto.DESCRIPTOR)


def _edit_message(chance: random.Random, data: bytes, kind: Any) -> bytes:
    try:
        fields = _parsed(data)
    except (IndexError, ValueError):
        return edit_bytes(chance, data)
    if not fields:
        return data
    # Messages are more interesting than their names and numbers: most of the time the edit is further in.
    inner = [number for number, field in enumerate(fields) if _message_of(kind, field) is not None]
    if inner and chance.random() < 0.8:
        chosen = fields[chance.choice(inner)]
        chosen.payload = _edit_message(chance, chosen.payload, _message_of(kind, chosen))
    else:
        _edit_field(chance, fields)
    return b"".join(_written(field) for field in fields)


def _message_of(kind: Any, field: _Field) -> Any:
    described = kind.fields_by_number.get(field.number)
    return described.message_type if described is not None and field.wire == 2 else None


def _edit_field(chance: random.Random, fields: list[_Field]) -> None:
    place = chance.randrange(len(fields))
    field = fields[place]
    match chance.randrange(8):
        case 0:
            del fields[place]
        case 1:
            fields.insert(place, dataclasses.replace(field))
        case 2:
            other = chance.randrange(len(fields))
            fields[place], fields[other] = fields[other], field
        case 3:
            field.number = chance.choice((0, 1, 2, 3, 5, 7, 20, 999, 2**29 - 1))
        case 4:
            field.wire = chance.choice((0, 1, 2, 3, 4, 5))
        case 5 if field.wire == 0:
            field.payload = _varint(chance.choice(_VARINTS))
        case 6:
            field.payload = chance.choice(
                (b"", b"\xff\xfe\xc0", b"\x00", b"a" * 3000, field.payload[: len(field.payload) // 2])
            )
        case _:
            field.payload = edit_bytes(chance, field.payload)


def _parsed(data: bytes) -> list[_Field]:
    fields, place = [], 0
    while place < len(data):
        tag, place = _read_varint(data, place)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            _, end = _read_varint(data, place)
        elif wire in (1, 5):
            end = place + (8 if wire == 1 else 4)
        elif wire == 2:
            length, place = _read_varint(data, place)
            end = place + length
        else:
            raise ValueError(wire)
        if end > len(data):
            raise ValueError(end)
        fields.append(_Field(number, wire, data[place:end]))
        place = end
    return fields


def _written(field: _Field) -> bytes:
    length = _varint(len(field.payload)) if field.wire == 2 else b""
    return _varint(field.number << 3 | field.wire) + length + field.payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("a number of more than ten bytes")


def edit_nesting(chance: random.Random, data: bytes) -> bytes:
    """Append nodes that nest far deeper than any parser goes: graph.node.attribute.g.node and so on."""
    inner = b""
    for _ in range(chance.choice((33, 40, 200, 2000))):
        attribute = _written(_Field(6, 2, inner)) + _written(_Field(20, 0, _varint(onnx.AttributeProto.GRAPH)))
        inner = _written(_Field(1, 2, _written(_Field(4, 2, b"If")) + _written(_Field(5, 2, attribute))))
    return data + _written(_Field(7, 2, inner))


# ---- graphs ---------------------------------------------------------------------------------------------------------------


def edit_graph(chance: random.Random, data: bytes) -> bytes:
    """Change what the model says; it stays a protobuf of the right form, if it was one."""
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception:  # whatever the library raises for what an earlier edit left
        return data
    graphs = _graphs(proto.graph)
    graph = chance.choice(graphs) if chance.random() < 0.3 else proto.graph
    chance.choice(EDITS)(chance, proto, graph)
    changed: bytes = proto.SerializeToString()
    return changed


def _graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    found = [graph]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += _graphs(attribute.g)
    return found


def _values(graph: onnx.GraphProto) -> list[str]:
    names = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
    return names + [name for node in graph.node for name in node.output]


def _any(chance: random.Random, items: Any) -> Any:
    return chance.choice(list(items)) if len(items) else None


def _rewire(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    """An input takes any other value: a later one makes a cycle, another one the wrong type or rank."""
    node = _any(chance, graph.node)
    if node is not None and node.input:
        node.input[chance.randrange(len(node.input))] = chance.choice([*_values(graph), "", "nowhere"])


def _rename_output(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    node = _any(chance, graph.node)
    if node is not None and node.output:
        node.output[chance.randrange(len(node.output))] = chance.choice([*_values(graph), "", "new"])


def _arity(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    node = _any(chance, graph.node)
    if node is None:
        return
    names = chance.choice((node.input, node.output))
    if names and chance.random() < 0.6:
        del names[chance.randrange(len(names))]
    else:
        names.append(chance.choice([*_values(graph), "", "extra"]))


def _operator(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    node = _any(chance, graph.node)
    if node is not None:
        other = _any(chance, graph.node)
        if chance.random() < 0.7:
            node.op_type = chance.choice(
                (other.op_type, "", "Nothing", "If", "Loop", "Scan", "Constant", "Reshape", "Split")
            )
        else:
            node.domain = chance.choice(("", "ai.onnx", "com.microsoft", "nobody"))


def _attribute(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    owners = [node for node in graph.node if node.attribute]
    node = _any(chance, owners)
    if node is None:
        return
    place = chance.randrange(len(node.attribute))
    attribute = node.attribute[place]
    match chance.randrange(6):
        case 0:
            del node.attribute[place]
        case 1:
            attribute.type = chance.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
        case 2:
            attribute.i = chance.choice((-(2**63), -100, -1, 0, 1, 100, 2**63 - 1))
            attribute.type = onnx.AttributeProto.INT
        case 3:
            attribute.ints[:] = [chance.choice((-(2**63), -1, 0, 1, 9, 2**62)) for _ in range(chance.randrange(5))]
            attribute.type = onnx.AttributeProto.INTS
        case 4:
            attribute.name = chance.choice(("", "axis", "perm", "to", "value"))
        case _:
            attribute.f = chance.choice((float("nan"), float("inf"), -0.0, 1e38))
            attribute.type = onnx.AttributeProto.FLOAT


def _tensor(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    tensor = _any(chance, graph.initializer)
    if tensor is None:
        return
    match chance.randrange(6):
        case 0:
            tensor.data_type = chance.choice((*range(30), 99, -1, 2**31 - 1))
        case 1 if tensor.dims:
            tensor.dims[chance.randrange(len(tensor.dims))] = chance.choice(_DIMS)
        case 2:
            tensor.dims.append(chance.choice(_DIMS))
        case 3 if tensor.dims:
            del tensor.dims[0]
        case 4:
            tensor.name = chance.choice((*_values(graph), ""))
        case _:
            tensor.raw_data = tensor.raw_data[: chance.randrange(len(tensor.raw_data) + 1)]


def _declared(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    infos = [*graph.input, *graph.output, *graph.value_info]
    info = _any(chance, infos)
    if info is None:
        return
    kind = info.type.tensor_type
    match chance.randrange(7):
        case 0:
            kind.elem_type = chance.choice((*range(30), 99, -1))
        case 1:
            kind.shape.dim.add(dim_value=chance.choice(_DIMS))
        case 2 if kind.shape.dim:
            del kind.shape.dim[chance.randrange(len(kind.shape.dim))]
        case 3 if kind.shape.dim:
            kind.shape.dim[chance.randrange(len(kind.shape.dim))].dim_value = chance.choice(_DIMS)
        case 4 if kind.shape.dim:
            kind.shape.dim[chance.randrange(len(kind.shape.dim))].dim_param = chance.choice(
                ("", "batch", "a+b*", "1", "\n", "S" * 999)
            )
        case 5:
            info.name = chance.choice((*_values(graph), ""))
        case _:
            info.type.ClearField("tensor_type")


def _remove(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    holder = chance.choice(
        (graph.node, graph.initializer, graph.input, graph.output, graph.value_info, proto.opset_import)
    )
    if holder:
        del holder[chance.randrange(len(holder))]


def _repeat(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    holder = chance.choice((graph.node, graph.initializer, graph.input, graph.output, graph.value_info))
    item = _any(chance, holder)
    if item is not None:
        holder.add().CopyFrom(item)


def _shuffle(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    chance.shuffle(nodes)
    del graph.node[:]
    graph.node.extend(nodes)


def _versions(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    if chance.random() < 0.3 or not proto.opset_import:
        proto.ir_version = chance.choice((-1, 0, 1, 3, 99, 2**63 - 1))
        return
    entry = _any(chance, proto.opset_import)
    entry.version = chance.choice((-5, 0, 1, 7, 12, 13, 21, 99, 2**62))


def _external(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    tensor = _any(chance, graph.initializer)
    if tensor is None:
        return
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    entries = {entry.key: entry.value for entry in tensor.external_data} or {"location": "model.onnx.data"}
    if chance.random() < 0.5:
        entries["location"] = chance.choice(HOSTILE_LOCATIONS)
    else:
        entries[chance.choice(("offset", "length"))] = chance.choice(_NUMBERS)
    if chance.random() < 0.1:
        entries.pop("location")
    del tensor.external_data[:]
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    if chance.random() < 0.1:
        tensor.external_data.add(key="location", value="twice")


def _nest(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    """An If within an If, and so on."""
    depth = chance.choice((2, 10, 25, 29))
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["deep"])], "b", [], [helper.make_empty_tensor_value_info("deep")]
    )
    for level in range(depth):
        node = helper.make_node("If", ["c"], [f"deep{level}"], then_branch=body, else_branch=onnx.GraphProto(name="e"))
        body = helper.make_graph([node], "b", [], [helper.make_empty_tensor_value_info(f"deep{level}")])
    graph.node.extend(body.node)


def _recursion(chance: random.Random, proto: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    """Functions that call each other, or themselves."""
    opset = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    names = ["f", "g"] if chance.random() < 0.5 else ["f"]
    for number, name in enumerate(names):
        call = helper.make_node(names[number - 1], ["a"], ["b"], domain="own")
        proto.functions.append(helper.make_function("own", name, ["a"], ["b"], [call], opset))
    proto.opset_import.append(helper.make_opsetid("own", 1))
    values = _values(graph)
    if values:
        graph.node.append(helper.make_node("f", [chance.choice(values)], ["from_f"], domain="own"))


EDITS: tuple[Callable[[Any, onnx.ModelProto, onnx.GraphProto], None], ...] = (
    _rewire,
    _rename_output,
    _arity,
    _operator,
    _attribute,
    _tensor,
    _declared,
    _remove,
    _repeat,
    _shuffle,
    _versions,
    _external,
    _nest,
    _recursion,
)


def mutate(chance: random.Random, data: bytes) -> bytes:
    """One to four edits of any kind."""
    for _ in range(chance.randint(1, 4)):
        edit = chance.choices((edit_bytes, edit_fields, edit_graph, edit_nesting), (10, 30, 60, 1))[0]
        data = edit(chance, data)
    return data


@st.composite
def damaged(draw: st.DrawFn, originals: dict[str, bytes]) -> tuple[str, bytes]:
    """Name and damaged bytes of one of ``originals``."""
    name = draw(st.sampled_from(sorted(originals)))
    chance = draw(st.randoms(use_true_random=False))
    return name, mutate(chance, originals[name])
