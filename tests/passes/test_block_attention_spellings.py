"""block-attention on spellings that no committed export has, each written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from graphsurgery.invariants import violations
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session
from tests.small_models import parse

SPECS = (
    "block-attention{q_block_size=2,kv_block_size=3,skip=none,min_rows=0}",
    "block-attention{q_blocks=2,head_blocks=2}",
)

HEADER = """<ir_version: 9, opset_import: ["" : 17]>"""

# A bias over the columns of the padding mask, which has a name of its own for T, beside a mask of P + S columns.
ALIBI = f"""{HEADER}
alibi (float[B,4,S,8] q, float[B,4,P,8] past, float[B,4,S,8] new, int64[B,T] mask) => (float[B,4,S,8] y)
<int64[1] one = {{1}}, int64[1] two = {{2}}, int64[2] heads = {{1, 2}}, int64 zero = {{0}}, int64 step = {{1}},
 float scale = {{0.35}}, float low = {{-1e9}}, float[1,4,1,1] slopes = {{0.25, 0.0625, 0.5, 0.125}}>
{{
    k = Concat <axis = 2> (past, new)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    total = Shape <start = 2, end = 3> (k)
    rows = Shape <start = 2, end = 3> (q)
    total_0 = Squeeze (total)
    rows_0 = Squeeze (rows)
    before = Sub (total_0, rows_0)
    own = Range (zero, rows_0, step)
    place = Add (own, before)
    place_2 = Unsqueeze (place, one)
    columns = Range (zero, total_0, step)
    late = Greater (columns, place_2)
    padded = Cast <to = 9> (mask)
    absent = Not (padded)
    absent_4 = Unsqueeze (absent, heads)
    hidden = Or (late, absent_4)
    spread = CumSum (mask, step)
    position = Unsqueeze (spread, heads)
    distance = Cast <to = 1> (position)
    bias = Mul (slopes, distance)
    raw = MatMul (q, kt)
    scaled = Mul (raw, scale)
    biased = Add (scaled, bias)
    masked = Where (hidden, low, biased)
    p = Softmax <axis = -1> (masked)
    y = MatMul (p, k)
}}"""


def feeds_of(batch: int, length: int, past: int, heads: int = 4, groups: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    mask = np.ones((batch, past + length), dtype=np.int64)
    mask[-1, :2] = 0
    shapes = {"q": (heads, length), "past": (groups, past), "new": (groups, length)}
    feeds = {name: rng.normal(size=(batch, *sizes, 8)).astype(np.float32) for name, sizes in shapes.items()}
    return feeds | {"mask": mask}


def hold(text: str, spec: str, groups: int = 4) -> None:
    """Every attention is rewritten, once, and the model gives what it gave."""
    model, before = parse(text), session(parse(text))
    sites = Pipeline([spec])(model).passes[0].sites
    assert [site.status for site in sites] == ["rewritten"], [site.reason for site in sites]
    assert not violations(model)
    after = session(model)
    for batch, length, past in ((2, 5, 4), (1, 1, 3), (2, 4, 0)):
        feeds = feeds_of(batch, length, past, groups=groups)
        wanted, found = run(before, feeds), run(after, feeds)
        for name, reference in wanted.items():
            assert found[name].shape == reference.shape
            np.testing.assert_allclose(found[name], reference, rtol=0, atol=1e-5 * max(1.0, np.abs(reference).max()))
    assert not Pipeline([spec])(model).passes[0].changed


@pytest.mark.parametrize("spec", SPECS)
def test_a_bias_over_columns_of_another_name(spec: str) -> None:
    hold(ALIBI, spec)


# The mask itself has as many columns as the keys by name, and the bias in front of it has not.
BIAS_FIRST = ALIBI.replace("hidden = Or (late, absent_4)", "hidden = Identity (late)")

# The causal mask is cut from a table of all positions, which ends behind the sixteenth.
TABLE = ALIBI.replace(
    "int64 zero = {0}", "int64 zero = {0}, int64 most = {16}, int64[1] none = {0}, int64[2] both = {0, 1}"
)
TABLE = TABLE.replace(
    "late = Greater (columns, place_2)",
    """numbers = Range (zero, most, step)
    numbers_2 = Unsqueeze (numbers, one)
    table = Greater (numbers, numbers_2)
    earlier = Sub (total, rows)
    first = Concat <axis = 0> (earlier, none)
    end = Concat <axis = 0> (total, total)
    late = Slice (table, first, end, both)""",
)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("text", [BIAS_FIRST, TABLE], ids=["bias_first", "table"])
def test_operands_that_count_their_columns_otherwise(text: str, spec: str) -> None:
    hold(text, spec)


# A bias laid out anew by the batch of the queries, where the mask has a batch of another name.
UNNAMED_HEADS = ALIBI.replace("int64[B,T] mask", "int64[A,T] mask").replace("[1] one", "[1] rest = {-1}, int64[1] one")
UNNAMED_HEADS = UNNAMED_HEADS.replace("[B,4,S,8] y)", "[B,4,S,8] y, float[B,H,1,T] laid_out)").replace(
    "biased = Add (scaled, bias)",
    """rows_of_batch = Shape <start = 0, end = 1> (q)
    keys = Shape <start = 1, end = 2> (mask)
    layout = Concat <axis = 0> (rows_of_batch, rest, one, keys)
    laid_out = Reshape (bias, layout)
    biased = Add (scaled, laid_out)""",
)


@pytest.mark.parametrize("spec", SPECS)
def test_a_bias_whose_number_of_heads_has_no_name_is_cut_to_the_heads_of_the_block(spec: str) -> None:
    hold(UNNAMED_HEADS, spec)


# A bias of each head in one mask with what is hidden: the guard of rows without a key has a condition for each head.
GUARDED = ALIBI.replace("biased = Add (scaled, bias)", "biased = Where (hidden, low, bias)")
GUARDED = GUARDED.replace("masked = Where (hidden, low, biased)", "masked = Add (scaled, biased)")
GUARDED = GUARDED.replace("float low = {-1e9}", "float low = {-1e9}, float zero_f = {0.0}, float none = {1.0}")
GUARDED = GUARDED.replace(
    "y = MatMul (p, k)",
    """seen = Greater (biased, low)
    counted = Cast <to = 1> (seen)
    last = Neg (one)
    count = ReduceSum <keepdims = 1> (counted, last)
    empty = Less (count, none)
    attended = MatMul (p, k)
    y = Where (empty, zero_f, attended)""",
)


@pytest.mark.parametrize(
    "spec",
    [
        *SPECS,
        "block-attention{q_blocks=2,kv_blocks=3,head_blocks=2,headpar_split=2,lowering=unroll,skip=where,min_rows=1}",
        "block-attention{head_blocks=4,kv_block_size=3,lowering=loop}",
    ],
)
def test_a_guard_of_each_head_is_cut_to_the_heads_of_the_block(spec: str) -> None:
    hold(GUARDED, spec)


# Grouped queries: [B,G,T,D] keys for [B,S,G,R,D] queries, as Einsum; a mask of five axes and a bias of every head.
GROUPED_EINSUM = f"""{HEADER}
grouped (float[B,4,S,8] q, float[B,2,P,8] past, float[B,2,S,8] new, int64[B,T] mask) => (float[B,S,2,2,8] y)
<int64[3] heads = {{1, 2, 3}}, int64[5] grouped = {{0, 0, 2, 2, 8}}, float low = {{-1e9}}, float scale = {{0.35}},
 float[1,2,2,1,1] bias = {{0.25, 0.0625, 0.5, 0.125}}, float[1,2,2,1,1] spread = {{1.0, 1.5, 0.5, 2.0}}>
{{
    k = Concat <axis = 2> (past, new)
    rows = Transpose <perm = [0, 2, 1, 3]> (q)
    q5 = Reshape (rows, grouped)
    raw = Einsum <equation = "bskgd, bktd -> bkgst"> (q5, k)
    scaled = Mul (raw, scale)
    tilted = Mul (scaled, spread)
    biased = Add (tilted, bias)
    kept = Cast <to = 9> (mask)
    absent = Not (kept)
    hidden = Unsqueeze (absent, heads)
    masked = Where (hidden, low, biased)
    p = Softmax <axis = -1> (masked)
    y = Einsum <equation = "bkgst,bktd->bskgd"> (p, k)
}}"""

# The same on five axes by MatMul: keys with an axis of one where the queries of a group are.
GROUPED_PRODUCTS = f"""{HEADER}
grouped (float[B,4,S,8] q, float[B,2,P,8] past, float[B,2,S,8] new, int64[B,T] mask) => (float[B,2,2,S,8] y)
<int64[1] two = {{2}}, int64[4] heads = {{1, 2, 3, 4}}, float low = {{-1e9}}, float scale = {{0.35}},
 int64[5] grouped = {{0, 2, 2, -1, 8}}, int64[3] more = {{1, 2, 3}}>
{{
    k = Concat <axis = 2> (past, new)
    q5 = Reshape (q, grouped)
    k5 = Unsqueeze (k, two)
    kt = Transpose <perm = [0, 1, 2, 4, 3]> (k5)
    raw = MatMul (q5, kt)
    scaled = Mul (raw, scale)
    kept = Cast <to = 9> (mask)
    absent = Not (kept)
    hidden = Unsqueeze (absent, more)
    masked = Where (hidden, low, scaled)
    p = Softmax <axis = -1> (masked)
    y = MatMul (p, k5)
}}"""

# Operands in other orders, the heads last, and a softmax by hand.
BY_HAND = f"""{HEADER}
by_hand (float[B,4,S,8] q, float[B,4,P,8] past, float[B,4,S,8] new, int64[B,T] mask) => (float[B,S,4,8] y)
<int64[2] heads = {{1, 2}}, float low = {{-1e9}}, float scale = {{0.35}}, int64[1] last = {{-1}}>
{{
    k = Concat <axis = 2> (past, new)
    raw = Einsum <equation = "xhjd,xhid->xhij"> (k, q)
    scaled = Mul (raw, scale)
    kept = Cast <to = 9> (mask)
    absent = Not (kept)
    hidden = Unsqueeze (absent, heads)
    masked = Where (hidden, low, scaled)
    top = ReduceMax <axes = [-1], keepdims = 1> (masked)
    below = Sub (masked, top)
    power = Exp (below)
    total = ReduceSum <keepdims = 1> (power, last)
    p = Div (power, total)
    y = Einsum <equation = "bhij,bhjd->bihd"> (p, k)
}}"""


# Keys times queries, the softmax over the axis in front of the last, and values in front of the probabilities.
KEYS_FIRST = f"""{HEADER}
keys_first (float[B,4,S,8] q, float[B,4,P,8] past, float[B,4,S,8] new, int64[B,T] mask) => (float[B,4,8,S] y)
<int64[2] heads = {{1, 3}}, float low = {{-1e9}}, float scale = {{0.35}}, float[4,1,1] slopes = {{0.25, 0.0625, 0.5, 0.125}},
 int64 zero = {{0}}, int64 step = {{1}}, int64[1] one = {{1}}>
{{
    k = Concat <axis = 2> (past, new)
    qt = Transpose <perm = [0, 1, 3, 2]> (q)
    vt = Transpose <perm = [0, 1, 3, 2]> (k)
    raw = MatMul (k, qt)
    scaled = Mul (raw, scale)
    tilted = Mul (scaled, slopes)
    total = Shape <start = 2, end = 3> (k)
    rows = Shape <start = 2, end = 3> (q)
    total_0 = Squeeze (total)
    rows_0 = Squeeze (rows)
    before = Sub (total_0, rows_0)
    own = Range (zero, rows_0, step)
    place = Add (own, before)
    columns = Range (zero, total_0, step)
    columns_2 = Unsqueeze (columns, one)
    late = Greater (columns_2, place)
    kept = Cast <to = 9> (mask)
    absent = Not (kept)
    hidden = Unsqueeze (absent, heads)
    out = Or (late, hidden)
    masked = Where (out, low, tilted)
    p = Softmax <axis = -2> (masked)
    y = MatMul (vt, p)
}}"""

# The probabilities turned for the product with the values, and scores turned in front of the softmax.
TURNED = KEYS_FIRST.replace("float[B,4,8,S] y", "float[B,4,S,8] y").replace(
    "y = MatMul (vt, p)", "turned = Transpose <perm = [0, 1, 3, 2]> (p)\n    y = MatMul (turned, k)"
)
TURNED_EARLY = TURNED.replace("p = Softmax <axis = -2> (masked)", "early = Transpose <perm = [0, 2, 1, 3]> (masked)")
TURNED_EARLY = TURNED_EARLY.replace(
    "turned = Transpose <perm = [0, 1, 3, 2]> (p)",
    "p = Softmax <axis = 1> (early)\n    turned = Transpose <perm = [0, 2, 3, 1]> (p)",
)

# Features in front of positions, as some accelerators want them: the softmax over axis 1.
CHANNELS_FIRST = f"""{HEADER}
channels (float[B,4,S,8] q, float[B,4,P,8] past, float[B,4,S,8] new, int64[B,T] mask) => (float[B,8,4,S] y)
<int64[2] heads = {{2, 3}}, float low = {{-1e9}}, float scale = {{0.35}}>
{{
    k = Concat <axis = 2> (past, new)
    qc = Transpose <perm = [0, 3, 1, 2]> (q)
    kc = Transpose <perm = [0, 2, 1, 3]> (k)
    vc = Transpose <perm = [0, 3, 1, 2]> (k)
    raw = Einsum <equation = "bchq,bkhc->bkhq"> (qc, kc)
    scaled = Mul (raw, scale)
    kept = Cast <to = 9> (mask)
    absent = Not (kept)
    hidden = Unsqueeze (absent, heads)
    masked = Where (hidden, low, scaled)
    p = Softmax <axis = 1> (masked)
    y = Einsum <equation = "bkhq,bchk->bchq"> (p, vc)
}}"""

# What an optimizer leaves when it takes transpositions into products: features first, and positions in front of the batch.
TAKEN_IN = """<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]>
taken_in (float[B,4,S,8] q, float[B,4,P,8] past, float[B,4,S,8] new, int64[B,T] mask) => (float[B,4,S,8] y)
<int64[2] heads = {1, 2}, float low = {-1e9}>
{
    k = Concat <axis = 2> (past, new)
    qf = Transpose <perm = [0, 1, 3, 2]> (q)
    kb = Transpose <perm = [2, 0, 1, 3]> (k)
    raw = com.microsoft.FusedMatMul <transA = 1, transB = 1, transBatchB = 1, alpha = 0.35> (qf, kb)
    kept = Cast <to = 9> (mask)
    absent = Not (kept)
    hidden = Unsqueeze (absent, heads)
    masked = Where (hidden, low, raw)
    p = Softmax <axis = -1> (masked)
    y = com.microsoft.FusedMatMul <transBatchB = 1, alpha = 0.5> (p, kb)
}"""


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("text", "groups"),
    [
        (GROUPED_EINSUM, 2),
        (GROUPED_PRODUCTS, 2),
        (BY_HAND, 4),
        (KEYS_FIRST, 4),
        (TURNED, 4),
        (TURNED_EARLY, 4),
        (CHANNELS_FIRST, 4),
        (TAKEN_IN, 4),
    ],
    ids=["einsum", "products", "hand", "keys_first", "turned", "turned_early", "channels_first", "taken_in"],
)
def test_spellings_of_their_own_are_written_out(text: str, groups: int, spec: str) -> None:
    hold(text, spec, groups)


@pytest.mark.parametrize("text", [GROUPED_EINSUM, BY_HAND, CHANNELS_FIRST])
def test_nothing_of_the_old_spelling_is_left(text: str) -> None:
    model = parse(text)
    Pipeline([SPECS[0]])(model)
    assert "Einsum" not in {node.op_type for node in model.graph.all_nodes()}


def test_without_blocks_the_attention_is_plain() -> None:
    hold(GROUPED_EINSUM, "block-attention", 2)
    hold(BY_HAND, "block-attention", 4)


def test_what_cannot_be_divided_is_written_out_and_said_to_be() -> None:
    # A bias whose columns have a name that nothing says to be that of the keys.
    text = BY_HAND.replace("int64[B,T] mask)", "int64[B,T] mask, float[1,1,1,W] odd)")
    model = parse(
        text.replace("kept = Cast", "bent = Add (scaled, odd)\n    kept = Cast").replace("low, scaled", "low, bent")
    )
    (site,) = Pipeline(["block-attention{kv_blocks=2}"])(model).passes[0].sites
    assert site.status == "rewritten"
    wanted = "written out, and not divided: an operand of its chain cannot be cut to blocks: "
    assert site.reason.startswith(wanted), site.reason
    assert not violations(model)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"bskgd, bktd -> bkgst"', '"bskgd,bksd->bkgs"'),  # no axis of keys
        ("axis = -1> (masked)", "axis = -2> (masked)"),  # over the rows
        ("tilted = Mul (scaled, spread)", "tilted = Mul (scaled, raw)"),  # scores twice: still one product
    ],
)
def test_what_is_no_attention_stays(old: str, new: str) -> None:
    text = GROUPED_EINSUM.replace(old, new)
    model = parse(text)
    sites = Pipeline([SPECS[0]])(model).passes[0].sites
    if "raw)" in new:
        hold(text, SPECS[0], 2)
    else:
        assert not [site for site in sites if site.status == "rewritten"]


# Scores below the mean of their row are masked: the mean is of the whole row, and comes back into the scores.
COMES_BACK = (
    ALIBI.replace("biased = Add (scaled, bias)", "biased = Add (scaled, bias)\n    low_ones = SCORES")
    .replace(
        "low_ones = SCORES",
        """mean = ReduceMean <axes = [-1]> (biased)
    small = Less (biased, mean)
    strong = Where (small, low, biased)""",
    )
    .replace("(hidden, low, biased)", "(hidden, low, strong)")
)


@pytest.mark.parametrize("spec", SPECS)
def test_scores_that_come_back_into_themselves_are_refused(spec: str) -> None:
    model = parse(COMES_BACK)
    (site,) = Pipeline([spec])(model).passes[0].sites
    assert site.status == "refused"
    assert "(Less) makes of its scores what node '' (Where) brings back into them" in site.reason, site.reason


# As many queries as an image has patches, which no input says; the mask is one for all layers.
PATCHES = """
    <ir_version: 10, opset_import: ["" : 20]>
    g (float[B,8,R,C] pixel_values, float[8,8,2,2] kernel) => (float[B,M,8] y)
    <int64[4] split = {0, -1, 2, 4}, int64[3] flat = {0, 8, -1}, int64[3] joined = {0, -1, 8}, int64[2] of_rows = {1, 3},
     int64[2] of_columns = {1, 2}, int64[1] last = {-1}, float bound = {2}, float zero = {0}, float low = {-1e9}>
    {
        patches = Conv <strides = [2, 2]> (pixel_values, kernel)
        lines = Reshape (patches, flat)
        x = Transpose <perm = [0, 2, 1]> (lines)
        sums = ReduceSum <keepdims = 0> (x, last)
        dark = Less (sums, bound)
        rows = Unsqueeze (dark, of_rows)
        columns = Unsqueeze (dark, of_columns)
        both = And (rows, columns)
        allowed = Where (both, zero, low)
        LAYERS
    }
