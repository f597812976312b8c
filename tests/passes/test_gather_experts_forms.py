"""gather-experts on generated models in every form that exporters write, recognised and rewritten under each strategy."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, reject, settings

from graphsurgery.invariants import violations
from graphsurgery.pipeline import Pipeline
from tests.oracle import run, session, tolerance_of
from tests.strategies.experts import Spec, build, expert_specs, feeds_of

MODES = {
    "grouped": "gather-experts",
    "gather": "gather-experts{strategy=gather}",
    "dense": "gather-experts{strategy=dense}",
    "loop": "gather-experts{strategy=packed,chunk_size=3,lowering=loop}",
    "loop_lanes": "gather-experts{strategy=packed,chunk_size=2,lanes=2,lowering=loop}",
    "npu": "gather-experts{target=npu,chunk_size=3,lanes=2,threshold=3}",
}
DONE = "already written by an earlier run of this pass"


def assert_equal(spec: Spec, mode: str) -> None:
    """The model after the pass gives what it gave."""
    proto = build(spec)
    model = ir.from_proto(proto)
    report = Pipeline([MODES[mode]])(model).passes[0]
    if any("cannot be read" in site.reason for site in report.sites):
        # What the recogniser reads is held by its own tests.
        reject()
    assert [site.status for site in report.sites] == ["rewritten"], [site.reason for site in report.sites]
    assert not violations(model)
    before, after = session(proto), session(model)
    sizes = [spec.static] if spec.static is not None else [(1, 1), (2, 5)]
    for number, (batch, length) in enumerate(sizes):
        feeds = feeds_of(spec, batch, length, number)
        reference, result = run(before, feeds), run(after, feeds)
        for name, wanted in reference.items():
            found = result[name]
            assert found.shape == wanted.shape
            assert found.dtype == wanted.dtype
            scale = max(1.0, float(np.max(np.abs(wanted), initial=0)))
            half = spec.half or wanted.dtype == np.float16
            bound = 2e-3 if half else tolerance_of(wanted)
            np.testing.assert_allclose(
                found.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=bound * scale, err_msg=name
            )
    again = Pipeline([MODES[mode]])(model).passes[0]
    assert not again.changed
    assert [(site.status, site.reason) for site in again.sites] == [("skipped", DONE)]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12)
@given(spec=expert_specs())
def test_every_form(mode: str, spec: Spec) -> None:
    assert_equal(spec, mode)


@pytest.mark.parametrize("half", [False, True])
def test_einsum_is_packed_at_fixed_sizes(half: bool) -> None:
    assert_equal(Spec(form="einsum", static=(1, 6), half=half), "npu")


@pytest.mark.parametrize("form", ["batched", "masked", "selected", "einsum"])
@pytest.mark.parametrize("mode", ["grouped", "gather"])
def test_halves_whose_bounds_are_reckoned_from_shapes(mode: str, form: str) -> None:
    spec = Spec(form=form, gate="chunks")
    model = ir.from_proto(build(spec))
    assert [site.status for site in Pipeline([MODES[mode], "tidy"])(model).passes[0].sites] == ["rewritten"]
    # The exporter's own rows are not computed any more for the sake of their shape.
    made = [node for node in model.graph if node.op_type == "Slice"]
    assert not any("graphsurgery.pass" not in node.metadata_props for node in made)
    assert_equal(spec, mode)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=150)
@given(spec=expert_specs())
def test_every_form_at_length(mode: str, spec: Spec) -> None:
    assert_equal(spec, mode)
