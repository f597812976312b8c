"""The hostile cases that pruning must bear: values, counts, declared shapes, names, metadata."""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphsurgery
from graphsurgery.contracts import CONTRACTS_KEY, read_contracts
from graphsurgery.errors import InputRefusedError, UsageError
from graphsurgery.passes.prune_last_token import PruneLastToken
from graphsurgery.pipeline import Pipeline
from graphsurgery.site_report import Boundary, SiteReport
from tests.oracle import assert_pruned_equal, run, session

CASES = Path(__file__).parents[1] / "cases"
NAMES = {path.name[:3]: path for path in sorted(CASES.glob("*.onnx")) if path.name.count(".") == 1}

# What is inserted, by the way rows are chosen.
LAST = {"Slice": 1}
MASK = {"Shape": 1, "Slice": 2, "Neg": 1, "Cast": 2, "ArgMax": 1, "Unsqueeze": 1, "GatherND": 1}
POSITION = {"ArgMax": 1, "Unsqueeze": 1, "GatherND": 1}
RUNTIME = {"Cast": 1, "Reshape": 1, "Unsqueeze": 1, "GatherND": 1}
RUNTIME_INT64 = {"Reshape": 1, "Unsqueeze": 1, "GatherND": 1}


@dataclasses.dataclass
class Pruned:
    before: ir.Model
    model: ir.Model
    site: SiteReport
    warnings: list[str]

    @property
    def inserted(self) -> dict[str, int]:
        difference = collections.Counter(node.op_type for node in self.model.graph.all_nodes())
        difference.subtract(node.op_type for node in self.before.graph.all_nodes())
        return {op_type: count for op_type, count in difference.items() if count}

    def value(self, name: str) -> ir.Value:
        return next(v for node in self.model.graph.all_nodes() for v in node.outputs if v.name == name)


def path_of(case: str) -> Path:
    return NAMES[case]


def feeds_of(case: str) -> list[dict[str, Any]]:
    stored = np.load(path_of(case).with_suffix(".feeds.npz"))
    grouped: dict[str, dict[str, Any]] = {}
    for key in stored:
        feed, direction, name = key.split("|", 2)
        if direction == "in":
            grouped.setdefault(feed, {})[name] = stored[key]
    return list(grouped.values())


def pruned(case: str, **options: Any) -> Pruned:
    before, model = ir.load(path_of(case)), ir.load(path_of(case))
    report = Pipeline([PruneLastToken(**options)], check=True)(model)
    (site,) = report.passes[0].sites
    return Pruned(before, model, site, report.passes[0].warnings)


def held(case: str, **options: Any) -> Pruned:
    """Prune, and hold the result to its contract on the feeds of the case."""
    result = pruned(case, **options)
    assert result.site.status == "rewritten", result.site.reason
    opened = session(onnx.ModelProto.FromString(path_of(case).read_bytes()), CASES)
    assert_pruned_equal(opened, session(result.model, CASES), result.model, feeds_of(case))
    return result


def shape_of(value: ir.Value) -> list[Any]:
    assert value.shape is not None
    return [size if isinstance(size, int) else size.value for size in value.shape]


def names(values) -> list[str | None]:
    return [value.name for value in values]


RUNS = ["a10", "p01", "p02", "p04", "p06", "p08", "p11", "s01", "s05", "s06", "s07", "s09", "s11", "s12"]
WITH_MASK = {"a10", "p01", "p02", "p04", "p08", "p11", "s01", "s03", "s05", "s06", "s07", "s09", "s12", "s13"}
WITH_POSITIONS = WITH_MASK - {"a10"}


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"index": "last", "keep": 2, "depth": "norm"},
        {"index": "runtime", "input_name": "rows_to_keep", "keep": 3},
    ],
    ids=["auto", "last-2-norm", "runtime-3"],
)
def test_every_case_keeps_its_contract(case: str, options: dict[str, Any]):
    result = held(case, **options)
    expected = (LAST if case not in WITH_MASK else MASK) if not options else None
    if expected is not None:
        assert result.inserted == expected
    added = ["rows_to_keep"] if options.get("index") == "runtime" else []
    assert names(result.model.graph.inputs) == names(result.before.graph.inputs) + added
    assert names(result.model.graph.outputs) == names(result.before.graph.outputs)
    assert shape_of(result.model.graph.outputs[0])[1] == options.get("keep", 1)
    assert result.model.ir_version == result.before.ir_version
    assert dict(result.model.opset_imports) == dict(result.before.opset_imports)
    before, after = set(result.before.graph.initializers), set(result.model.graph.initializers)
    assert before <= after
    assert all(name.startswith("lm_head/prune_last_token/") for name in after - before)