"""
PATCH_LAYER = """
        heads_N = Reshape (X, split)
        q_N = Transpose <perm = [0, 2, 1, 3]> (heads_N)
        k_N = Transpose <perm = [0, 2, 3, 1]> (heads_N)
        scores_N = MatMul (q_N, k_N)
        masked_N = Add (scores_N, allowed)
        weights_N = Softmax <axis = -1> (masked_N)
        attended_N = MatMul (weights_N, q_N)
        turned_N = Transpose <perm = [0, 2, 1, 3]> (attended_N)
        Y = Reshape (turned_N, joined)"""


@pytest.mark.parametrize(
    "spec", [*SPECS, "block-attention{q_block_size=2}", "block-attention{q_block_size=3,min_rows=5}"]
)
def test_a_number_of_queries_that_is_known_late(spec: str) -> None:
    layers = [PATCH_LAYER.replace("_N", f"_{n}").replace("X", x) for n, x in ((0, "x"), (1, "x1"))]
    text = PATCHES.replace("LAYERS", layers[0].replace("Y", "x1") + layers[1].replace("Y", "y"))
    model, before = parse(text), session(parse(text))
    sites = Pipeline([spec])(model).passes[0].sites
    assert [site.status for site in sites] == ["rewritten"] * 2, [site.reason for site in sites]
    assert not violations(model)
    after, rng = session(model), np.random.default_rng(0)
    for batch, rows, columns in ((2, 2, 3), (1, 1, 1), (3, 1, 4)):
        pixels = rng.standard_normal((batch, 8, 2 * rows, 2 * columns)).astype(np.float32)
        kernel = rng.standard_normal((8, 8, 2, 2)).astype(np.float32)
        feeds = {"pixel_values": pixels, "kernel": kernel * np.float32(0.2)}
        np.testing.assert_allclose(run(after, feeds)["y"], run(before, feeds)["y"], rtol=0, atol=1e-5)


# A mask whose columns have a name that nothing says to be that of the keys: as long as they are, or one for all of them.
OTHER_COLUMNS = ALIBI.replace("int64[B,T] mask)", "int64[B,T] mask, float[1,1,S,W] odd)").replace(
    "masked = Where (hidden, low, biased)", "bent = Add (biased, odd)\n    masked = Where (hidden, low, bent)"
)


@pytest.mark.parametrize("wide", [True, False])
def test_columns_of_a_name_of_their_own_are_taken_whole(wide: bool) -> None:
    model, before = parse(OTHER_COLUMNS), session(parse(OTHER_COLUMNS))
    (site,) = Pipeline(["block-attention{q_block_size=2,head_blocks=2,min_rows=0}"])(model).passes[0].sites
    assert site.status == "rewritten", site.reason
    assert "no key is left out: 'odd' has W positions where there are" in site.reason
    after = session(model)
    for batch, length, past in ((2, 5, 4), (1, 1, 3), (2, 4, 0)):
        odd = np.random.default_rng(past).normal(size=(1, 1, length, past + length if wide else 1))
        feeds = feeds_of(batch, length, past) | {"odd": odd.astype(np.float32)}
        wanted, found = run(before, feeds)["y"], run(after, feeds)["y"]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * max(1.0, np.abs(wanted).max()))
    (site,) = Pipeline(["block-attention{kv_blocks=2}"])(parse(OTHER_COLUMNS)).passes[0].sites
    assert site.status == "refused"
    assert "'odd' has W positions where there are" in site.reason


# Columns of the scores in another order: blocks would need columns of other blocks.
SHUFFLED = ALIBI.replace(
    "biased = Add (scaled, bias)", "turned = CumSum (scaled, axis)\n    biased = Add (turned, bias)"
)
SHUFFLED = SHUFFLED.replace("int64 step = {1}", "int64 step = {1}, int64 axis = {3}")


def test_what_is_not_known_between_scores_and_softmax_is_named() -> None:
    (site,) = Pipeline([SPECS[1]])(parse(SHUFFLED)).passes[0].sites
    assert site.status == "refused"
    assert "(CumSum) between the scores and softmax" in site.reason
    assert site.reason.endswith("cannot be replayed on blocks")
