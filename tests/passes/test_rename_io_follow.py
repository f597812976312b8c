"""rename-io: what follows a name, names there and back, and renames that compose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.contracts import EXACT_OUTPUTS_KEY, read_contracts
from graphsurgery.equivalence.verify import verify_models
from graphsurgery.errors import UsageError
from graphsurgery.model_io import load, save
from graphsurgery.passes.prune_last_token import PruneLastToken
from graphsurgery.passes.rename_io import RenameIO
from graphsurgery.pipeline import Pipeline
from graphsurgery.registry import make_pass
from graphsurgery.renames import RENAMED_KEY, read_renames
from tests.interface_helpers import assert_same_outputs, interface, serialised
from tests.oracle import run, session
from tests.passes.renaming import FIXTURES, fixture
from tests.small_models import parse

if TYPE_CHECKING:
    from graphsurgery.patterns.io_names import ConventionName

CASES = Path(__file__).parents[1] / "cases"
SAMPLE = ("gemma2", "genai_llama", "llama_static")
BACK: dict[str, ConventionName] = {"genai_gptoss": "genai", "genai_llama": "genai"}
BACK |= dict.fromkeys(("optimum_llama", "optimum_gpt_oss", "optimum_qwen3_moe"), "optimum")


def exports() -> list[str]:
    return sorted(path.parent.name for path in FIXTURES.glob("*/model.onnx"))


# ---- what follows -------------------------------------------------------------------------------------------------


def test_contracts_and_exact_outputs_follow(tmp_path):
    source = FIXTURES / "optimum_llama" / "model.onnx"
    model = load(source)
    passes = [
        PruneLastToken(index="mask"),
        RenameIO(names=("logits=scores", "attention_mask=logits", "input_ids=ids", "present.0.key=k")),
        RenameIO(names=("scores=attention_mask",)),
    ]
    Pipeline(passes, check=True)(model)
    (contract,) = read_contracts(model)
    assert (contract.output, contract.source, contract.sequence) == ("attention_mask", "logits", "ids")
    exact = json.loads(model.metadata_props[EXACT_OUTPUTS_KEY])
    assert exact == ["k", "present.0.value", "present.1.key", "present.1.value"]
    renames = read_renames(model)
    assert renames.inputs == {"ids": "input_ids", "logits": "attention_mask"}
    assert renames.outputs == {"attention_mask": "logits", "k": "present.0.key"}
    save(model, tmp_path / "renamed.onnx")
    report = verify_models(source, tmp_path / "renamed.onnx", opt_level_check=False)
    assert (report.status, report.reasons) == ("equal", ())
    assert [(item.name, item.rewritten) for item in report.outputs][:2] == [
        ("logits", "attention_mask"),
        ("present.0.key", "k"),
    ]
    # A second model made of the first: names are compared through the export.
    later = load(tmp_path / "renamed.onnx")
    Pipeline([RenameIO(names=("ids=logits", "logits=ids"))])(later)
    save(later, tmp_path / "later.onnx")
    assert verify_models(tmp_path / "renamed.onnx", tmp_path / "later.onnx", opt_level_check=False).status == "equal"
    assert verify_models(source, tmp_path / "later.onnx", opt_level_check=False).status == "equal"


def test_boundaries_of_earlier_passes_follow():
    model = fixture("optimum_llama")
    report = Pipeline([PruneLastToken(index="mask"), RenameIO(names=("logits=scores", "attention_mask=m"))])(model)
    (boundary,) = report.passes[0].sites[0].boundaries
    assert boundary.outputs_before == ("logits",)
    assert boundary.outputs_after == ("scores",)


NOTED = """
<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
g (float[B,2,P,8] past_key_0, float[B,2,S,8] x) => (float[B,2,T,8] present_key_0)
{ present_key_0 = local.layer (x, past_key_0) }
<domain: "local", opset_import: ["" : 21]>
layer (h, past_key_0) => (present_key_0) { present_key_0 = Concat <axis = 2> (past_key_0, h) }
"""


def test_names_inside_functions_and_metadata_follow():
    model = parse(NOTED)
    node = model.graph.node(0)
    model.metadata_props["names"] = '{"in": ["past_key_0", "x"], "note": "past_key_0 is kept"}'
    model.graph.metadata_props["first"] = "past_key_0"
    node.metadata_props.update({"reads": "past_key_0", "pkg.torch.onnx.fx_node": "past_key_0"})
    model.graph.outputs[0].metadata_props["fed as"] = "past_key_0"
    before = serialised(model)
    RenameIO()(model)
    function = next(iter(model.functions.values()))
    assert [value.name for value in function.inputs] == ["h", "past_key.0"]
    assert [value.name for value in function.outputs] == ["past_key.0_RetainedState"]
    assert model.metadata_props["names"] == '{"in": ["past_key.0", "x"], "note": "past_key_0 is kept"}'
    assert model.graph.metadata_props["first"] == "past_key.0"
    assert node.metadata_props == {"reads": "past_key.0", "pkg.torch.onnx.fx_node": "past_key_0"}
    assert model.graph.outputs[0].metadata_props["fed as"] == "past_key.0"
    RenameIO(inputs="past_key_{layer}", outputs="present_key_{layer}")(model)
    assert serialised(model) == before
    # Where a body uses the new name for something else, its own names stay.
    function.inputs[0].name = "past_key.0"
    RenameIO()(model)
    assert [value.name for value in function.inputs] == ["past_key.0", "past_key_0"]


def test_quantisation_and_value_infos_follow(tmp_path):
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N] x, float scale) => (float[N] y) { y = Relu (x) }'
    )
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N"]))
    note = proto.graph.quantization_annotation.add(tensor_name="y")
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="scale")
    onnx.save(proto, tmp_path / "model.onnx")
    model = load(tmp_path / "model.onnx")
    RenameIO(names=("y=out", "scale=step"))(model)
    save(model, tmp_path / "renamed.onnx")
    graph = onnx.load(tmp_path / "renamed.onnx").graph  # noqa: TID251 - there is no external data
    assert [info.name for info in graph.value_info] == ["out"]
    (annotation,) = graph.quantization_annotation
    assert annotation.tensor_name == "out"
    assert annotation.quant_parameter_tensor_names[0].value == "step"
    again = load(tmp_path / "renamed.onnx")
    RenameIO(names=("out=y", "step=scale"))(again)
    save(again, tmp_path / "back.onnx")
    save(load(tmp_path / "model.onnx"), tmp_path / "same.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "same.onnx").read_bytes()


def test_initializers_that_are_inputs_keep_their_order():
    model = load(CASES / "s07_weights_are_also_graph_inputs.onnx")
    before, order = serialised(model), list(model.graph.initializers)
    RenameIO(names=("lm_head.weight=head", "input_ids=ids"))(model)
    assert list(model.graph.initializers) == ["head" if name == "lm_head.weight" else name for name in order]
    RenameIO(names=("head=lm_head.weight", "ids=input_ids"))(model)
    assert serialised(model) == before


PASSED = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[B,4] x, float[B,4] kept) => (float[B,4] y, float[B,4] kept) { y = Relu (x) }
"""


