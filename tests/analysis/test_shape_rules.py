"""Every group of shape rules, one node at a time, against its expectation and against ORT."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.analysis.op_cases import Case, bools, const, floats, ints, verify

INT64_MAX = 2**63 - 1
TENSOR_ONE = onnx.numpy_helper.from_array(np.array([1], np.int64))

ELEMENTWISE = [
    Case("Sigmoid", [floats("B S 8")], ["B S 8"]),
    Case("Softmax", [floats("B S 8")], ["B S 8"], {"axis": -1}),
    Case("Add", [floats("B S 8"), floats("8")], ["B S 8"]),
    Case("Mul", [floats("B 1 S P"), floats("B H 1 P")], ["B H S P"]),
    Case("Sub", [floats("1"), floats("B S")], ["B S"]),
    Case("Max", [floats("B S 1"), floats("1 8"), floats("S 8")], ["B S 8"]),
    Case("Sum", [floats("B 1"), floats("S")], ["B S"]),
    Case("Pow", [floats("B S"), const(2.0, np.float32)], ["B S"]),
    Case("Equal", [ints("B 1 S"), ints("S 1")], ["B S S"]),
    Case("And", [bools("B 1"), bools("1 S")], ["B S"]),
    Case("Not", [bools("B S")], ["B S"]),
    Case("IsNaN", [floats("B S")], ["B S"]),
    Case("Where", [bools("B 1 S P"), floats("B H S P"), const(0.0, np.float32)], ["B H S P"]),
    Case("Cast", [floats("B S")], ["B S"], {"to": onnx.TensorProto.FLOAT16}),
    Case("CastLike", [ints("B S"), floats("1")], ["B S"]),
    Case("Clip", [floats("B S"), const(0.0, np.float32)], ["B S"]),
    Case("Clip", [floats("B S")], ["B S"], {"min": 0.0, "max": 1.0}, opset=6),
    Case("Mod", [ints("B S"), const(3)], ["B S"]),
    Case("Dropout", [floats("B S")], ["B S", "B S"]),
    Case("Bernoulli", [floats("B S")], ["B S"]),
    Case("Gelu", [floats("B S 8")], ["B S 8"]),
    Case("CumSum", [ints("B S"), const(1)], ["B S"]),
    Case("Swish", [floats("B S")], ["B S"], opset=24, runs=False),
    Case("Neg", [const([1, -2])], ["2"], contents="[-1, 2]"),
    Case("Identity", [const(7)], [""], contents="7"),
]

SHAPING = [
    Case("Shape", [floats("B S 8")], ["3"], contents="[B, S, 8]"),
    Case("Shape", [floats("B S 8")], ["1"], {"start": -2, "end": -1}, contents="[S]"),
    Case("Size", [floats("B S 8")], [""], contents="8*B*S"),
    Case("ConstantOfShape", [const([2, 3])], ["2 3"]),
    Case("ConstantOfShape", [const([2])], ["2"], {"value": TENSOR_ONE}, contents="[1, 1]"),
    Case("ConstantOfShape", [const([], np.int64)], [""], {"value": TENSOR_ONE}, contents="1"),
    Case("Range", [const(0), ints("", 6), const(1)], ["max(?1,0)"]),
    Case("Range", [const(1), const(6), const(2)], ["3"], contents="[1, 3, 5]"),
    Case("Range", [const(5), const(0), const(-2)], ["3"], contents="[5, 3, 1]"),
    Case("Range", [const(0.0, np.float32), const(4.0, np.float32), const(1.0, np.float32)], ["4"]),
    Case("Reshape", [floats("B S 8"), const([0, 0, 2, 4])], ["B S 2 4"]),
    Case("Reshape", [floats("B S 8"), const([-1, 8])], ["B*S 8"]),
    Case("Reshape", [floats("B S 8"), const([0, -1, 4])], ["B 2*S 4"]),
    Case("Reshape", [floats("B S 3"), const([-1, 2])], ["B*S+floordiv(B*S,2) 2"]),
    Case("Reshape", [floats("B 0 4"), const([0, 0, 4])], ["B 0 4"]),
    Case("Reshape", [floats("B 0 4"), const([0, 3, 4])], ["0 3 4"], {"allowzero": 1}),
    Case("Reshape", [floats("B S"), ints("2", [5, 2])], ["? ?"]),
    Case("Reshape", [floats("2 3"), const([6])], ["6"], opset=13),
    Case("Expand", [floats("B 1 8"), const([1, 5, 1])], ["B 5 8"]),
    Case("Expand", [const([3]), const([4])], ["4"], contents="[3, 3, 3, 3]"),
    Case("Expand", [floats(""), ints("2", [3, 4])], ["? ?"]),
    Case("Tile", [floats("B S 8"), const([1, 2, 3])], ["B 2*S 24"]),
    Case("Transpose", [floats("B S H 8")], ["B H S 8"], {"perm": [0, 2, 1, 3]}),
    Case("Transpose", [floats("B S")], ["S B"]),
    Case("Unsqueeze", [floats("B S"), const([0, -1])], ["1 B S 1"]),
    Case("Unsqueeze", [floats("B S")], ["B 1 S"], {"axes": [1]}, opset=11),
    Case("Squeeze", [floats("B 1 S 1"), const([1, -1])], ["B S"]),
    Case("Squeeze", [floats("2 1 3")], ["2 3"]),
    Case("Squeeze", [floats("B 1 S")], ["B S"], {"axes": [1]}, opset=11),
    Case("Flatten", [floats("B S 8")], ["B 8*S"]),
    Case("Flatten", [floats("B S 8")], ["B*S 8"], {"axis": -1}),
    Case("Concat", [floats("B H P 8"), floats("B H S 8")], ["B H P+S 8"], {"axis": -2}),
    Case("Concat", [const([1]), const([2, 3])], ["3"], {"axis": 0}, contents="[1, 2, 3]"),
    Case("Concat", [floats("N 4"), floats("B 4")], ["B+N 4"], {"axis": 0}),
]

INDEXING = [
    Case("Gather", [floats("N 8"), ints("B S")], ["B S 8"]),
    Case("Gather", [floats("B S 8"), const(0)], ["B 8"], {"axis": 1}),
    Case("Gather", [const([4, 5, 6]), const([-1, 0])], ["2"], contents="[6, 4]"),
    Case("Gather", [const([4, 5, 6]), const(1)], [""], contents="5"),
    Case("GatherND", [floats("B S 8"), ints("N 2")], ["N 8"]),
    Case("GatherND", [floats("B S 8"), ints("B 1")], ["B 8"], {"batch_dims": 1}),
    Case("GatherND", [floats("B S 8"), ints("N 1")], ["B 8"], {"batch_dims": 1}, runs=False),
    Case("GatherElements", [floats("B S"), ints("B 2")], ["B 2"], {"axis": 1}),
    Case("ScatterND", [floats("N 8"), const([[0], [2]]), floats("2 8")], ["N 8"]),
    Case("ScatterElements", [floats("B S"), const([[0], [1]]), floats("2 1")], ["B S"], {"axis": 1}),
    Case("Slice", [floats("B S 8"), const([1]), const([INT64_MAX]), const([1])], ["B S-min(S,1) 8"]),
    Case("Slice", [floats("B S 8"), const([0]), const([-1]), const([2])], ["B S 7"]),
    Case("Slice", [floats("B S 8"), const([0]), const([INT64_MAX]), const([-1]), const([2])], ["B S 4"]),
    Case("Slice", [floats("B S 8"), const([1]), const([INT64_MAX]), const([2]), const([2])], ["B S 4"]),
    Case("Slice", [floats("B S 8"), const([-1]), const([-INT64_MAX]), const([-1]), const([-1])], ["B S 8"]),
    Case("Slice", [floats("B S 8"), const([6]), const([1]), const([2]), const([-2])], ["B S 3"]),
    Case("Slice", [floats("B S 8"), const([0]), const([4]), const([1])], ["B min(S,4) 8"]),
    Case("Slice", [floats("B S 8"), const([0, 0]), const([1, 2])], ["min(B,1) min(S,2) 8"]),
    Case(
        "Slice", [floats("B S 8"), ints("1", [1]), ints("1", [3]), const([1])], ["B max(index(?2,S)-index(?1,S),0) 8"]
    ),
    Case("Slice", [floats("B S 8")], ["B S 3"], {"starts": [2], "ends": [5], "axes": [2]}, opset=9),
    Case("Slice", [const([1, 2, 3, 4]), const([1]), const([3]), const([0])], ["2"], contents="[2, 3]"),
    Case("Slice", [const([1, 2, 3]), const([-1]), const([-9]), const([0]), const([-1])], ["3"], contents="[3, 2, 1]"),
    Case("Split", [floats("B S 8"), const([2, 6])], ["B S 2", "B S 6"], {"axis": -1}),
    Case("Split", [floats("B S 8")], ["B S 4", "B S 4"], {"axis": 2, "num_outputs": 2}),
    Case("Split", [floats("B 7")], ["B 3", "B 3", "B 1"], {"axis": 1, "num_outputs": 3}),
    Case("Split", [floats("B S 8")], ["B S 3", "B S 5"], {"axis": 2, "split": [3, 5]}, opset=11),
    Case("Split", [const([1, 2, 3]), const([1, 2])], ["1", "2"], contents="[1]"),
    Case("NonZero", [bools("B S")], ["2 ?"]),
    Case("Compress", [floats("B S"), bools("B")], ["? S"], {"axis": 0}),
    Case("Unique", [ints("N")], ["?", "?", "N", "?"]),
    Case("TopK", [floats("B S 8"), const([3])], ["B S 3", "B S 3"]),
    Case("TopK", [floats("B S 8")], ["B S 3", "B S 3"], {"k": 3}, opset=9),
    Case("OneHot", [ints("B S"), const(6), const([0, 1])], ["B S 6"]),
    Case("OneHot", [ints("B S"), const([6]), const([0, 1])], ["6 B S"], {"axis": 0}),
    Case("OneHot", [const([1]), const(3), const([1, 5])], ["1 3"], contents="[1, 5, 1]"),
    Case("OneHot", [const([-1, 7]), const(2), const([4, 5])], ["2 2"], {"axis": 0}, contents="[4, 4, 5, 4]"),
    Case("TensorScatter", [floats("B 2 N 8"), floats("B 2 3 8"), ints("B")], ["B 2 N 8"], opset=24),
    Case("Trilu", [floats("B S S")], ["B S S"]),
    Case("EyeLike", [floats("S P")], ["S P"]),
    Case("Pad", [floats("B S 8"), const([0, 1, 0, 0, 2, -1])], ["B S+3 7"]),
    Case("Pad", [floats("B S 8"), const([1, 2]), None, const([1])], ["B S+3 8"]),
    Case("Pad", [floats("B S")], ["B S+1"], {"pads": [0, 1, 0, 0]}, opset=9),
    Case("Resize", [floats("B 3 H 4"), None, None, const([2, 3, 8, 8])], ["2 3 8 8"]),
    Case("Resize", [floats("B 3 H 5"), None, const([1, 1, 2, 0.5], np.float32)], ["B 3 2*H 2"]),
    Case(
        "Upsample", [floats("B 3 H 5"), const([1, 1, 2, 3], np.float32)], ["B 3 2*H 15"], {"mode": "nearest"}, opset=9
    ),
    Case("Slice", [floats("B S 8")], ["B-min(B,1) min(S,2) 8"], {"starts": [1, 0], "ends": [9999999999, 2]}, opset=9),
    Case("SpaceToDepth", [floats("B 3 4 6")], ["B 12 2 3"], {"blocksize": 2}),
    Case("DepthToSpace", [floats("B 8 H 6")], ["B 2 2*H 12"], {"blocksize": 2}),
]

REDUCING = [
    Case("ReduceMean", [floats("B S 8"), const([-1])], ["B S 1"]),
    Case("ReduceMean", [floats("B S 8")], ["B S"], {"axes": [2], "keepdims": 0}, opset=13),
    Case("ReduceSum", [floats("B S 8")], ["1 1 1"]),
    Case("ReduceSum", [floats("B S 8")], ["B S 8"], {"noop_with_empty_axes": 1}),
    Case("ReduceMax", [floats("B S 8")], [""], {"keepdims": 0}),
    Case("ReduceSum", [floats("B S 8"), ints("1", [1])], ["? ? ?"]),
    Case("ReduceProd", [const([2, 3, 4]), const([0])], [""], {"keepdims": 0}, contents="24"),
    Case("ReduceSum", [const([2, 3, 4]), const([0])], ["1"], contents="[9]"),
    Case("ReduceMax", [const([2, 7, 4])], ["1"], opset=18, contents="[7]"),
    Case("ArgMax", [floats("B S 8")], ["B S"], {"axis": -1, "keepdims": 0}),
    Case("ArgMin", [floats("B S 8")], ["B 1 8"], {"axis": 1}),
    Case("LayerNormalization", [floats("B S 8"), floats("8"), floats("8")], ["B S 8", "B S 1", "B S 1"]),
    Case("RMSNormalization", [floats("B S 8"), floats("8")], ["B S 8"], opset=23),
    Case("SimplifiedLayerNormalization", [floats("B S 8"), floats("8")], ["B S 8"]),
    Case("GroupNormalization", [floats("B 4 S"), floats("4"), floats("4")], ["B 4 S"], {"num_groups": 2}, opset=21),
    Case("InstanceNormalization", [floats("B 4 S"), floats("4"), floats("4")], ["B 4 S"]),
    Case("RandomNormalLike", [floats("B S")], ["B S"]),
    Case("RandomUniform", [], ["2 3"], {"shape": [2, 3]}),
]

LINEAR = [
    Case("MatMul", [floats("B H S 8"), floats("B H 8 P")], ["B H S P"]),
    Case("MatMul", [floats("B 1 S 8"), floats("H 8 P")], ["B H S P"]),
    Case("MatMul", [floats("8"), floats("B 8 P")], ["B P"]),
    Case("MatMul", [floats("B S 8"), floats("8")], ["B S"]),
    Case("MatMul", [floats("8"), floats("8")], [""]),
    Case("Gemm", [floats("S 8"), floats("N 8"), floats("N")], ["S N"], {"transB": 1}),
    Case("Gemm", [floats("8 S"), floats("8 N")], ["S N"], {"transA": 1}),
    Case("MatMulInteger", [ints("S 8", dtype=np.uint8), ints("8 N", dtype=np.uint8)], ["S N"]),
    Case(
        "QLinearMatMul",
        [
            ints("B S 8", dtype=np.uint8),
            const(0.1, np.float32),
            const(0, np.uint8),
            ints("8 N", dtype=np.uint8),
            const(0.1, np.float32),
            const(0, np.uint8),
            const(0.1, np.float32),
            const(0, np.uint8),
        ],
        ["B S N"],
    ),
    Case("DynamicQuantizeLinear", [floats("B S")], ["B S", "", ""]),
    Case("QuantizeLinear", [floats("B S"), const(0.1, np.float32), const(0, np.int8)], ["B S"]),
    Case("DequantizeLinear", [ints("B S", dtype=np.uint8), const(0.1, np.float32)], ["B S"]),
    Case(
        "Conv",
        [floats("B 3 S 8"), floats("4 3 3 3")],
        ["B 4 floordiv(S-1,2)+1 4"],
        {"strides": [2, 2], "pads": [1, 1, 1, 1]},
    ),
    Case("Conv", [floats("B 4 S"), floats("4 1 4")], ["B 4 S+3"], {"group": 4, "pads": [3, 3]}),
    Case("Conv", [floats("B 3 9"), floats("4 3 3")], ["B 4 5"], {"auto_pad": "SAME_UPPER", "strides": [2]}),
    Case("Conv", [floats("B 3 9"), floats("4 3 3")], ["B 4 5"], {"dilations": [2]}),
    Case("ConvTranspose", [floats("B 3 S"), floats("3 4 2")], ["B 4 2*S"], {"strides": [2]}),
    Case("MaxPool", [floats("B 3 9")], ["B 3 4", "B 3 4"], {"kernel_shape": [2], "strides": [2]}),
    Case("AveragePool", [floats("B 3 9")], ["B 3 5"], {"kernel_shape": [2], "strides": [2], "ceil_mode": 1}),
    Case("GlobalAveragePool", [floats("B 3 S 4")], ["B 3 1 1"]),
    Case("Einsum", [floats("B S H 8"), floats("B P H 8")], ["B H S P"], {"equation": "bshd,bphd->bhsp"}),
    Case("Einsum", [floats("B S 8"), floats("8 N")], ["B S N"], {"equation": "...d,dn->...n"}),
    Case("Einsum", [floats("S 8"), floats("8 N")], ["S N"], {"equation": "ij, jk"}),
]

ATTENTION = [
    Case(
        "Attention",
        [floats("B 4 S 8"), floats("B 2 S 8"), floats("B 2 S 6"), None, floats("B 2 P 8"), floats("B 2 P 6")],
        ["B 4 S 6", "B 2 P+S 8", "B 2 P+S 6", "B 4 S P+S"],
        opset=23,
    ),
    Case(
        "Attention",
        [floats("B 4 S 8"), floats("B 2 S 8"), floats("B 2 S 8")],
        ["B 4 S 8"],
        opset=24,
    ),
    Case(
        "Attention",
        [floats("B S 32"), floats("B P 16"), floats("B P 16")],
        ["B S 32"],
        {"q_num_heads": 4, "kv_num_heads": 2},
        opset=23,
    ),
    Case("RotaryEmbedding", [floats("B 4 S 8"), floats("B S 4"), floats("B S 4")], ["B 4 S 8"], opset=23),
    Case(
        "com.microsoft::MultiHeadAttention",
        [floats("B S 32"), floats("B P 32"), floats("B P 16")],
        ["B S 16"],
        {"num_heads": 4},
    ),
    Case(
        "com.microsoft::MultiHeadAttention",
        [floats("B S 32"), floats("B S 32"), floats("B S 32"), None, None, None, floats("B 4 P 8"), floats("B 4 P 8")],
        ["B S 32", "B 4 P+S 8", "B 4 P+S 8"],
        {"num_heads": 4},
    ),
    Case(
        "com.microsoft::MultiHeadAttention",
        [floats("B S 32"), floats("B 4 P 8"), floats("B 4 P 8")],
        ["B S 32"],
        {"num_heads": 4},
    ),
    Case(
        "com.microsoft::Attention",
        [floats("B S 16"), floats("16 48"), floats("48"), None, floats("2 B 4 P 4")],
        ["B S 16", "2 B 4 P+S 4"],
        {"num_heads": 4},
    ),
    Case(
        "com.microsoft::GroupQueryAttention",
        [
            floats("1 S 64"),
            None,
            None,
            floats("1 2 P 8"),
            floats("1 2 P 8"),
            const([7], np.int32),
            const(8, np.int32),
        ],
        ["1 S 32", "1 2 max(P,8) 8", "1 2 max(P,8) 8"],
        {"num_heads": 4, "kv_num_heads": 2},
    ),
    Case(
        "com.microsoft::EmbedLayerNormalization",
        [ints("B S", dtype=np.int32), None, floats("N 8"), floats("N 8"), None, floats("8"), floats("8")],
        ["B S 8", "B"],
    ),
]

CONTRIB = [
    Case("com.microsoft::FusedMatMul", [floats("B S 8"), floats("B P 8")], ["B S P"], {"transB": 1}),
    Case("com.microsoft::FusedMatMul", [floats("B 8 S"), floats("8 N")], ["B S N"], {"transA": 1}),
    Case(
        "com.microsoft::SkipSimplifiedLayerNormalization",
        [floats("B S 8"), floats("B S 8"), floats("8")],
        ["B S 8", "-", "-", "B S 8"],
    ),
    Case(
        "com.microsoft::SkipLayerNormalization",
        [floats("B S 8"), floats("B S 8"), floats("8")],
        ["B S 8", "-", "-", "B S 8"],
    ),
    Case("com.microsoft::BiasGelu", [floats("B S 8"), floats("8")], ["B S 8"]),
    Case("com.microsoft::QuickGelu", [floats("B S 8")], ["B S 8"]),
    Case("com.microsoft::FastGelu", [floats("B S 8")], ["B S 8"]),
    Case(
        "com.microsoft::MatMulNBits",
        [floats("B S 32"), ints("6 1 16", dtype=np.uint8), floats("6")],
        ["B S 6"],
        {"K": 32, "N": 6, "bits": 4, "block_size": 32},
    ),
    Case(
        "com.microsoft::DynamicQuantizeMatMul",
        [floats("B S 8"), ints("8 6", dtype=np.uint8), const(0.1, np.float32)],
        ["B S 6"],
    ),
    Case(
        "com.microsoft::MatMulIntegerToFloat",
        [ints("B S 8", dtype=np.uint8), ints("8 6", dtype=np.uint8), const(0.1, np.float32), const(0.1, np.float32)],
        ["B S 6"],
    ),
    Case(
        "com.microsoft::GatherBlockQuantized",
        [const(np.ones((7, 16)), np.uint8), ints("B S"), const(np.ones((7, 2)), np.float32)],
        ["B S 32"],
        {"block_size": 16, "bits": 4, "quantize_axis": 1},
    ),
    Case("com.microsoft::FusedGemm", [floats("S 8"), floats("8 N")], ["S N"], {"activation": "Relu"}),
    Case("com.microsoft::FusedConv", [floats("B 3 9"), floats("4 3 3")], ["B 4 7"], {"activation": "Relu"}, runs=False),
]


@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
def test_elementwise(case):
    verify(case)


@pytest.mark.parametrize("case", SHAPING, ids=str)
def test_shaping(case):
    verify(case)


@pytest.mark.parametrize("case", INDEXING, ids=str)
def test_indexing(case):
    verify(case)


@pytest.mark.parametrize("case", REDUCING, ids=str)
def test_reducing(case):
    verify(case)


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_linear(case):
    verify(case)


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case):
    verify(case)


@pytest.mark.parametrize("case", CONTRIB, ids=str)
def test_contrib(case):
    verify(case)