@pytest.mark.full
@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("index", ["auto", "last", "mask", "position", "runtime"])
@pytest.mark.parametrize("depth", ["head", "norm", "layer"])
@pytest.mark.parametrize("keep", [1, 2, 4])
def test_every_case_in_every_mode(case: str, index: str, depth: str, keep: int):
    missing = {"mask": case not in WITH_MASK, "position": case not in WITH_POSITIONS}
    if missing.get(index, False):
        with pytest.raises(UsageError, match=f"index={index} of pass prune-last-token: the model has no"):
            pruned(case, index=index, depth=depth, keep=keep)
        return
    held(case, index=index, depth=depth, keep=keep, input_name="rows_to_keep")


@pytest.mark.parametrize("case", sorted({*RUNS, "s03", "s13"}))
def test_other_outputs_and_inputs_declare_what_they_did(case: str):
    result = pruned(case)
    for before, after in zip(result.before.graph.inputs, result.model.graph.inputs, strict=True):
        assert (before.name, shape_of(before), before.dtype) == (after.name, shape_of(after), after.dtype)
    first, *others = zip(result.before.graph.outputs, result.model.graph.outputs, strict=True)
    for before, after in others:
        assert (before.name, shape_of(before), before.dtype) == (after.name, shape_of(after), after.dtype)
    old, new = shape_of(first[0]), shape_of(first[1])
    assert new == [old[0], 1, old[2]]
    assert result.site.boundaries[0].outputs_before == ("logits",)


@pytest.mark.parametrize("case", sorted({*RUNS, "s03", "s13"}))
@pytest.mark.parametrize(
    ("options", "inserted"),
    [
        ({"index": "last"}, LAST),
        ({"index": "mask"}, MASK),
        ({"index": "position"}, POSITION),
        ({"index": "runtime", "input_name": "rows_to_keep"}, RUNTIME),
        ({"index": "runtime", "input_name": "rows_to_keep", "input_type": "int64_b"}, RUNTIME_INT64),
    ],
    ids=["last", "mask", "position", "runtime-int32", "runtime-int64"],
)
def test_how_many_nodes_are_inserted(case: str, options: dict[str, Any], inserted: dict[str, int]):
    missing = {"mask": case not in WITH_MASK, "position": case not in WITH_POSITIONS}
    if missing.get(options["index"], False) or (case == "s11" and options["index"] == "runtime"):
        return
    if case == "p11" and options["index"] == "position":
        inserted = inserted | {"ReduceMax": 1}
    assert pruned(case, **options).inserted == inserted


# ---- one case after the other -------------------------------------------------------------------------------------


def test_p01_the_hidden_state_that_is_an_output_stays_whole():
    result = held("p01", index="last", depth="norm")
    assert shape_of(result.model.graph.outputs[1]) == ["batch_size", "sequence_length", 16]
    assert result.inserted == LAST
    assert result.site.reason == (
        "only the last row of every batch row is computed; stopped at the head: every row of 'hidden_states' is "
        "needed by graph output 'hidden_states'"
    )
    hidden = result.value("hidden_states")
    assert [node.op_type for node in hidden.consumers()] == ["Slice"]