def test_an_output_that_is_an_input_parts_from_it_where_the_names_do():
    model = parse(PASSED)
    RenameIO(names=("kept=both",))(model)
    assert interface(model) == (["x", "both"], ["y", "both"])
    assert len(model.graph) == 1
    RenameIO(names=("input:both=given", "output:both=made"))(model)
    assert interface(model) == (["x", "given"], ["y", "made"])
    assert [node.op_type for node in model.graph] == ["Relu", "Identity"]
    feeds = {"x": np.ones((1, 4), np.float32), "given": np.full((1, 4), 3, np.float32)}
    assert run(session(model), feeds)["made"].tolist() == [[3.0] * 4]


# ---- equality -----------------------------------------------------------------------------------------------------


def check_there_and_back(name: str) -> None:
    """Renaming and renaming back gives the very same protobuf, and what is renamed computes the same."""
    model = fixture(name)
    before, names = serialised(model), interface(model)
    renamed = fixture(name)
    Pipeline([RenameIO(to="retained-state")], check=True)(renamed)
    mapped = [dict(zip(old, new, strict=True)) for old, new in zip(names, interface(renamed), strict=True)]
    assert_same_outputs(model, renamed, FIXTURES / name, *mapped)  # type: ignore[arg-type]
    RenameIO(to="retained-state")(model)
    assert len(read_renames(model).inputs) == sum(old != new for old, new in mapped[0].items())
    RenameIO(to=BACK.get(name, "transformers"))(model)
    assert RENAMED_KEY not in model.metadata_props
    assert serialised(model) == before


