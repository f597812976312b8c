"""block-attention against ONNX Runtime on generated attention: every spelling, mask and option."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from graphsurgery.passes.block_attention import BlockAttention
from graphsurgery.pipeline import Pipeline
from tests.strategies.attentions import AttentionSpec, attention_specs, build, feeds_of, lengths, pass_options
from tests.strategies.spelled_attentions import SpelledSpec, build_spelled, spelled_feeds, spelled_specs

# Shrinking runs whole models hundreds of times; the drawn spec says enough.
_LOW = 1e4
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


def _run(model: bytes, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def _check(data: st.DataObject) -> None:
    spec: AttentionSpec = data.draw(attention_specs())
    options = data.draw(pass_options())
    proto = build(spec)
    model = ir.from_proto(proto)
    report = Pipeline([BlockAttention(**options)], check=True)(model).passes[0]
    assert [site.kinds[0] for site in report.sites] == ["attention"]
    if not report.changed:
        assert report.sites[0].status == "refused"
        return
    before, after = proto.SerializeToString(), ir.to_proto(model).SerializeToString()
    for batch, length, past in data.draw(st.lists(lengths(spec), min_size=2, max_size=3)):
        feeds = feeds_of(spec, batch, length, past, data.draw(st.integers(0, 2**16)))
        expected, got = _run(before, feeds), _run(after, feeds)
        assert np.array_equal(expected["key"], got["key"])
        assert set(expected) == set(got)
        for name in set(expected) - {"key"}:
            reference, found = (values[name].astype(np.float32) for values in (expected, got))
            assert np.array_equal(np.isnan(reference), np.isnan(found)), name
            assert np.array_equal(np.isinf(reference), np.isinf(found)), name
            # Masked scores are infinite or the lowest finite number: no measure for the others.
            finite = np.isfinite(reference) & (np.abs(reference) < _LOW)
            assert np.array_equal(np.abs(found) < _LOW, np.abs(reference) < _LOW), name
            reference, found = reference[finite], found[finite]
            error = np.max(np.abs(reference - found), initial=0.0) / max(1.0, np.max(np.abs(reference), initial=0.0))
            assert error <= (2e-3 if spec.half else 1e-5), (name, error, batch, length, past)


@settings(max_examples=15, phases=PHASES)
@given(st.data())
def test_generated_attention(data: st.DataObject) -> None:
    _check(data)


@pytest.mark.full
@settings(max_examples=1500, phases=PHASES)
@given(st.data())
def test_generated_attention_at_length(data: st.DataObject) -> None:
    _check(data)


def _check_spelled(data: st.DataObject) -> None:
    spec: SpelledSpec = data.draw(spelled_specs())
    options = data.draw(pass_options())
    proto = build_spelled(spec)
    model = ir.from_proto(proto)
    (site,) = Pipeline([BlockAttention(**options)], check=True)(model).passes[0].sites
    assert site.status == "rewritten", site.reason
    assert "Einsum" not in {node.op_type for node in model.graph.all_nodes()}
    before, after = proto.SerializeToString(), ir.to_proto(model).SerializeToString()
    for length, total in data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(2, 12)), min_size=2, max_size=2)):
        feeds = spelled_feeds(spec, data.draw(st.integers(1, 3)), length, total, data.draw(st.integers(0, 2**16)))
        expected, got = _run(before, feeds)["attended"], _run(after, feeds)["attended"]
        assert expected.shape == got.shape
        assert np.max(np.abs(expected - got)) <= 1e-5 * max(1.0, np.max(np.abs(expected)))


@settings(max_examples=15, phases=PHASES)
@given(st.data())
def test_axes_in_any_order(data: st.DataObject) -> None:
    _check_spelled(data)


@pytest.mark.full
@settings(max_examples=600, phases=PHASES)
@given(st.data())
def test_axes_in_any_order_at_length(data: st.DataObject) -> None:
    _check_spelled(data)
