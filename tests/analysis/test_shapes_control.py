"""Shapes through If, Loop, Scan and sequences, against ORT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from graphsurgery.analysis.shapes import Shapes
from tests.analysis.ort_truth import check_against_ort

HEADER = '<ir_version: 10, opset_import: ["": 20]>\n'


def run(text: str, **feeds: np.ndarray) -> dict[str, str]:
    """Check the model against ORT for the feeds; inferred shapes of the main graph's values as text."""
    proto = onnx.parser.parse_model(HEADER + text)
    model = ir.from_proto(proto)
    agreement = check_against_ort(model, proto, Path(), feeds)
    assert agreement.errors == []
    shapes = Shapes(model)
    shown = {}
    for node in model.graph:
        for value in node.outputs:
            shape = shapes.shape(value)
            shown[str(value.name)] = "none" if shape is None else " ".join(str(size) for size in shape)
    return shown


X = np.ones((2, 5, 8), np.float32)


def test_if_keeps_what_both_branches_agree_on():
    text = """g (float[B, S, 8] x, bool c) => (float y) {
        y = If (c) <
            then_branch = then () => (float[B, S, 4] a) {
                n = Constant <value_ints = [0, 0, 4]> ()
                four = Constant <value_ints = [4]> ()
                two = Constant <value_ints = [2]> ()
                zero = Constant <value_ints = [0]> ()
                a = Slice (x, zero, four, two)
            },
            else_branch = otherwise () => (float[B, S, 8] b) { b = Identity (x) }
        >
        z = Neg (y)
    }"""
    for taken in (True, False):
        shown = run(text, x=X, c=np.array(taken))
        assert shown["y"] == shown["z"] == "B S ?1"


def test_if_with_a_known_condition_has_the_shape_of_the_branch_taken():
    text = """g (float[B, S, 8] x) => (float y) {
        c = Constant <value_int = 1> ()
        t = Cast <to = 9> (c)
        y = If (t) <
            then_branch = then () => (float[B, 8, S] a) { a = Transpose <perm = [0, 2, 1]> (x) },
            else_branch = otherwise () => (float[B, S, 8] b) { b = Identity (x) }
        >
    }"""
    assert run(text, x=X)["y"] == "B 8 S"


LOOP = """g (float[B, S, 8] x, int64 trips) => (float y) {{
    yes = Constant <value = bool {{1}}> ()
    last, collected = Loop (trips, yes, x) <body = step (int64 i, bool go, float[a, b, c] carried)
        => (bool on, float[d, e, f] next, float[h, j, k] part) {{
        {body}
    }}>
    after = Neg (last)
}}"""


def test_loop_carries_a_stable_shape_and_stacks_scan_outputs_by_trip_count():
    shown = run(
        LOOP.format(body="on = Identity (go) next = Sigmoid (carried) part = Neg (carried)"), x=X, trips=np.array(3)
    )
    assert shown["last"] == "B S 8"
    assert shown["collected"] == "max(?2, 0) B S 8"


def test_loop_with_a_size_that_grows_gives_an_unknown_for_it_alone():
    body = "on = Identity (go) next = Concat <axis = 1> (carried, carried) part = Neg (x)"
    shown = run(LOOP.format(body=body), x=X, trips=np.array(3))
    batch, rows, width = shown["last"].split(" ")
    assert (batch, width) == ("B", "8")
    assert rows.startswith("?")
    assert shown["after"] == shown["last"]


def test_loop_that_may_stop_early_has_an_unknown_number_of_scan_rows():
    body = """limit = Constant <value_int = 1> () on = Less (i, limit) next = Sigmoid (carried) part = Neg (carried)"""
    shown = run(LOOP.format(body=body), x=X, trips=np.array(5))
    assert shown["collected"].startswith("?")
    assert shown["collected"].endswith(" B S 8")


def test_loop_that_carries_a_counter_does_not_keep_its_first_value():
    text = """g (int64[N] x, int64 trips) => (int64 y) {
        yes = Constant <value = bool {1}> ()
        start = Constant <value_int = 2> ()
        last = Loop (trips, yes, start) <body = step (int64 i, bool go, int64 count) => (bool on, int64 next) {
            on = Identity (go)
            next = Add (count, count)
        }>
        rows = Unsqueeze (last, zero)
        zero = Constant <value_ints = [0]> ()
        filled = ConstantOfShape (rows)
    }"""
    shown = run(text, x=np.ones(3, np.int64), trips=np.array(2))
    assert shown["filled"].startswith("?")


def test_loop_that_collects_parts_in_a_sequence_knows_all_but_the_joined_axis():
    text = """g (float[B, S, 8] x, int64 trips) => (float y) {
        yes = Constant <value = bool {1}> ()
        none = SequenceEmpty <dtype = 1> ()
        parts = Loop (trips, yes, none) <body = step (int64 i, bool go, seq(float[B, q, 8]) have)
            => (bool on, seq(float[B, q2, 8]) more) {
            on = Identity (go)
            one = Constant <value_ints = [1]> ()
            shape = Constant <value_ints = [1]> ()
            from = Reshape (i, shape)
            to = Add (from, one)
            part = Slice (x, from, to, one)
            more = SequenceInsert (have, part)
        }>
        y = ConcatFromSequence <axis = 1> (parts)
        count = SequenceLength (parts)
    }"""
    shown = run(text, x=X, trips=np.array(4))
    batch, rows, width = shown["y"].split(" ")
    assert (batch, width) == ("B", "8")
    assert rows.startswith("?")
    assert shown["count"] == ""


def test_scan_slices_its_inputs_and_stacks_its_outputs():
    text = """g (float[B, 8] start, float[S, B, 8] rows) => (float y) {
        last, all = Scan <num_scan_inputs = 1, body = step (float[b, c] state, float[d, e] row)
            => (float[f, h] next, float[j, k] out) {
            next = Add (state, row)
            out = Concat <axis = 1> (state, row)
        }> (start, rows)
    }"""
    shown = run(text, start=np.ones((2, 8), np.float32), rows=np.ones((5, 2, 8), np.float32))
    assert shown == {"last": "B 8", "all": "S B 16"}


@pytest.mark.parametrize(
    ("axis", "part", "expected"), [(1, "", "B 1 8"), (2, ", part", "B S 2"), (1, ", part", "B ?2 8")]
)
def test_split_to_sequence_knows_the_size_of_a_part_unless_the_last_may_be_shorter(axis, part, expected):
    text = f"""g (float[B, S, 8] x) => (float y) {{
        part = Constant <value_int = 2> ()
        at = Constant <value_int = 0> ()
        parts = SplitToSequence <axis = {axis}> (x{part})
        y = SequenceAt (parts, at)
    }}"""
    assert run(text, x=X)["y"] == expected


def test_sequence_of_two_joined_on_a_new_axis():
    text = """g (float[B, S] x) => (float y) {
        s = SequenceConstruct (x, x)
        y = ConcatFromSequence <axis = 0, new_axis = 1> (s)
        e = SequenceErase (s)
    }"""
    shown = run(text, x=X[:, :, 0])
    assert shown["y"].endswith(" B S")


def test_a_body_sees_outer_values_and_their_contents():
    text = """g (float[B, S, 8] x, bool c) => (float y) {
        shape = Shape (x)
        y = If (c) <
            then_branch = then () => (float a) { a = ConstantOfShape (shape) },
            else_branch = otherwise () => (float b) { b = Neg (x) }
        >
    }"""
    assert run(text, x=X, c=np.array(True))["y"] == "B S 8"
