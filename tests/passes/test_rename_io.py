"""rename-io: conventions, templates, explicit names, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
import pytest

from graphsurgery.errors import UsageError
from graphsurgery.model_io import load
from graphsurgery.passes.rename_io import RenameIO
from graphsurgery.registry import make_pass
from tests.interface_helpers import interface, serialised
from tests.passes.renaming import FIXTURES, fixture
from tests.small_models import parse

if TYPE_CHECKING:
    from graphsurgery.site_report import PassReport

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
