"""prune-last-token where what has the rows is the same for all batch rows, and not for all heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from graphsurgery.invariants import violations
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session
from tests.small_models import parse

if TYPE_CHECKING:
    from graphsurgery.site_report import SiteReport

RNG = np.random.default_rng(0)


def weight(name: str, *shape: int) -> str:
    numbers = ", ".join(f"{number:.4f}" for number in RNG.normal(size=shape).reshape(-1))
    return f"float[{','.join(map(str, shape))}] {name} = {{{numbers}}}"


# A bias of positions for each head, as T5 has it, which is wanted whole besides: rows of it are picked.
DECODER = f"""<ir_version: 9, opset_import: ["" : 17]>
decoder (int64[B,S] input_ids, int64[B,S] position_ids) => (float[B,S,12] logits, float[1,2,S,S] bias)
<{weight("table", 12, 8)}, {weight("wq", 8, 8)}, {weight("wk", 8, 8)}, {weight("wv", 8, 8)}, {weight("wo", 8, 8)},
 {weight("scale", 8)}, {weight("head", 8, 12)}, {weight("slopes", 1, 2, 1, 1)}, int64 zero = {{0}}, int64 step = {{1}},
 int64[4] apart = {{0, 0, 2, 4}}, int64[3] together = {{0, 0, 8}}, int64[1] one = {{1}}, float low = {{-1e9}}>
{{
    x = Gather <axis = 0> (table, input_ids)
    q_flat = MatMul (x, wq)
    k_flat = MatMul (x, wk)
    v_flat = MatMul (x, wv)
    q_apart = Reshape (q_flat, apart)
    k_apart = Reshape (k_flat, apart)
    v_apart = Reshape (v_flat, apart)
    q = Transpose <perm = [0, 2, 1, 3]> (q_apart)
    kt = Transpose <perm = [0, 2, 3, 1]> (k_apart)
    v = Transpose <perm = [0, 2, 1, 3]> (v_apart)
    raw = MatMul (q, kt)
    length = Shape <start = 1, end = 2> (input_ids)
    length_0 = Squeeze (length)
    column = Range (zero, length_0, step)
    row = Unsqueeze (column, one)
    late = Greater (column, row)
    distance = Sub (row, column)
    distance_f = Cast <to = 1> (distance)
    tilted = Mul (slopes, distance_f)
    bias = Where (late, low, tilted)
    scores = Add (raw, bias)
    p = Softmax <axis = -1> (scores)
    attended = MatMul (p, v)
    attended_1 = Transpose <perm = [0, 2, 1, 3]> (attended)
    attended_2 = Reshape (attended_1, together)
    o = MatMul (attended_2, wo)
    h = Add (x, o)
    norm = LayerNormalization <axis = -1> (h, scale)
    logits = MatMul (norm, head)
}}"""


# Batch and heads on one axis, as older exporters multiply, and a causal mask that is cut from a table of 16 positions.
MERGED = f"""<ir_version: 9, opset_import: ["" : 17]>
merged (int64[B,S] input_ids, int64[B,S] position_ids) => (float[B,S,12] logits)
<{weight("table", 12, 8)}, {weight("wq", 8, 8)}, {weight("wk", 8, 8)}, {weight("wv", 8, 8)}, {weight("wo", 8, 8)},
 {weight("scale", 8)}, {weight("head", 8, 12)}, int64 zero = {{0}}, int64 step = {{1}}, int64 most = {{16}},
 int64[4] apart = {{0, 0, 2, 4}}, int64[1] rest = {{-1}}, int64[1] none = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}},
 int64[1] four = {{4}}, int64[1] eight = {{8}}, int64[2] square = {{1, 2}}, float low = {{-1e9}}>
{{
    batch = Shape <start = 0, end = 1> (input_ids)
    length = Shape <start = 1, end = 2> (input_ids)
    merged = Concat <axis = 0> (rest, length, four)
    by_head = Concat <axis = 0> (batch, two, length, length)
    one_axis = Concat <axis = 0> (rest, length, length)
    values_by_head = Concat <axis = 0> (batch, two, length, four)
    together = Concat <axis = 0> (batch, length, eight)
    x = Gather <axis = 0> (table, input_ids)
    q_flat = MatMul (x, wq)
    k_flat = MatMul (x, wk)
    v_flat = MatMul (x, wv)
    q_apart = Reshape (q_flat, apart)
    k_apart = Reshape (k_flat, apart)
    v_apart = Reshape (v_flat, apart)
    q_heads = Transpose <perm = [0, 2, 1, 3]> (q_apart)
    k_heads = Transpose <perm = [0, 2, 1, 3]> (k_apart)
    v_heads = Transpose <perm = [0, 2, 1, 3]> (v_apart)
    q = Reshape (q_heads, merged)
    k = Reshape (k_heads, merged)
    v = Reshape (v_heads, merged)
    kt = Transpose <perm = [0, 2, 1]> (k)
    raw = MatMul (q, kt)
    raw_heads = Reshape (raw, by_head)
    numbers = Range (zero, most, step)
    numbers_2 = Unsqueeze (numbers, one)
    all_late = Greater (numbers, numbers_2)
    first = Concat <axis = 0> (none, none)
    last = Concat <axis = 0> (length, length)
    axes = Concat <axis = 0> (none, one)
    late = Slice (all_late, first, last, axes)
    masked = Where (late, low, raw_heads)
    p_heads = Softmax <axis = -1> (masked)
    p = Reshape (p_heads, one_axis)
    product = MatMul (p, v)
    attended = Reshape (product, values_by_head)
    attended_1 = Transpose <perm = [0, 2, 1, 3]> (attended)
    attended_2 = Reshape (attended_1, together)
    o = MatMul (attended_2, wo)
    h = Add (x, o)
    norm = LayerNormalization <axis = -1> (h, scale)
    logits = MatMul (norm, head)
}}"""


def pruned(text: str, index: str, keep: int) -> SiteReport:
    """The wanted rows of the logits as they were, everything else whole."""
    model, before = parse(text), session(parse(text))
    (site,) = Pipeline([f"prune-last-token{{depth=layer,index={index},keep={keep}}}"])(model).passes[0].sites
    assert not violations(model)
    after = session(model)
    for lengths in ((5, 3, 4), (4,), (2, 2)):
        size = max(lengths)
        positions = np.array([[place if place < length else -1 for place in range(size)] for length in lengths])
        feeds = {"input_ids": RNG.integers(0, 12, positions.shape), "position_ids": positions}
        whole, found = run(before, feeds), run(after, feeds)
        last = [length - 1 if index == "position" else size - 1 for length in lengths]
        rows = np.array([[max(0, end - keep + 1 + number) for number in range(keep)] for end in last])
        wanted = np.take_along_axis(whole["logits"], rows[:, :, None], axis=1)
        np.testing.assert_allclose(found["logits"], wanted, rtol=0, atol=1e-5)
        for name in set(whole) - {"logits"}:
            np.testing.assert_array_equal(found[name], whole[name])
    return site


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("index", ["position", "last"])
def test_rows_of_a_bias_of_heads_are_picked_for_each_batch_row(index: str, keep: int) -> None:
    site = pruned(DECODER, index, keep)
    assert "through 5 matrix products up to" in site.reason, site.reason
    assert "'bias'" in site.reason


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("index", ["position", "last"])
def test_batch_and_heads_on_one_axis_are_followed(index: str, keep: int) -> None:
    site = pruned(MERGED, index, keep)
    assert "through 5 matrix products up to" in site.reason, site.reason
    stopped = site.detail["stopped"]
    assert isinstance(stopped, list)
    assert "x: every row of 'x' is needed by a MatMul node" in stopped, stopped


def test_rows_are_not_selected_where_batch_and_heads_are_on_one_axis() -> None:
    """The queries are wanted whole on that axis: the climb ends in front of it, at the values that it attends."""
    text = MERGED.replace("float[B,S,12] logits)", "float[B,S,12] logits, float[M,S,4] q)")
    site = pruned(text, "position", 1)
    assert "through 2 matrix products up to" in site.reason, site.reason
    assert "'product'" in site.reason or "'attended'" in site.reason, site.reason


# The operator Attention with heads and features on one axis, and a mask of four axes that is the same for all batch rows.
OPERATOR = f"""<ir_version: 10, opset_import: ["" : 23]>
operator (int64[B,S] input_ids, int64[B,S] position_ids) => (float[B,S,12] logits)
<{weight("table", 12, 8)}, {weight("wq", 8, 8)}, {weight("wk", 8, 8)}, {weight("wv", 8, 8)}, {weight("wo", 8, 8)},
 {weight("scale", 8)}, {weight("head", 8, 12)}, int64 zero = {{0}}, int64 step = {{1}}, int64[1] one = {{1}}>
{{
    x = Gather <axis = 0> (table, input_ids)
    q = MatMul (x, wq)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    length = Shape <start = 1, end = 2> (input_ids)
    length_0 = Squeeze (length)
    column = Range (zero, length_0, step)
    row = Unsqueeze (column, one)
    seen = LessOrEqual (column, row)
    attended = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v, seen)
    o = MatMul (attended, wo)
    h = Add (x, o)
    norm = LayerNormalization <axis = -1> (h, scale)
    logits = MatMul (norm, head)
}}"""


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("axes", [0, 1, 2])
def test_rows_of_the_mask_of_an_operator_on_three_axes_are_picked(axes: int, keep: int) -> None:
    """A mask ``[S, T]``, ``[1, S, T]`` or ``[1, 1, S, T]``."""
    wide = "".join(f"\n    seen_{axis + 1} = Unsqueeze (seen_{axis}, first)" for axis in range(axes))
    text = OPERATOR.replace("int64[1] one", "int64[1] first = {0}, int64[1] one")
    text = text.replace("seen = LessOrEqual (column, row)", f"seen_0 = LessOrEqual (column, row){wide}")
    text = text.replace("(q, k, v, seen)", f"(q, k, v, seen_{axes})")
    site = pruned(text, "position", keep)
    assert "through 4 matrix products up to" in site.reason, site.reason


def test_an_encoder_is_pruned_with_a_warning() -> None:
    """Hidden states as the output, every row attending every other."""
    encoder = OPERATOR.replace("float[B,S,12] logits)", "float[B,S,8] last_hidden_state)")
    encoder = encoder.replace("norm = Layer", "last_hidden_state = Layer").replace("logits = MatMul (norm, head)", "")
    causal, both = parse(encoder), parse(encoder.replace("(q, k, v, seen)", "(q, k, v)"))
    warnings = [Pipeline(["prune-last-token"])(model).passes[0].warnings for model in (causal, both)]
    assert not any("causal" in text for text in warnings[0])
    assert any(text.startswith("No attention of this model is known to be causal") for text in warnings[1])