@pytest.mark.parametrize("name", SAMPLE)
def test_there_and_back(name):
    check_there_and_back(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in exports() if name not in SAMPLE])
def test_there_and_back_on_all_exports(name):
    check_there_and_back(name)


@st.composite
def renamings(draw, names: tuple[str, ...]) -> dict[str, str]:
    """A bijection of some names onto free ones and onto each other."""
    chosen = draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    letters = st.text(st.characters(codec="utf-8", exclude_characters="=\0", exclude_categories=["Cs"]), min_size=1)
    fresh = letters.filter(lambda text: text not in names and "->" not in text and text != ":")
    pool = draw(st.lists(fresh.map("n".__add__), unique=True, min_size=len(chosen), max_size=len(chosen)))
    targets = draw(st.permutations([*chosen, *pool]))
    return dict(zip(chosen, targets, strict=False))


NAMES = ("a", "b", "c", "y", "z")
MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[N] a, float[N] b, float[N] c) => (float[N] y, float[N] z)
{
    inner = Add (a, b)
    y = Sub (inner, c)
    z = Mul (inner, c)
}
"""


@given(renamings(NAMES))
def test_any_renaming_computes_the_same_and_can_be_undone(mapping):
    model = parse(MODEL)
    before = serialised(model)
    given_names, made_names = interface(model)
    spec = RenameIO(names=tuple(f"{old}={new}" for old, new in mapping.items()))
    assert make_pass(str(spec)) == spec
    changed = any(old != new for old, new in mapping.items())
    assert spec(model).modified == changed
    assert interface(model) == (
        [mapping.get(name or "", name) for name in given_names],
        [mapping.get(name or "", name) for name in made_names],
    )
    renames = read_renames(model)
    assert {**renames.inputs, **renames.outputs} == {new: old for old, new in mapping.items() if old != new}
    feeds = {"a": np.array([1, 2], np.float32), "b": np.array([3, 4], np.float32), "c": np.array([5, 6], np.float32)}
    result = run(session(model), {mapping.get(name, name): array for name, array in feeds.items()})
    assert result[mapping.get("y", "y")].tolist() == [-1, 0]
    assert result[mapping.get("z", "z")].tolist() == [20, 36]
    back = tuple(f"{new}={old}" for old, new in mapping.items() if old != new)
    RenameIO(to="none", names=back)(model)
    assert serialised(model) == before


@given(renamings(NAMES), renamings(NAMES))
def test_renames_compose(first, second):
    model = parse(MODEL)
    RenameIO(names=tuple(f"{old}={new}" for old, new in first.items()))(model)
    # The second speaks of the names that the first has given.
    names = {name: first.get(name, name) for name in NAMES}
    later = {names[old]: new for old, new in second.items()}
    wanted = [later.get(name, name) for name in names.values()]
    if len(set(wanted)) < len(wanted):
        with pytest.raises(UsageError, match="cannot be called"):
            RenameIO(to="none", names=tuple(f"{old}={new}" for old, new in later.items()))(model)
        return
    RenameIO(to="none", names=tuple(f"{old}={new}" for old, new in later.items()))(model)
    renames = read_renames(model)
    final = {name: later.get(now, now) for name, now in names.items()}
    assert {**renames.inputs, **renames.outputs} == {now: name for name, now in final.items() if now != name}


def test_nothing_external_is_read(monkeypatch):
    def read(self):
        raise AssertionError(f"tensor {self.name} was read")

    model = load(CASES / "s03_external_data_missing_or_short.onnx")
    monkeypatch.setattr(ir.ExternalTensor, "numpy", read)
    monkeypatch.setattr(ir.ExternalTensor, "_load", read)
    assert RenameIO()(model).modified