def test_p01_the_hidden_state_alone_can_be_pruned():
    result = held("p01", output="hidden_states")
    assert [(value.name, shape_of(value)) for value in result.model.graph.outputs[:2]] == [
        ("logits", ["batch_size", "sequence_length", 40]),
        ("hidden_states", ["batch_size", 1, 16]),
    ]
    assert result.site.id == "hidden:hidden_states"
    assert result.site.boundaries == (
        Boundary(
            "main",
            ("hidden_states",),
            ("hidden_states",),
            ("hidden_states/all_rows", "attention_mask", "input_ids"),
            ("hidden_states",),
        ),
    )


def test_p02_the_tied_table_stays_one():
    result = held("p02")
    tables = [value for value in result.model.graph.initializers.values() if shape_of(value) == [40, 16]]
    assert len(tables) == 1
    assert sorted(node.op_type for node in tables[0].consumers()) == ["Gather", "Transpose"]


def test_p04_the_tail_declares_one_row_and_attention_what_it_was():
    result = held("p04")
    tail = [node for node in result.model.graph if node.name and node.name.startswith("/lm_head/")]
    assert [node.op_type for node in tail] == ["MatMul", "Add", "Div", "Tanh", "Mul", "Cast"]
    assert [shape_of(node.outputs[0])[1] for node in tail] == [1] * 6
    before = {
        v.name: v for node in result.before.graph for v in node.outputs if v.shape is not None and len(v.shape) == 4
    }
    scores = [name for name, value in before.items() if shape_of(value)[-2] == "sequence_length"]
    assert scores
    for name in scores:
        assert shape_of(result.value(name or "")) == shape_of(before[name])
    cap = result.model.graph.initializers["softcap"]
    assert sorted(node.op_type for node in cap.consumers()) == ["Div", "Div", "Mul", "Mul"]


def test_p05_is_pruned_already():
    result = pruned("p05")
    assert result.site.status == "refused"
    assert result.site.reason == (
        "already pruned: output 'logits' [batch_size, num_logits, 40] does not hold one row for each of the "
        "sequence_length tokens of 'input_ids', Slice node '/lm_head/Slice_105' selects them"
    )
    assert result.inserted == {}
    assert names(result.model.graph.inputs) == names(result.before.graph.inputs)
    assert result.model.metadata_props == result.before.metadata_props


def test_p06_the_packed_head_is_left_as_it_is():
    result = held("p06")
    assert result.site.detail["products"] == ["MatMulNBits /lm_head/MatMulNBits_5"]
    before = next(node for node in result.before.graph if node.op_type == "MatMulNBits")
    after = next(node for node in result.model.graph if node.op_type == "MatMulNBits")
    assert names(after.inputs[1:]) == names(before.inputs[1:])
    assert {k: v.value for k, v in after.attributes.items()} == {k: v.value for k, v in before.attributes.items()}
    (warning,) = result.warnings
    assert warning == (
        "index=last (the model has neither a rank-2 attention mask nor position ids) takes row S-1 of every batch "
        "row: right for single prompts and left padding, wrong for right-padded batches."
    )


@pytest.mark.parametrize("input_type", ["int32_b11", "int64_b"])
def test_p08_each_row_of_a_right_padded_batch_has_its_own_last_token(input_type: str):
    result = pruned("p08", index="runtime", input_name="which", input_type=input_type)
    feeds = feeds_of("p08")[0]
    assert feeds["attention_mask"].sum(axis=1).tolist() == [5, 3, 1]
    kind, shape = (np.int32, (3, 1, 1)) if input_type == "int32_b11" else (np.int64, (3,))
    value = result.model.graph.inputs[-1]
    assert (value.name, shape_of(value)) == ("which", ["batch_size", *[1] * (len(shape) - 1)])
    full = run(session(result.before, CASES), feeds)["logits"]
    opened = session(result.model, CASES)
    for wanted in ([4, 2, 0], [0, 0, 0], [2, 2, 2]):
        fed = feeds | {"which": np.array(wanted, kind).reshape(shape)}
        got = run(opened, fed)["logits"]
        np.testing.assert_allclose(got[:, 0], full[np.arange(3), wanted], rtol=0, atol=1e-5 * np.abs(full).max())
    masked = held("p08", index="mask")
    got = run(session(masked.model, CASES), feeds)["logits"]
    np.testing.assert_allclose(got[:, 0], full[np.arange(3), [4, 2, 0]], rtol=0, atol=1e-5 * np.abs(full).max())


