"""rename-io: conventions, explicit names, what follows, and what is refused."""

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
from tests.small_models import parse

if TYPE_CHECKING:
    from graphsurgery.patterns.io_names import ConventionName
    from graphsurgery.site_report import PassReport

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = Path(__file__).parents[1] / "cases"
SAMPLE = ("gemma2", "genai_llama", "llama_static")
BACK: dict[str, ConventionName] = {"genai_gptoss": "genai", "genai_llama": "genai"}
BACK |= dict.fromkeys(("optimum_llama", "optimum_gpt_oss", "optimum_qwen3_moe"), "optimum")


def exports() -> list[str]:
    return sorted(path.parent.name for path in FIXTURES.glob("*/model.onnx"))


def fixture(name: str) -> ir.Model:
    return load(FIXTURES / name / "model.onnx")


# ---- conventions --------------------------------------------------------------------------------------------------

RETAINED = {
    "llama": (
        ["input_ids", "position_ids", *(f"past_{kind}.{i}" for i in range(3) for kind in ("key", "value"))],
        ["logits", *(f"past_{kind}.{i}_RetainedState" for i in range(3) for kind in ("key", "value"))],
    ),
    "llama_static": (
        [
            *("input_ids", "attention_mask", "position_ids"),
            *(f"{kind}.{i}" for i in range(3) for kind in ("past_key", "past_value", "cumulative_length")),
        ],
        [
            "logits",
            *(
                f"{kind}.{i}_RetainedState"
                for i in range(3)
                for kind in ("past_key", "past_value", "cumulative_length")
            ),
        ],
    ),
    "genai_llama": (
        ["input_ids", "attention_mask", "past_key.0", "past_key.1", "past_value.0", "past_value.1"],
        ["logits", *(f"past_{kind}.{i}_RetainedState" for kind in ("key", "value") for i in range(2))],
    ),
    "gemma2": (
        [
            *(
                "input_ids",
                "position_ids",
                "past_key.0",
                "past_value.0",
                "sliding_window.0",
                "past_key.1",
                "past_value.1",
            ),
            *("past_key.2", "past_value.2", "sliding_window.2", "past_key.3", "past_value.3"),
        ],
        [
            *("logits", "past_key.0_RetainedState", "past_value.0_RetainedState", "sliding_window.0_RetainedState"),
            *("past_key.1_RetainedState", "past_value.1_RetainedState", "past_key.2_RetainedState"),
            *("past_value.2_RetainedState", "sliding_window.2_RetainedState", "past_key.3_RetainedState"),
            "past_value.3_RetainedState",
        ],
    ),
}


@pytest.mark.parametrize("name", RETAINED)
def test_retained_state_names(name):
    model = fixture(name)
    RenameIO()(model)
    assert interface(model) == RETAINED[name]


def test_states_of_linear_attention_are_named_too():
    model = fixture("qwen3_5_moe")
    report = RenameIO(to="retained-state")(model).report
    kinds = [("conv_state", "recurrent_state")] * 3 + [("past_key", "past_value")]
    names = [f"{kind}.{layer}" for layer, pair in enumerate(kinds) for kind in pair]
    assert interface(model)[0] == ["input_ids", "position_ids", *names]
    assert interface(model)[1] == ["logits", *(f"{name}_RetainedState" for name in names)]
    assert report.warnings == [
        (
            "2 retained states grow with every call, since the export joins new positions to them: a runtime that keeps "
            "states in place needs caches of a fixed size (export with a static cache)."
        )
    ]
    RenameIO(to="genai")(model)
    kept = [("conv_state", "recurrent_state")] * 3 + [("key", "value")]
    states = [f"{layer}.{kind}" for layer, pair in enumerate(kept) for kind in pair]
    assert interface(model)[0][2:] == [f"past_key_values.{state}" for state in states]
    assert interface(model)[1][1:] == [f"present.{state}" for state in states]


@pytest.mark.parametrize("to", ["genai", "optimum"])
def test_past_and_present(to):
    model = fixture("llama")
    RenameIO(to=to)(model)
    kinds = [f"{i}.{kind}" for i in range(3) for kind in ("key", "value")]
    assert interface(model)[0] == ["input_ids", "position_ids", *(f"past_key_values.{kind}" for kind in kinds)]
    assert interface(model)[1] == ["logits", *(f"present.{kind}" for kind in kinds)]


