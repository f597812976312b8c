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