def test_p11_rows_come_from_the_embeddings():
    result = held("p11")
    (contract,) = read_contracts(result.model)
    assert (contract.sequence, contract.sequence_axis, contract.index) == ("inputs_embeds", 1, "mask")
    result = held("p11", index="position")
    assert result.inserted == POSITION | {"ReduceMax": 1}
    assert result.site.detail["index_source"] == "position_ids"


def test_s01_no_weight_is_read_and_what_is_inserted_is_inline():
    result = held("s01")
    added = set(result.model.graph.initializers) - set(result.before.graph.initializers)
    assert len(added) == 4
    assert all(not isinstance(result.model.graph.initializers[name].const_value, ir.ExternalTensor) for name in added)
    for name, value in result.before.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            after = result.model.graph.initializers[name].const_value
            assert isinstance(after, ir.ExternalTensor)
            assert (after.offset, after.length) == (value.const_value.offset, value.const_value.length)


def test_s03_a_model_without_its_data_is_pruned_too():
    result = pruned("s03")
    assert result.site.status == "rewritten"
    assert result.inserted == MASK
    head = result.model.graph.initializers["lm_head.weight"].const_value
    assert isinstance(head, ir.ExternalTensor)


@pytest.mark.parametrize("name", ["", ".empty", ".truncated"])
def test_s04_what_is_no_model_never_reaches_the_pass(name: str):
    with pytest.raises(InputRefusedError, match="s04_lfs_pointer_and_truncated"):
        graphsurgery.load(CASES / f"s04_lfs_pointer_and_truncated{name}.onnx")


def test_s05_nodes_come_out_sorted_and_named_once():
    result = held("s05")
    onnx.checker.check_model(ir.to_proto(result.model))
    assert len(list(result.model.graph)) == len(list(result.before.graph)) + sum(MASK.values())
    given = [node.name for node in result.model.graph if node.name]
    assert len(given) == len(set(given)) == sum(MASK.values())


def test_s06_names_that_are_taken_are_left_alone():
    with pytest.raises(UsageError) as caught:
        pruned("s06", index="runtime")
    assert str(caught.value) == (
        "Option input_name='last_token_indices' of pass prune-last-token: the model already has a value of that name; "
        "choose another with input_name=NAME."
    )
    result = held("s06", index="runtime", input_name="rows_to_keep")
    before, after = result.before.graph.initializers, result.model.graph.initializers
    for name in ("axes", "indices", "one", "starts", "block_0", "val_0"):
        old, new = before[name].const_value, after[name].const_value
        assert old is not None
        assert new is not None
        assert old.tobytes() == new.tobytes()
    values: list[str | None] = [v.name for node in result.model.graph.all_nodes() for v in node.outputs if v.name]
    values += [*names(result.model.graph.inputs), *after]
    assert len(values) == len(set(values))
    foreign = next(value for value in result.model.graph.inputs if value.name == "last_token_indices")
    assert not any(node.metadata_props.get("graphsurgery.pass") for node in foreign.consumers())


@pytest.mark.parametrize("case", RUNS)
def test_a_second_run_changes_nothing(case: str):
    result = pruned(case)
    text = ir.to_proto(result.model).SerializeToString()
    report = Pipeline([PruneLastToken()], check=True)(result.model)
    assert not report.changed
    (site,) = report.passes[0].sites
    assert site.status == "refused"
    assert site.reason.startswith("already pruned: ")
    assert "node 'lm_head/prune_last_token/rows' selects them" in site.reason
    assert ir.to_proto(result.model).SerializeToString() == text


def test_s07_weights_that_are_fed_still_count():
    result = held("s07")
    assert names(result.model.graph.inputs) == names(result.before.graph.inputs)
    weight = result.before.graph.initializers["lm_head.weight"]
    override = {"lm_head.weight": np.zeros(shape_of(weight), np.float32)}
    for feeds in feeds_of("s07"):
        assert not run(session(result.model, CASES), feeds | override)["logits"].any()


