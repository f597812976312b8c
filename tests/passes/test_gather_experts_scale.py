"""gather-experts at size: how many nodes each strategy writes, and results that do not depend on threads or runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphsurgery.passes.gather_experts import GatherExperts
from graphsurgery.site_report import PassReport
from tests.passes.expert_blocks import Block, Built, build

if TYPE_CHECKING:
    from collections.abc import Mapping

THREADS = 2


def inserted(block: Block, pass_: GatherExperts) -> int:
    """Number of nodes that the pass writes for one block, those of bodies included."""
    built = build(block)
    report = PassReport(pass_.name, str(pass_))
    pass_.rewrite(built.model, [built.site], report)
    nodes = [
        node for node in built.model.graph.all_nodes() if node.metadata_props.get("graphsurgery.pass") == pass_.name
    ]
    assert report.sites[0].detail["nodes_after"] == len(nodes)
    return len(nodes)


@pytest.mark.parametrize(
    ("pass_", "count"),
    [
        (GatherExperts(strategy="gather"), 12),
        (GatherExperts(strategy="dense"), 24),
        (GatherExperts(strategy="packed"), 75),
        (GatherExperts(strategy="packed", lanes=16), 80),
        (GatherExperts(target="npu"), 93),
    ],
    ids=str,
)
def test_the_number_of_nodes_does_not_depend_on_the_experts(pass_: GatherExperts, count: int) -> None:
    assert [inserted(Block(experts=experts, top_k=2), pass_) for experts in (4, 32, 128)] == [count] * 3


@pytest.mark.parametrize("experts", [4, 32, 128])
def test_grouped_is_two_nodes_an_expert(experts: int) -> None:
    """The two products; everything else is done once for all rows."""
    assert inserted(Block(experts=experts), GatherExperts()) == 2 * experts + 28


@pytest.mark.parametrize("experts", [4, 9, 128])
@pytest.mark.parametrize(("lanes", "chunk_size"), [(1, 16), (4, 8), (16, 5)])
def test_unrolled_nodes(experts: int, lanes: int, chunk_size: int) -> None:
    """A number for each slot of lanes, and one for each of its chunks."""
    pass_ = GatherExperts(strategy="packed", lowering="unroll", lanes=lanes, chunk_size=chunk_size)
    tokens = 20
    slots, chunks = -(-experts // lanes), -(-tokens // chunk_size)
    slot = 2 if lanes == 1 else 4
    assert inserted(Block(experts=experts, tokens=tokens), pass_) == 19 + slots * (slot + 15 * chunks)


# ---- the same values, whatever the threads ------------------------------------------------------------------------


def _session(model: ir.Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def _results(built: Built, pass_: GatherExperts, feeds: Mapping[str, np.ndarray], runs: int) -> list[np.ndarray]:
    model = ir.from_proto(built.proto)
    again = build(built.block)
    pass_.rewrite(again.model, [again.site], PassReport(pass_.name, str(pass_)))
    model = again.model
    opened = _session(model)
    return [opened.run(None, dict(feeds))[0] for _ in range(runs)]


FORMS = {
    "grouped": GatherExperts(),
    "packed": GatherExperts(strategy="packed", lowering="loop", chunk_size=32),
    "lanes": GatherExperts(strategy="packed", lowering="loop", chunk_size=16, lanes=3),
    "dense": GatherExperts(strategy="dense"),
    "gather": GatherExperts(strategy="gather"),
}


def assert_steady(tokens: int, runs: int, forms: list[str]) -> None:
    """Each form gives the same bits on every run with two threads, and all agree within tolerance."""
    built = build(Block(experts=8, top_k=4, hidden=512, inner=32))
    feeds = built.feeds(tokens)
    first = {}
    for form in forms:
        found = _results(built, FORMS[form], feeds, runs)
        assert all(np.array_equal(found[0], other) for other in found), form
        first[form] = found[0]
    scale = max(1.0, float(np.abs(first["grouped"]).max()))
    for form, values in first.items():
        np.testing.assert_allclose(values, first["grouped"], rtol=0, atol=1e-5 * scale, err_msg=form)


def test_every_run_gives_the_same_bits() -> None:
    assert_steady(256, 20, ["grouped", "packed", "lanes", "dense"])


@pytest.mark.full
@pytest.mark.parametrize("tokens", [64, 256, 1024])
def test_every_run_gives_the_same_bits_at_every_length(tokens: int) -> None:
    assert_steady(tokens, 20, list(FORMS))