def test_transformers_names():
    model = fixture("optimum_llama")
    RenameIO(to="transformers")(model)
    kinds = [f"cache.layers.{i}.{kind}" for i in range(2) for kind in ("keys", "values")]
    assert interface(model)[0] == ["input_ids", "attention_mask", "position_ids", *(f"input.{kind}" for kind in kinds)]
    assert interface(model)[1] == ["logits", *(f"output.{kind}" for kind in kinds)]


def test_a_prompt_model_has_outputs_only():
    model = load(FIXTURES / "qwen3_vl_moe" / "language_model.onnx")
    before = interface(model)
    RenameIO(to="genai")(model)
    assert interface(model)[0] == before[0]
    assert interface(model)[1][1:] == [f"present.{i}.{kind}" for i in range(3) for kind in ("key", "value")]


def test_what_a_convention_has_no_name_for_is_refused():
    report = RenameIO(to="genai")(fixture("gemma2")).report
    refused = {site.id: site.reason for site in report.sites if site.status == "refused"}
    assert refused == {
        f"cache:{layer}.window": "genai has no name for a window cache; name it with names=[old=new]"
        for layer in (0, 2)
    }
    assert report.count("rewritten") == 8


CROSS = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[B,2,P,8] dk, float[B,2,E,8] ek, float[B,2,S,8] x) => (float[B,2,T,8] dk_out, float[B,2,E,8] ek_out)
{
    dk_out = Concat <axis = 2> (dk, x)
    ek_out = Identity (ek)
}
"""


def test_caches_of_an_encoder():
    model = parse(CROSS)
    names = {"dk": "past.0.k", "ek": "past.0.cross_k", "dk_out": "present.0.k", "ek_out": "present.0.cross_k"}
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = names.get(value.name or "", value.name)
    RenameIO(to="optimum")(model)
    assert interface(model) == (
        ["past_key_values.0.decoder.key", "past_key_values.0.encoder.key", "x"],
        ["present.0.decoder.key", "present.0.encoder.key"],
    )
    report = RenameIO(to="retained-state")(model).report
    assert [(site.id, site.status) for site in report.sites] == [
        ("cache:0.key", "rewritten"),
        ("cache:0.cross.key", "refused"),
    ]
    assert report.sites[1].reason == (
        "retained-state has no name for a cross-attention key cache; name it with names=[old=new]"
    )


def test_usual_names_of_inputs_that_have_none():
    model = fixture("optimum_llama")
    RenameIO(names=("input_ids=tokens", "attention_mask=input_mask", "logits=scores"))(model)
    report = RenameIO(to="optimum")(model).report
    assert interface(model)[0][:3] == ["input_ids", "attention_mask", "position_ids"]
    assert interface(model)[1][0] == "logits"
    assert {site.id: site.status for site in report.sites if site.status == "rewritten"} == {
        "input:tokens": "rewritten",
        "input:input_mask": "rewritten",
        "output:scores": "rewritten",
    }


def test_templates_replace_those_of_the_convention():
    model = fixture("optimum_llama")
    RenameIO(inputs="kv/{kind}_{layer}", outputs="{input}/out")(model)
    names = [f"kv/{kind}_{layer}" for layer in range(2) for kind in ("key", "value")]
    assert interface(model)[0][3:] == names
    assert interface(model)[1][1:] == [f"{name}/out" for name in names]
    model = fixture("optimum_llama")
    RenameIO(to="retained-state", prefix="vision")(model)
    assert interface(model)[1][1] == "past_key.0_vision_RetainedState"


def sizes(model: ir.Model) -> list[str]:
    return list(dict.fromkeys(str(value.shape) for value in (*model.graph.inputs, *model.graph.outputs)))


def test_symbolic_sizes_on_request():
    model = fixture("llama_static")
    before = sizes(model)
    RenameIO()(model)
    assert sizes(model) == before
    report = RenameIO(symbols=True)(model).report
    (site,) = [site for site in report.sites if site.status == "rewritten"]
    assert (site.id, site.reason) == ("symbols", "s10 -> batch_size, s69 -> seq_len, s12 -> ctx_len")
    assert sizes(model) == [
        *("[batch_size,seq_len]", "[batch_size,1,seq_len,ctx_len]", "[batch_size,2,ctx_len,8]", "[]"),
        "[batch_size,seq_len,64]",
    ]
    assert not RenameIO(symbols=True)(model).modified
    # The past of sliding layers is a size of its own.
    model = fixture("gemma2")
    RenameIO(to="genai", symbols=True)(model)
    assert sizes(model) == [
        "[batch_size,sequence_length]",
        *("[batch_size,2,past_sequence_length,8]", "[]", "[batch_size,2,past_sequence_length_1,8]"),
        "[batch_size,sequence_length,64]",
        *("[batch_size,2,past_sequence_length + sequence_length,8]",),
        "[batch_size,2,sequence_length + past_sequence_length_1,8]",
    ]


def test_a_size_that_is_called_so_already_is_in_the_way():
    model = fixture("llama_static")
    extra = ir.Value(name="extra", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["seq_len", 3]))
    model.graph.inputs.append(extra)
    report = RenameIO(symbols=True)(model).report
    assert {site.id: site.reason for site in report.sites if site.kinds == ("symbols",)} == {
        "symbols": "s10 -> batch_size, s12 -> ctx_len",
        "symbol:s69": "size 's69' cannot be called 'seq_len': another size is called so",
    }


# ---- the report ---------------------------------------------------------------------------------------------------


def test_the_report_says_what_was_renamed_and_what_grows():
    report = RenameIO()(fixture("llama")).report
    assert [site.id for site in report.sites] == [f"cache:{i}.{kind}" for i in range(3) for kind in ("key", "value")]
    first = report.sites[0]
    assert first.reason == (
        "input.cache.layers.0.keys -> past_key.0, output.cache.layers.0.keys -> past_key.0_RetainedState; "
        "it grows by S a call"
    )
    assert first.detail == {
        "inputs": {"input.cache.layers.0.keys": "past_key.0"},
        "outputs": {"output.cache.layers.0.keys": "past_key.0_RetainedState"},
        "form": "concat",
        "grows": True,
    }
    static = RenameIO()(fixture("llama_static")).report
    assert static.warnings == []
    assert static.sites[0].detail["grows"] is False


def test_a_second_run_changes_nothing():
    model = fixture("llama")
    RenameIO()(model)
    before = serialised(model)
    again = RenameIO()(model)
    assert not again.modified
    assert {(site.status, site.reason) for site in again.report.sites} == {("skipped", "already called so")}
    assert serialised(model) == before


def test_sites_can_be_chosen():
    model = fixture("llama")
    report = RenameIO(sites=("0", "2"), exclude=("value",))(model).report
    assert [site.id for site in report.sites if site.status == "rewritten"] == ["cache:0.key", "cache:2.key"]
    assert interface(model)[0][2:] == [
        *("past_key.0", "input.cache.layers.0.values", "input.cache.layers.1.keys", "input.cache.layers.1.values"),
        *("past_key.2", "input.cache.layers.2.values"),
    ]


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_a_name_that_is_taken_is_refused():
    model = fixture("llama")
    model.graph.node(40).outputs[0].name = "past_key.0"
    next(iter(model.graph.initializers.values())).name = "past_value.1_RetainedState"
    before = serialised(model)
    report = RenameIO(exclude=("2",))(model).report
    refused = {site.id: site.reason for site in report.sites if site.status == "refused"}
    assert refused == {
        "cache:0.key": (
            "input 'input.cache.layers.0.keys' cannot be called 'past_key.0', which is the name of a value inside"
        ),
        "cache:1.value": (
            "output 'output.cache.layers.1.values' cannot be called 'past_value.1_RetainedState', which is the name of an "
            "initializer"
        ),
    }
    assert report.count("rewritten") == 2
    assert serialised(model) != before


def test_a_name_that_a_refused_site_keeps_is_taken_too():
    def model() -> ir.Model:
        made = fixture("genai_llama")
        RenameIO(names=("past_key_values.0.key=value.0", "past_key_values.0.value=v.0"))(made)
        return made

    def layer(report: PassReport) -> dict[str, tuple[str, str]]:
        return {site.id: (site.status, site.reason.split(";")[0]) for site in report.sites if site.layer == 0}

    # One takes the name that the other leaves.
    wanted = RenameIO(inputs="{kind}.{layer}")
    assert layer(wanted(model()).report) == {
        "cache:0.key": ("rewritten", "value.0 -> key.0"),
        "cache:0.value": ("rewritten", "v.0 -> value.0"),
    }
    # It does not leave it, being refused...
    taken = model()
    taken.graph.node(3).outputs[0].name = "key.0"
    refusals = {
        "cache:0.key": ("refused", "input 'value.0' cannot be called 'key.0', which is the name of a value inside"),
        "cache:0.value": ("refused", "input 'v.0' cannot be called 'value.0': input 'value.0' is called so"),
    }
    assert layer(wanted(taken).report) == refusals
    # ... or not wanted.
    report = RenameIO(inputs="{kind}.{layer}", exclude=("cache:0.key",))(model()).report
    assert layer(report) == {"cache:0.key": ("skipped", "not selected"), "cache:0.value": refusals["cache:0.value"]}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("input_ids=attention_mask",),
            (
                "Option names of pass rename-io: input 'input_ids' cannot be called 'attention_mask': input 'attention_mask' is "
                "called so."
            ),
        ),
        (
            ("input_ids=x", "attention_mask=x"),
            (
                "Option names of pass rename-io: input 'input_ids' cannot be called 'x': input 'attention_mask' is to be called "
                "so too."
            ),
        ),
        (
            ("logits=input_ids",),
            "Option names of pass rename-io: output 'logits' cannot be called 'input_ids': input 'input_ids' is called so.",
        ),
        (
            ("logits=val_0",),
            "Option names of pass rename-io: output 'logits' cannot be called 'val_0', which is the name of a value inside.",
        ),
        (
            ("input_idz=x",),
            "Unknown input or output in option names of pass rename-io: 'input_idz'; did you mean input_ids?",
        ),
        (
            ("output:input_ids=x",),
            "Unknown output in option names of pass rename-io: 'input_ids'; did you mean input_ids?",
        ),
    ],
)
def test_explicit_names_that_cannot_be_given(names, message):
    model = fixture("optimum_llama")
    model.graph.node(5).outputs[0].name = "val_0"
    before = serialised(model)
    with pytest.raises(UsageError) as caught:
        RenameIO(names=names)(model)
    assert str(caught.value) == message
    assert serialised(model) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"names": ("a",)},
            (
                "Option names='a' of pass rename-io: write old=new or old->new, with input: or output: in front where only one "
                "side is meant."
            ),
        ),
        ({"names": ("a=b", "a->c")}, "Option names of pass rename-io renames 'a' twice; keep one."),
        ({"names": ("output:a=b", "a->c")}, "Option names of pass rename-io renames 'a' twice; keep one."),
        (
            {"inputs": "x{input}"},
            "Option inputs='x{input}' of pass rename-io may hold {kind}, {layer} in braces only.",
        ),
        (
            {"outputs": "x{"},
            "Option outputs='x{' of pass rename-io may hold {input}, {kind}, {layer} in braces only.",
        ),
        (
            {"outputs": "{layer:zz}"},
            "Option outputs='{layer:zz}' of pass rename-io may hold {input}, {kind}, {layer} in braces only.",
        ),
        (
            {"symbols": True, "to": "transformers"},
            "Option symbols of pass rename-io needs to=retained-state, genai or optimum.",
        ),
        (
            {"prefix": "p", "to": "genai"},
            "Option prefix='p' of pass rename-io belongs to to=retained-state.",
        ),
    ],
)
def test_options_that_say_nothing(options, message):
    with pytest.raises(UsageError) as caught:
        RenameIO(**options)
    assert str(caught.value) == message


def test_the_spec_round_trips():
    for spec in (
        "rename-io",
        "rename-io{to=genai}",
        "rename-io{names=[input_ids->ids,'logits=out']}",
        "rename-io{inputs='k/{layer}',outputs='{input}/o',sites=[0-3]}",
    ):
        made = make_pass(spec)
        assert make_pass(str(made)) == made


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