def test_s09_metadata_and_names_of_sizes_stay():
    result = held("s09")
    before, after = result.before, result.model
    added = {key for key in after.metadata_props if key not in before.metadata_props}
    assert added == {CONTRACTS_KEY, "graphsurgery.pipeline", "graphsurgery.exact_outputs"}
    assert {k: v for k, v in after.metadata_props.items() if k not in added} == dict(before.metadata_props)
    assert after.graph.metadata_props == before.graph.metadata_props
    assert (after.doc_string, after.graph.doc_string) == (before.doc_string, before.graph.doc_string)
    assert (after.ir_version, before.ir_version) == (8, 8)
    nodes = {node.name: node for node in after.graph}
    for node in before.graph:
        assert nodes[node.name].metadata_props == node.metadata_props
        assert nodes[node.name].doc_string == node.doc_string
    for old, new in zip(
        (*before.graph.inputs, *before.graph.outputs), (*after.graph.inputs, *after.graph.outputs), strict=True
    ):
        assert (old.metadata_props, old.doc_string) == (new.metadata_props, new.doc_string)
    assert json.loads(after.metadata_props["graphsurgery.exact_outputs"]) == sorted(
        name or "" for name in names(before.graph.outputs)[1:]
    )


def test_s11_what_is_inserted_is_valid_at_opset_11():
    result = held("s11", index="runtime", input_name="rows", keep=2)
    onnx.checker.check_model(ir.to_proto(result.model))
    assert result.model.opset_imports[""] == 11
    assert result.model.ir_version == 6
    assert not any("select_last_index" in node.attributes for node in result.model.graph)


def test_s12_the_shared_dequantised_table_keeps_both_users():
    result = held("s12")
    (shared,) = [
        node.outputs[0]
        for node in result.model.graph
        if node.op_type == "DequantizeLinear" and len(node.outputs[0].uses()) == 2
    ]
    assert sorted(node.op_type for node in shared.consumers()) == ["Gather", "Transpose"]
    kinds = {value.dtype for value in result.model.graph.initializers.values()}
    assert ir.DataType.BFLOAT16 in kinds


def test_s13_an_unknown_operator_is_kept_and_no_domain_is_added():
    result = pruned("s13")
    assert result.site.status == "rewritten"
    assert result.inserted == MASK
    vendor = next(node for node in result.model.graph if node.domain == "vendor.ops")
    before = next(node for node in result.before.graph if node.domain == "vendor.ops")
    assert {k: v.value for k, v in vendor.attributes.items()} == {k: v.value for k, v in before.attributes.items()}
    assert set(result.model.opset_imports) == {"", "vendor.ops"}
    assert shape_of(result.model.graph.outputs[0]) == ["batch_size", 1, 40]


def test_a10_the_head_of_a_fused_decoder():
    result = held("a10", depth="norm")
    assert result.inserted == MASK | {"GatherND": 2}
    assert len(result.site.detail["selected_from"]) == 2  # type: ignore[arg-type]


def test_f04_functions_stay_as_they_are():
    result = held("f04", index="last")
    assert [identifier[:2] for identifier in result.model.functions] == [
        identifier[:2] for identifier in result.before.functions
    ]
    assert result.inserted == LAST


@pytest.mark.parametrize("index", ["mask", "position", "last", "runtime"])
def test_rows_behind_an_operator_that_is_not_known(index: str):
    """Half of each query comes from it: how many axes that has is not known, and those of the whole query are."""
    proto = onnx.load(CASES / "s03_external_data_missing_or_short.onnx", load_external_data=False)  # noqa: TID251
    (half,) = (node for node in proto.graph.node if node.name == "/model/layers.0/Slice_31")
    half.op_type = "Nothing"
    report = Pipeline([PruneLastToken(depth="layer", index=index)], check=True)(ir.from_proto(proto))  # type: ignore[arg-type]
    (site,) = report.passes[0].sites
    assert site.status == "rewritten"
    assert "'/model/layers.0/Concat_33_output_0'" in site.reason
