"""Generated attention over caches of a fixed size: writes, layouts, reads and masks as exporters and hand-made graphs have them.

Two layers, so that a wrong row of the first is seen in the caches of the second. Alphabet: B batch, S query length,
N slots, W window, G KV heads, R query heads for each, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

__all__ = ["StaticSpec", "build", "feeds_of", "static_specs"]

WRITES = ("scatter_elements", "scatter_nd", "index_put", "transposed_nd", "where", "tensor_scatter", "function")
LAYOUTS = ("bgnd", "bngd", "gbnd", "flat", "packed")
READS = ("plain", "indexed", "index_input", "function")
MASKS = ("range", "given", "given_bool", "padding", "constant", "shape_of_cache")


@dataclasses.dataclass(frozen=True)
class StaticSpec:
    """One model.

    Attributes:
        write: how new keys and values come into the cache.
        layout: order of the axes of caches: ``bgnd``, ``bngd``, ``gbnd``, ``flat`` is ``[B, N, G*D]``, ``packed``
            is ``[B*G, N, D]``.
        read: the cache as it is, or slots by index: computed with those that are not in use sent to 0, or an input;
            ``function``: by a local function that takes the number of slots.
        mask: where the mask comes from.
        fused: the operator Attention in place of products and softmax.
        expand: key heads are repeated by Expand and Reshape; else one query head for each.
        sink: a column is joined to the scores and dropped behind the softmax.
        guard: NaN guard behind the softmax.
        rows_first: batch and heads are one axis in the products.
        window: W of the first layer's own cache and mask; None for none.
        slots: N; None where symbolic.
        groups: G.
        shape_reader: an output that tells the shape of the scores.
        batch_index: continuous batching: caches have more rows than the call, an input says which are its own.
    """

    write: str
    layout: str
    read: str
    mask: str
    fused: bool
    expand: bool
    sink: bool
    guard: bool
    rows_first: bool
    window: int | None
    slots: int | None
    groups: int
    shape_reader: bool = False
    batch_index: bool = False

    @property
    def opset(self) -> int:
        """24 where an operator of it is used."""
        return 24 if self.write == "tensor_scatter" or self.fused else 18


@st.composite
def static_specs(draw: st.DrawFn) -> StaticSpec:
    """Any combination that computes something."""
    write = draw(st.sampled_from(WRITES))
    fused = draw(st.integers(0, 4)) == 0
    layout = draw(st.sampled_from(LAYOUTS)) if write in ("scatter_elements", "where") else "bgnd"
    if write == "index_put":
        layout = "bngd"
    read = draw(st.sampled_from(READS)) if layout == "bgnd" else "plain"
    return StaticSpec(
        write=write,
        layout=layout,
        read=read,
        mask=draw(st.sampled_from(MASKS)),
        fused=fused,
        expand=draw(st.booleans()),
        sink=not fused and draw(st.booleans()),
        guard=not fused and draw(st.booleans()),
        rows_first=not fused and draw(st.integers(0, 3)) == 0,
        window=draw(st.sampled_from([None, None, 6])),
        slots=draw(st.sampled_from([None, 12])),
        groups=draw(st.integers(1, 3)),
        shape_reader=not fused and draw(st.integers(0, 3)) == 0,
        batch_index=write == "scatter_nd" and read in ("plain", "indexed") and draw(st.booleans()),
    )


D, VOCABULARY = 4, 11


class _Builder:
    def __init__(self, spec: StaticSpec) -> None:
        self.spec = spec
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(7)

    def op(self, op_type: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        out = out or f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [out], name=f"n{len(self.nodes)}", **attributes))
        return out

    def const(self, array: Any, dtype: Any = np.int64) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.const(self.rng.standard_normal(shape) * 0.5, np.float32)

    def size(self, value: str, axis: int) -> str:
        return self.op("Slice", self.op("Shape", value), self.const([axis]), self.const([axis + 1]))


def build(spec: StaticSpec) -> onnx.ModelProto:
    """The model of ``spec``."""
    b = _Builder(spec)
    heads, hidden = spec.groups * (2 if spec.expand else 1), 8
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"]),
        helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["b", "s"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", VOCABULARY])]
    x = b.op("Gather", b.weight(VOCABULARY, hidden), "input_ids")
    for layer in range(2):
        slots = (
            spec.window if spec.window and layer == 0 else spec.slots or ("w" if spec.window and layer == 0 else "n")
        )
        names = [f"past_{kind}.{layer}" for kind in ("key", "value")]
        for name in names:
            dims = _dims(spec, slots)
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
            outputs.append(helper.make_tensor_value_info(f"{name}_RetainedState", TensorProto.FLOAT, dims))
        x = _layer(b, x, layer, heads, hidden)
    if spec.mask in ("given", "given_bool"):
        kind = TensorProto.FLOAT if spec.mask == "given" else TensorProto.BOOL
        for layer in range(2) if spec.window else (1,):
            slots = spec.window if spec.window and layer == 0 else spec.slots or "n"
            inputs.append(helper.make_tensor_value_info(f"attention_mask.{layer}", kind, ["b", 1, "s", slots]))
    if spec.mask == "padding":
        inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["b", spec.slots or "n"]))
    if spec.read == "index_input":
        inputs.append(helper.make_tensor_value_info("ctx_indices", TensorProto.INT64, [1, 1, spec.slots or "n"]))
    if spec.batch_index:
        inputs.append(helper.make_tensor_value_info("batch_index", TensorProto.INT64, ["b", 1]))
    if spec.shape_reader:
        outputs.append(helper.make_tensor_value_info("scores_shape", TensorProto.INT64, [4 - spec.rows_first]))
    b.op("MatMul", x, b.weight(hidden, VOCABULARY), out="logits")
    functions = [_ctx_scatter(spec.opset)] if spec.write == "function" else []
    functions += [_ctx_gather(spec.opset)] if spec.read == "function" else []
    graph = helper.make_graph(b.nodes, "static", inputs, outputs, b.weights)
    imports = [helper.make_opsetid("", spec.opset), helper.make_opsetid("com.qualcomm.cloud", 1)]
    model = helper.make_model(graph, opset_imports=imports[: 2 if functions else 1], functions=functions, ir_version=10)
    onnx.checker.check_model(model)
    return model


def _dims(spec: StaticSpec, slots: int | str) -> list[int | str]:
    g = spec.groups
    orders: dict[str, list[int | str]] = {
        "bgnd": ["full_batch" if spec.batch_index else "b", g, slots, D],
        "bngd": ["b", slots, g, D],
        "gbnd": [g, "b", slots, D],
        "flat": ["b", slots, g * D],
        "packed": [f"b*{g}" if g > 1 else "b", slots, D],
    }
    return orders[spec.layout]


def _layer(b: _Builder, x: str, layer: int, heads: int, hidden: int) -> str:
    spec = b.spec
    query = _heads(b, b.op("MatMul", x, b.weight(hidden, heads * D)), heads)
    found = []
    for kind in ("key", "value"):
        new = b.op("MatMul", x, b.weight(hidden, spec.groups * D))
        name = f"past_{kind}.{layer}"
        written = _write(b, name, new)
        found.append(_repeat(b, _read(b, written, kind, layer), heads))
    attended = _attend(b, query, found[0], found[1], layer, heads)
    joined = b.op("Reshape", b.op("Transpose", attended, perm=[0, 2, 1, 3]), b.const([0, 0, heads * D]))
    return b.op("Add", x, b.op("MatMul", joined, b.weight(heads * D, hidden)))


def _heads(b: _Builder, value: str, heads: int) -> str:
    return b.op("Transpose", b.op("Reshape", value, b.const([0, 0, heads, D])), perm=[0, 2, 1, 3])


# ---- writes -------------------------------------------------------------------------------------------------------


def _write(b: _Builder, past: str, new: str) -> str:
    """The cache after the write, ``[B, G, N, D]``; it is an output in its own layout."""
    spec, out = b.spec, f"{past}_RetainedState"
    grouped = _heads(b, new, spec.groups)
    way = {"tensor_scatter": _tensor_scatter, "function": _call}.get(spec.write)
    if way is not None:
        return way(b, past, grouped, out)
    if spec.write in ("scatter_nd", "transposed_nd", "index_put"):
        return _scatter_nd(b, past, new, grouped, out)
    updates, axis = grouped, 2
    if spec.layout == "bngd":
        updates, axis = b.op("Transpose", grouped, perm=[0, 2, 1, 3]), 1
    elif spec.layout == "gbnd":
        updates = b.op("Transpose", grouped, perm=[1, 0, 2, 3])
    elif spec.layout == "flat":
        updates, axis = new, 1
    elif spec.layout == "packed":
        length = b.size("input_ids", 1)
        updates = b.op("Reshape", grouped, b.op("Concat", b.const([-1]), length, b.const([D]), axis=0))
        axis = 1
    if spec.write == "scatter_elements":
        made = b.op("ScatterElements", past, _spread(b, updates, axis), updates, axis=axis, out=out)
    else:
        made = _where(b, past, updates, axis, out)
    perms = {"bngd": [0, 2, 1, 3], "gbnd": [1, 0, 2, 3]}
    if spec.layout in perms:
        return b.op("Transpose", made, perm=perms[spec.layout])
    if spec.layout == "flat":
        return _heads(b, made, spec.groups)
    if spec.layout == "packed":
        sizes = b.op("Concat", b.size("input_ids", 0), b.const([spec.groups]), b.size(made, 1), b.const([D]), axis=0)
        return b.op("Reshape", made, sizes)
    return made


def _spread(b: _Builder, updates: str, axis: int) -> str:
    """Positions as indices of the shape of ``updates``."""
    spec = b.spec
    places = {"bgnd": [1, 3], "bngd": [2, 3], "gbnd": [0, 3], "flat": [2]}
    if spec.layout == "packed":
        repeated = b.op("Tile", b.op("Unsqueeze", "position_ids", b.const([1])), b.const([1, spec.groups, 1]))
        flat = b.op("Reshape", repeated, b.op("Concat", b.const([-1]), b.size("input_ids", 1), axis=0))
        index = b.op("Unsqueeze", flat, b.const([2]))
    else:
        index = b.op("Unsqueeze", "position_ids", b.const(places[spec.layout]))
    return b.op("Expand", index, b.op("Shape", updates))


def _scatter_nd(b: _Builder, past: str, new: str, grouped: str, out: str) -> str:
    spec = b.spec
    if spec.write == "transposed_nd":
        # One list of slots for all rows, as torch.export writes index_copy.
        slots = b.op("Unsqueeze", _first_row(b), b.const([-1]))
        moved = b.op("Transpose", past, perm=[2, 0, 1, 3])
        made = b.op("ScatterND", moved, slots, b.op("Transpose", grouped, perm=[2, 0, 1, 3]))
        return b.op("Transpose", made, perm=[1, 2, 0, 3], out=out)
    batch, length = b.size("input_ids", 0), b.size("input_ids", 1)
    zero, one = b.const(0), b.const(1)
    rows = b.op("Range", zero, b.op("Squeeze", batch), one)
    if spec.batch_index:
        rows = b.op("Reshape", "batch_index", b.const([-1]))
    if spec.write == "index_put":
        # cache[rows, positions] = new on [B, N, G, D].
        shape = b.op("Concat", batch, length, b.const([1]), axis=0)
        pieces = [
            b.op("Expand", b.op("Unsqueeze", rows, b.const([1, 2])), shape),
            b.op("Expand", b.op("Unsqueeze", "position_ids", b.const([2])), shape),
        ]
        updates = b.op("Reshape", new, b.const([0, 0, spec.groups, D]))
        made = b.op("ScatterND", past, b.op("Concat", *pieces, axis=-1), updates, out=out)
        return b.op("Transpose", made, perm=[0, 2, 1, 3])
    shape = b.op("Concat", batch, b.const([spec.groups]), length, b.const([1]), axis=0)
    heads = b.op("Range", zero, b.const(spec.groups), one)
    away = b.op("Where", b.op("Less", "position_ids", zero), b.const(2**31 - 1), "position_ids")
    kept = away if spec.groups == 3 else "position_ids"
    pieces = [
        b.op("Expand", b.op("Unsqueeze", rows, b.const([1, 2, 3])), shape),
        b.op("Expand", b.op("Unsqueeze", heads, b.const([0, 2, 3])), shape),
        b.op("Expand", b.op("Unsqueeze", kept, b.const([1, 3])), shape),
    ]
    return b.op("ScatterND", past, b.op("Concat", *pieces, axis=-1), grouped, out=out)


def _first_row(b: _Builder) -> str:
    return b.op("Squeeze", b.op("Slice", "position_ids", b.const([0]), b.const([1])), b.const([0]))


def _where(b: _Builder, past: str, updates: str, axis: int, out: str) -> str:
    """One token a call where the mask over slots says so; the new one is broadcast."""
    slots = b.op("Range", b.const(0), b.op("Squeeze", b.size(past, axis)), b.const(1))
    first = b.op("Squeeze", b.op("Slice", "position_ids", b.const([0, 0]), b.const([1, 1]), b.const([0, 1])))
    hit = b.op("Equal", slots, first)
    rank = {"flat": 3, "packed": 3}.get(b.spec.layout, 4)
    hit = b.op("Unsqueeze", hit, b.const([item for item in range(rank) if item != axis]))
    return b.op("Where", hit, updates, past, out=out)


def _tensor_scatter(b: _Builder, past: str, grouped: str, out: str) -> str:
    first = b.op("Squeeze", b.op("Slice", "position_ids", b.const([0]), b.const([1]), b.const([1])), b.const([1]))
    return b.op("TensorScatter", past, grouped, first, axis=2, out=out)


def _call(b: _Builder, past: str, grouped: str, out: str) -> str:
    node = helper.make_node("CtxScatter", [past, "position_ids", grouped], [out], domain="com.qualcomm.cloud")
    node.name = f"n{len(b.nodes)}"
    b.nodes.append(node)
    return out


def _ctx_scatter(opset: int) -> onnx.FunctionProto:
    """The write of efficient-transformers: positions by batch row and head."""
    make = helper.make_node
    nodes = [
        make("Constant", [], ["two"], value_ints=[2]),
        make("Constant", [], ["three"], value_ints=[1, 3]),
        make("Shape", ["updates"], ["shape"]),
        make("Unsqueeze", ["positions", "three"], ["index"]),
        make("Expand", ["index", "shape"], ["spread"]),
        make("ScatterElements", ["data", "spread", "updates"], ["written"], axis=2),
    ]
    imports = [helper.make_opsetid("", opset)]
    inputs = ["data", "positions", "updates"]
    return helper.make_function("com.qualcomm.cloud", "CtxScatter", inputs, ["written"], nodes, imports)


def _ctx_gather(opset: int) -> onnx.FunctionProto:
    """The read of efficient-transformers: as many slots as the last parameter says."""
    make = helper.make_node
    nodes = [
        make("Constant", [], ["one"], value_ints=[1]),
        make("Constant", [], ["last"], value_ints=[-1]),
        make("Shape", ["data"], ["lead"], start=0, end=2),
        make("Reshape", ["slots", "one"], ["wide"]),
        make("Concat", ["lead", "wide"], ["shape"], axis=0),
        make("Expand", ["indices", "shape"], ["spread"]),
        make("Unsqueeze", ["spread", "last"], ["points"]),
        make("GatherND", ["data", "points"], ["read"], batch_dims=2),
    ]
    imports = [helper.make_opsetid("", opset)]
    return helper.make_function(
        "com.qualcomm.cloud", "CtxGather", ["data", "indices", "slots"], ["read"], nodes, imports
    )


# ---- reads, masks, products ---------------------------------------------------------------------------------------


def _read(b: _Builder, cache: str, kind: str, layer: int) -> str:
    spec = b.spec
    if spec.read == "plain" and spec.batch_index:
        return b.op("Gather", cache, b.op("Squeeze", "batch_index", b.const([1])), axis=0)
    if spec.read == "plain" or (spec.read == "index_input" and spec.window and layer == 0):
        return cache
    last = b.op("Unsqueeze", b.op("ReduceMax", "position_ids", b.const([1]), keepdims=1), b.const([1]))
    if spec.read == "index_input":
        index = "ctx_indices"
    else:
        index = b.op("Range", b.const(0), b.op("Squeeze", b.size(cache, 2)), b.const(1))
        index = b.op("Unsqueeze", index, b.const([0, 1]))
    unused = b.op("Greater", index, last)
    index = b.op("Where", unused, b.const(0), index)
    if spec.read == "function":
        read = b.op("CtxGather", cache, index, b.op("Squeeze", b.size(cache, 2)), domain="com.qualcomm.cloud")
    elif spec.batch_index:
        # Rows, heads and slots as one list of points.
        sizes = [b.size("input_ids", 0), b.const([spec.groups]), b.size(cache, 2), b.const([1])]
        shape = b.op("Concat", *sizes, axis=0)
        heads = b.const(np.arange(spec.groups).reshape(1, -1, 1, 1))
        pieces = [b.op("Unsqueeze", "batch_index", b.const([2, 3])), heads, b.op("Unsqueeze", index, b.const([-1]))]
        read = b.op("GatherND", cache, b.op("Concat", *[b.op("Expand", item, shape) for item in pieces], axis=-1))
    else:
        shape = b.op("Slice", b.op("Shape", cache), b.const([0]), b.const([3]))
        spread = b.op("Unsqueeze", b.op("Expand", index, shape), b.const([-1]))
        read = b.op("GatherND", cache, spread, batch_dims=2)
    if kind == "value":
        read = b.op("Where", b.op("Unsqueeze", unused, b.const([-1])), b.const(0, np.float32), read)
    return read


def _repeat(b: _Builder, value: str, heads: int) -> str:
    spec = b.spec
    if heads == spec.groups:
        return value
    batch, slots = b.size(value, 0), b.size(value, 2)
    groups, repeats, features = b.const([spec.groups]), b.const([heads // spec.groups]), b.const([D])
    wide = b.op("Unsqueeze", value, b.const([2]))
    wide = b.op("Expand", wide, b.op("Concat", batch, groups, repeats, slots, features, axis=0))
    return b.op("Reshape", wide, b.op("Concat", batch, b.const([heads]), slots, features, axis=0))


def _mask(b: _Builder, keys: str, layer: int) -> str:
    """A condition ``[B, 1, S, N]``, or what is added where it is given so."""
    spec = b.spec
    own = bool(spec.window) and layer == 0
    if spec.mask in ("given", "given_bool"):
        return f"attention_mask.{layer if spec.window else 1}"
    rows = b.op("Unsqueeze", "position_ids", b.const([1, 3]))
    cache = f"past_key.{layer}"
    axis = {"bgnd": 2, "bngd": 1, "gbnd": 2, "flat": 1, "packed": 1}[spec.layout]
    if spec.mask == "constant" and (own or spec.slots):
        columns = b.const(np.arange((spec.window if own else spec.slots) or 0).reshape(1, 1, 1, -1))
    else:
        source = (keys, 2) if spec.mask == "shape_of_cache" else (cache, axis)
        columns = b.op("Range", b.const(0), b.op("Squeeze", b.size(*source)), b.const(1))
        columns = b.op("Unsqueeze", columns, b.const([0, 1, 2]))
    condition = b.op("LessOrEqual", columns, rows)
    if own:
        condition = b.op("And", condition, b.op("Greater", columns, b.op("Sub", rows, b.const(spec.window))))
    if spec.mask == "padding" and not own:
        real = b.op("Cast", b.op("Unsqueeze", "attention_mask", b.const([1, 2])), to=TensorProto.BOOL)
        condition = b.op("And", condition, real)
    return condition


def _attend(b: _Builder, query: str, keys: str, values: str, layer: int, heads: int) -> str:
    spec = b.spec
    mask = _mask(b, keys, layer)
    if spec.fused:
        return b.op("Attention", query, keys, values, mask, scale=0.5)
    flat = spec.rows_first
    if flat:
        length = b.size(query, 2)
        query = b.op("Reshape", query, b.op("Concat", b.const([-1]), length, b.const([D]), axis=0))
        slots = b.size(keys, 2)
        shape = b.op("Concat", b.const([-1]), slots, b.const([D]), axis=0)
        keys, values = (b.op("Reshape", item, shape) for item in (keys, values))
        keys = b.op("Transpose", keys, perm=[0, 2, 1])
    else:
        keys = b.op("Transpose", keys, perm=[0, 1, 3, 2])
    raw = b.op("MatMul", query, keys)
    if spec.shape_reader and layer == 1:
        b.op("Shape", raw, out="scores_shape")
    scores = b.op("Mul", raw, b.const(0.5, np.float32))
    if flat:
        sizes = b.op("Concat", b.size("input_ids", 0), b.const([heads]), length, slots, axis=0)
        scores = b.op("Reshape", scores, sizes)
    if spec.mask == "given":
        scores = b.op("Add", scores, mask)
    else:
        scores = b.op("Where", mask, scores, b.const(np.finfo(np.float32).min, np.float32))
    if spec.sink:
        wide = b.op("Concat", b.size("input_ids", 0), b.const([heads]), b.size("input_ids", 1), b.const([1]), axis=0)
        sinks = b.op("Expand", b.const(b.rng.standard_normal((1, heads, 1, 1)), np.float32), wide)
        scores = b.op("Concat", scores, sinks, axis=-1)
    attended = b.op("Softmax", scores, axis=-1)
    if spec.guard:
        attended = b.op("Where", b.op("IsNaN", attended), b.const(0, np.float32), attended)
    if spec.sink:
        ends = b.const([-1]) if heads % 2 else b.size(values, 1 if flat else 2)
        attended = b.op("Slice", attended, b.const([0]), ends, b.const([-1]))
    if flat:
        attended = b.op("Reshape", attended, b.op("Concat", b.const([-1]), length, slots, axis=0))
        product = b.op("MatMul", attended, values)
        sizes = b.op("Concat", b.size("input_ids", 0), b.const([heads]), length, b.const([D]), axis=0)
        return b.op("Reshape", product, sizes)
    return b.op("MatMul", attended, values)


# ---- feeds --------------------------------------------------------------------------------------------------------


def feeds_of(spec: StaticSpec, batch: int, length: int, past: int, slots: int, seed: int) -> dict[str, np.ndarray]:
    """What a call is fed that adds ``length`` tokens behind ``past``; every slot of the caches holds something."""
    rng = np.random.default_rng(seed)
    positions = np.broadcast_to(np.arange(past, past + length), (batch, length))
    feeds: dict[str, np.ndarray] = {
        "input_ids": rng.integers(0, VOCABULARY, (batch, length)),
        "position_ids": positions.copy(),
        "attention_mask": np.broadcast_to(np.arange(slots) < past + length, (batch, slots)).astype(np.int64),
        "ctx_indices": np.arange(slots).reshape(1, 1, -1),
        "batch_index": rng.permutation(batch + 2)[:batch, None],
    }
    if batch > 1 and past > 1:
        # The first slots of later rows are padding.
        feeds["attention_mask"][1:, :1] = 0
    for layer in range(2):
        own = spec.window if spec.window and layer == 0 else slots
        for kind in ("key", "value"):
            sizes = {"b": batch, "full_batch": batch + 2, "n": slots, "w": slots}
            dims = [sizes.get(str(dim), dim) for dim in _dims(spec, own)]
            if spec.layout == "packed":
                dims[0] = batch * spec.groups
            feeds[f"past_{kind}.{layer}"] = rng.standard_normal([int(dim) for dim in dims]).astype(np.float32)
        allowed = np.arange(own)[None, :] <= positions[0][:, None]
        allowed &= np.arange(own)[None, :] > positions[0][:, None] - own
        allowed = np.broadcast_to(allowed, (batch, 1, length, own))
        given = allowed if spec.mask == "given_bool" else np.where(allowed, 0.0, np.finfo(np.float32).min)
        feeds[f"attention_mask.{layer}"] = given.astype(np.bool_ if spec.mask == "given_bool" else np.float32)
    return feeds
