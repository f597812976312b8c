"""Kinds of attention that the graph tells: across sequences, of an encoder, of images."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from graphsurgery.analysis.shapes import Shapes
from graphsurgery.patterns.attention.finding import find_attentions
from graphsurgery.patterns.matcher import GraphIndex

PRODUCT = """
    turned = Transpose<perm = [0, 1, 3, 2]>(key)
    scores = MatMul(query, turned)
    {mask}
    weights = Softmax<axis = -1>(masked)
    out = MatMul(weights, value)
"""
PLAIN = "masked = Identity(scores)"
BY_HEAD = "float[B,2,{0},4]"


def kinds(inputs: str, before: str = "", mask: str = PLAIN, outputs: str = "float[B,2,S,4] out") -> tuple[str, ...]:
    text = f"""<ir_version: 9, opset_import: ["" : 20]>
    attend ({inputs}) => ({outputs}) {{ {before} {PRODUCT.format(mask=mask)} }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    (site,) = find_attentions(model, Shapes(model), GraphIndex(model))
    return site.kinds[2:]


def heads(name: str, size: str) -> str:
    return f"float[B,2,{size},4] {name}"


def test_keys_of_another_sequence_are_cross() -> None:
    assert kinds(f"{heads('query', 'S')}, {heads('key', 'E')}, {heads('value', 'E')}") == ("full", "cross")


def test_keys_of_a_cache_of_fixed_length_are_not() -> None:
    inputs = f"{heads('query', 'S')}, {heads('past', '16')}, {heads('new', 'S')}, int64[B,2,S,4] slots, {heads('value', '16')}"
    before = "key = ScatterElements<axis = 2>(past, slots, new)"
    assert kinds(inputs, before) == ("full",)


def test_keys_laid_out_by_the_sizes_of_the_queries_are_cross_all_the_same() -> None:
    inputs = f"{heads('query', 'S')}, float[B,E,8] states, {heads('value', 'E')}"
    before = """sizes = Shape<start = 0, end = 1>(query)
        rest = Constant<value = int64[3] {-1, 2, 4}>()
        shape = Concat<axis = 0>(sizes, rest)
        apart = Reshape(states, shape)
        key = Transpose<perm = [0, 2, 1, 3]>(apart)"""
    assert kinds(inputs, before) == ("full", "cross")


def test_one_sequence_without_cache_is_an_encoder() -> None:
    inputs = f"{heads('query', 'S')}, {heads('key', 'S')}, {heads('value', 'S')}"
    assert kinds(inputs) == ("full", "encoder")
    padded = "masked = Add(scores, padding)"
    assert kinds(f"{inputs}, float[B,1,1,S] padding", mask=padded) == ("full", "encoder")
    # What a mask of rows and columns leaves is the caller's to say.
    assert kinds(f"{inputs}, float[B,1,S,S] padding", mask=padded) == ("full",)
    # Keys that are handed out are a cache.
    before = "key = Identity(given)"
    outputs = "float[B,2,S,4] out, float[B,2,S,4] key"
    assert kinds(inputs.replace("] key", "] given"), before, outputs=outputs) == ("full",)


@pytest.mark.parametrize(
    ("name", "found"), [("pixel_values", ("full", "encoder", "vision")), ("x", ("full", "encoder"))]
)
def test_queries_of_pixels_are_vision(name: str, found: tuple[str, ...]) -> None:
    inputs = f"{heads(name, 'S')}, {heads('key', 'S')}, {heads('value', 'S')}"
    assert kinds(inputs, f"query = Neg({name})") == found


POSITIONS = """row = Reshape(rows, tall)
        column = Reshape(columns, wide)
        {0}"""
CAUSAL = {
    "seen": ("seen = LessOrEqual(column, row)", "masked = Where(seen, scores, low)"),
    "hidden": ("late = Greater(column, row)", "masked = Where(late, low, scores)"),
    "hidden_turned": ("late = Less(row, column)", "masked = Where(late, low, scores)"),
    "times_low": (
        """late = Greater(column, row)
        late_f = Cast<to = 1>(late)
        mask = Mul(late_f, low)""",
        "masked = Add(scores, mask)",
    ),
    "one_less": (
        """seen = LessOrEqual(column, row)
        seen_f = Cast<to = 1>(seen)
        unseen = Sub(one, seen_f)
        mask = Mul(low, unseen)""",
        "masked = Add(scores, mask)",
    ),
    "filled_twice": (
        """late = Greater(column, row)
        filled = Where(late, low, zero)
        again = Less(filled, minus)
        mask = Where(again, low, bias)""",
        "masked = Add(scores, mask)",
    ),
    "low_is_true": (
        """late = Greater(column, row)
        filled = Where(late, low, zero)
        hidden = Cast<to = 9>(filled)""",
        "masked = Where(hidden, low, scores)",
    ),
    "equal_to_zero": (
        """late = Greater(column, row)
        late_i = Cast<to = 7>(late)
        seen = Equal(late_i, nothing)""",
        "masked = Where(seen, scores, low)",
    ),
    "equal_to_low": (
        """late = Greater(column, row)
        filled = Where(late, low, zero)
        hidden = Equal(filled, low)
        seen = Not(hidden)""",
        "masked = Where(seen, scores, low)",
    ),
    "selected": (
        """late = Greater(column, row)
        seen = Where(late, false, kept)""",
        "masked = Where(seen, scores, low)",
    ),
}
WINDOW = """first = Sub(row, span)
        gone = LessOrEqual(column, first)
        hidden = Or(late, gone)"""


def of_mask(before: str, mask: str) -> tuple[str, ...]:
    inputs = f"{heads('query', 'S')}, {heads('key', 'T')}, {heads('value', 'T')}, int64[S] rows, int64[T] columns"
    inputs += ", bool[T] kept, float[1,2,1,T] bias"
    numbers = """tall = Constant<value = int64[2] {-1, 1}>()
        wide = Constant<value = int64[2] {1, -1}>()
        low = Constant<value = float {-1e9}>()
        one = Constant<value = float {1.0}>()
        zero = Constant<value = float {0.0}>()
        minus = Constant<value = float {-1.0}>()
        span = Constant<value = int64 {4}>()
        nothing = Constant<value = int64 {0}>()
        false = Constant<value = bool {0}>()
        """
    return kinds(inputs, numbers + POSITIONS.format(before), mask)


@pytest.mark.parametrize("spelling", CAUSAL)
def test_what_is_hidden_tells_as_much_as_what_is_seen(spelling: str) -> None:
    assert of_mask(*CAUSAL[spelling]) == ("causal", "full")


def test_a_window_of_hidden_keys() -> None:
    before, mask = CAUSAL["hidden"]
    assert of_mask(f"{before}\n{WINDOW}", mask.replace("late", "hidden")) == ("causal", "sliding")
    seen = f"{before}\n{WINDOW}\nseen = Not(hidden)"
    assert of_mask(seen, "masked = Where(seen, scores, low)") == ("causal", "sliding")
