"""Statistics, ratios, gates, points and sizes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from onnx import TensorProto as T
from onnx import helper

from graphsurgery.benching.bench_report import NotMeasured, Row
from graphsurgery.benching.fitting import fit, own_points
from graphsurgery.benching.gates import Gate, parse_gates
from graphsurgery.benching.points import Point, make_points
from graphsurgery.benching.samples import Sample
from graphsurgery.equivalence.feeds import Sizes
from graphsurgery.equivalence.protos import read_proto
from graphsurgery.equivalence.signature import read_signature
from graphsurgery.errors import UsageError
from tests.bench_helpers import MIB, measured, pair_report, report

if TYPE_CHECKING:
    from graphsurgery.equivalence.roles import Signature

PREFILL = Point("prefill", 1, 128, 0)
DECODE = Point("decode", 1, 1, 64)


def test_a_sample():
    sample = Sample((4.0, 2.0, 3.0, 10.0))
    assert (sample.median, sample.low, sample.high) == (3.5, 2.0, 10.0)
    assert sample.spread == pytest.approx(8 / 3.5)
    assert sample.noisy
    assert not Sample((1.0, 1.25)).noisy
    assert Sample((0.0,)).spread == 0.0


def test_ratios_and_rates():
    row = Row("m", Point("prefill", 2, 100, 0), measured(10, 20, 30), measured(5, 5, 5, peak=300))
    assert row.ratio("latency") == pytest.approx(0.25)
    assert row.ratio("memory") == pytest.approx(2.0)
    assert row.ratio("over") == pytest.approx(4.0)
    assert row.tokens_per_second(row.a) == pytest.approx(200 / 0.02)
    assert row.noisy


def test_what_is_not_known_has_no_ratio():
    absent = NotMeasured("failed", "x")
    assert Row("m", PREFILL, measured(1), None).ratio("latency") is None
    assert Row("m", PREFILL, absent, measured(1)).ratio("latency") is None
    assert Row("m", PREFILL, measured(1, loaded=None), measured(1)).ratio("over") is None
    assert Row("m", PREFILL, measured(1, peak=100), measured(1)).ratio("over") is None
    assert Row("m", PREFILL, absent, None).tokens_per_second(absent) is None


def test_memory_over_the_loaded_model():
    assert measured(1).over_bytes == 50 * MIB
    assert measured(1, loaded=200).over_bytes == 0
    assert measured(1, reset=False).over_bytes is None
    assert measured(1, peak=None).over_bytes is None


def test_gates_are_read():
    assert parse_gates("latency=1.05, memory=1.1") == (Gate("latency", 1.05), Gate("memory", 1.1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=1", "'speed=1' is no gate: write one of latency, memory, over and a ratio, as latency=1.05."),
        ("latency", "'latency' is no gate: write one of latency, memory, over and a ratio, as latency=1.05."),
        ("memory=x", "'x' is no limit of a ratio: write a number above 0, as memory=1.05."),
        ("memory=0", "'0' is no limit of a ratio: write a number above 0, as memory=1.05."),
        ("memory=inf", "'inf' is no limit of a ratio: write a number above 0, as memory=1.05."),
        ("over=1,over=2", "The gate over is given twice: give it once."),
    ],
)
def test_what_is_no_gate(text, message):
    with pytest.raises(UsageError) as raised:
        parse_gates(text)
    assert str(raised.value) == message


def test_the_worst_row_is_held_against_the_gate():
    found = pair_report(gates=parse_gates("latency=1.1,memory=1.2"))
    assert found.failure == (
        "m.onnx, prefill S=512: median latency of B is 1.200 times that of A (gate 1.1, a noisy row)."
    )
    assert found.exit_code == 1
    assert found.to_data()["gates"] == [
        {"metric": "latency", "limit": 1.1, "worst": 1.2, "model": "m.onnx", "row": "prefill S=512", "holds": False},
        {"metric": "memory", "limit": 1.2, "worst": 1.1667, "model": "m.onnx", "row": "prefill S=512", "holds": True},
    ]
    assert pair_report(gates=parse_gates("latency=1.21,memory=1.2")).exit_code == 0


def test_two_gates_fail_in_one_line():
    row = Row("m.onnx", DECODE, measured(1, 1), measured(2, 2, peak=300))
    assert report(row, gates=parse_gates("latency=1.05,memory=1.1")).failure == (
        "m.onnx, decode P=64: median latency of B is 2.000 times that of A (gate 1.05); "
        "m.onnx, decode P=64: peak memory of B is 2.000 times that of A (gate 1.1)."
    )


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            Row("m.onnx", DECODE, measured(1), NotMeasured("failed", "no kernel")),
            "m.onnx (B), decode P=64, could not be measured: no kernel.",
        ),
        (
            Row("m.onnx", DECODE, NotMeasured("not applicable", "it takes no cache"), measured(1)),
            "Nothing was measured of m.onnx (A): it takes no cache; choose other sizes.",
        ),
        (
            Row("m.onnx", DECODE, measured(1, loaded=None), measured(1)),
            "The gate over=1.1 could not be checked: no row has that ratio.",
        ),
    ],
)
def test_what_could_not_be_measured(row, problem):
    found = report(row, gates=parse_gates("over=1.1"))
    assert (found.problem, found.exit_code) == (problem, 5)


def test_exit_codes_in_order():
    rows = (
        Row("m.onnx", PREFILL, measured(1), measured(2)),
        Row("m.onnx", DECODE, measured(1), NotMeasured("failed", "no kernel")),
    )
    assert report(*rows).exit_code == 5
    assert report(*rows, gates=parse_gates("latency=1.05")).exit_code == 1
    assert report(*rows, gates=parse_gates("latency=1.05"), interrupted=True).exit_code == 130
    assert report(rows[0]).exit_code == 0


def test_points():
    assert [point.name for point in make_points([512, 128, 128], [64, 16], 2)] == [
        "prefill S=128",
        "prefill S=512",
        "decode P=16",
        "decode P=64",
    ]
    assert [(p.tokens, p.size) for p in make_points([8], [64], 2)] == [(16, 8), (2, 64)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (([0], [], 1), "A prompt of 0 tokens cannot be run: give lengths of 1 or more."),
        (([], [0], 1), "A past of 0 tokens is none: give pasts of 1 or more."),
        (([1], [], 0), "A batch of 0 cannot be run: give 1 or more."),
        (([], [], 1), "There is nothing to measure: give prefill lengths or decode pasts."),
    ],
)
def test_what_is_no_point(sizes, message):
    with pytest.raises(UsageError) as raised:
        make_points(*sizes)
    assert str(raised.value) == message


_IDS = ("input_ids", T.INT64, ["B", "S"])
_CACHE = ("past_key_values.0.key", T.FLOAT, ["B", 2, "P", 4])
_FIXED = (
    ("input_ids", T.INT64, [1, 1]),
    ("past_key_values.0.key", T.FLOAT, [1, 2, 31, 4]),
    ("attention_mask", T.INT64, [1, 32]),
)


def _signature(*inputs: Any) -> Signature:
    """Of a graph that grows the caches among its inputs by one position."""
    values = [helper.make_tensor_value_info(*each) for each in inputs]
    nodes = [helper.make_node("Neg", [inputs[0][0]], ["y"])]
    outputs = [helper.make_tensor_value_info("y", inputs[0][1], None)]
    for name, kind, _ in inputs:
        if name.startswith("past"):
            present = name.replace("past_key_values", "present")
            nodes.append(helper.make_node("Concat", [name, "new"], [present], axis=2))
            outputs.append(helper.make_tensor_value_info(present, kind, None))
    new = helper.make_tensor("new", T.FLOAT, [1, 2, 1, 4], [0.0] * 8)
    return read_signature(helper.make_model(helper.make_graph(nodes, "g", values, outputs, [new])))


@pytest.mark.parametrize(
    ("inputs", "point", "expected"),
    [
        ((_IDS, _CACHE), PREFILL, Sizes(1, 128, 0)),
        ((_IDS, _CACHE), DECODE, Sizes(1, 1, 64)),
        ((_IDS,), DECODE, "it takes no cache"),
        ((("input_ids", T.INT64, ["B", 16]),), PREFILL, "its length S is fixed at 16"),
        ((("input_ids", T.INT64, [2, "S"]),), PREFILL, "its batch is fixed at 2"),
        ((("input_ids", T.INT64, ["S"]),), Point("prefill", 2, 128, 0), "it takes no batch"),
        (_FIXED, DECODE, "its past P is fixed at 31"),
        (_FIXED, Point("decode", 1, 1, 31), Sizes(1, 1, 31)),
        ((_IDS, _CACHE, ("attention_mask", T.INT64, ["B", 32])), DECODE, "its number of keys T is fixed at 32"),
        ((("x", T.FLOAT, [2, 2]),), PREFILL, "no input takes token ids or hidden states"),
    ],
)
def test_sizes_that_a_model_takes(inputs, point, expected):
    assert fit(point, _signature(*inputs)) == expected


def test_fixed_size_caches_and_tables_of_positions(cases_dir):
    signature = read_signature(read_proto(cases_dir / "a08_static_cache_scatter_ctx16.onnx"))
    assert fit(Point("prefill", 1, 17, 0), signature) == "its caches have 16 slots"
    assert fit(Point("decode", 1, 1, 15), signature) == Sizes(1, 1, 15, "none", 16)
    free = dataclasses.replace(signature, fixed={})
    assert fit(Point("decode", 1, 1, 70), free) == "it has 64 positions"


def test_models_of_one_size_have_a_point_of_their_own():
    assert own_points(_signature(_IDS, _CACHE), 1) == ()
    assert own_points(_signature(*_FIXED), 1) == (Point("decode", 1, 1, 31),)
    assert own_points(_signature(("input_ids", T.INT64, ["B", 16])), 3) == (Point("prefill", 3, 16, 0),)
