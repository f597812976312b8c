"""Passes: options are one thing on the command line, in TOML and in Python; reports; caches that must not go stale."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from graphsurgery.errors import UsageError
from graphsurgery.names import Names
from graphsurgery.pass_base import REPORTS_KEY, Pass, count_nodes
from graphsurgery.passes.prune_last_token import PruneLastToken
from graphsurgery.passes.tidy import Tidy
from graphsurgery.registry import make_pass, pass_names, pass_type
from graphsurgery.specs import PassSpec, format_spec, parse_spec
from tests.small_models import CHAIN, DoubleNegate, ForeignRename, op_types, parse, value_of
from tests.strategies.options import any_value, options_of

if TYPE_CHECKING:
    from collections.abc import Callable

_KINDS: list[type[Pass]] = [*map(pass_type, pass_names()), DoubleNegate]


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _from_toml(kind: type[Pass], options: dict[str, Any]) -> Pass:
    return kind.from_options(tomllib.loads("".join(f"{key} = {_toml(value)}\n" for key, value in options.items())))


def _from_text(kind: type[Pass], options: dict[str, Any]) -> Pass:
    def text(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(str, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    spec = PassSpec(kind.name, tuple((key, text(value)) for key, value in options.items()))
    return kind.from_options(dict(parse_spec(format_spec(spec)).options))


def _outcome(make: Callable[..., Pass], kind: type[Pass], options: dict[str, Any]) -> Pass | type[UsageError]:
    try:
        return make(kind, options)
    except UsageError as error:
        return type(error)


@given(st.sampled_from(_KINDS).flatmap(lambda kind: st.tuples(st.just(kind), options_of(kind))))
def test_the_text_of_a_pass_makes_it_again(drawn):
    kind, options = drawn
    made = _outcome(lambda kind, options: kind(**options), kind, options)
    assume(isinstance(made, Pass))
    spec = parse_spec(str(made))
    assert kind.from_options(dict(spec.options)) == made
    if kind is not DoubleNegate:
        assert make_pass(str(made)) == made
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    assert all(getattr(made, key) != defaults[key] for key, _ in spec.options)


@given(st.sampled_from(_KINDS).flatmap(lambda kind: st.tuples(st.just(kind), options_of(kind))))
def test_options_mean_the_same_in_text_toml_and_python(drawn):
    kind, options = drawn
    made = _outcome(lambda kind, options: kind(**options), kind, options)
    assert _outcome(_from_toml, kind, options) == made
    assert _outcome(_from_text, kind, options) == made


@given(
    st.sampled_from([(kind, field.name) for kind in _KINDS for field in dataclasses.fields(kind)]),
    any_value(),
)
def test_a_value_is_valid_everywhere_or_nowhere(option, value):
    kind, field = option
    outcomes = [
        _outcome(make, kind, {field: value}) for make in (lambda kind, options: kind(**options), _from_toml, _from_text)
    ]
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": "many"}, "Option times='many' of pass double-negate is not valid: Input should be a valid integer"),
        ({"times": True}, "Option times='true' of pass double-negate is not valid: Input should be a valid integer"),
        ({"times": 1.5}, "Option times='1.5' of pass double-negate is not valid: Input should be a valid integer"),
        ({"times": None}, "Option times=None of pass double-negate is not valid: Input should be a valid integer"),
        ({"times": [1]}, "Option times=[1] of pass double-negate is not valid: Input should be a valid integer"),
        (
            {"style": "wild"},
            "Option style='wild' of pass double-negate is not valid: Input should be 'plain' or 'fancy'",
        ),
        (
            {"careful": "perhaps"},
            "Option careful='perhaps' of pass double-negate is not valid: Input should be a valid",
        ),
        ({"scale": "big"}, "Option scale='big' of pass double-negate is not valid: Input should be a valid number"),
        (
            {"sites": {"a": 1}},
            "Option sites={'a': 1} of pass double-negate is not valid: Input should be a valid tuple",
        ),
        ({"sites": None}, "Option sites=None of pass double-negate is not valid: Input should be a valid tuple"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(options, message):
    with pytest.raises(UsageError) as caught:
        DoubleNegate(**options)
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given_sites", "kept"),
    [
        ("0-3, sliding", ("0-3", "sliding")),
        (3, ("3",)),
        ([0, "1-2"], ("0", "1-2")),
        (("a,b",), ("a,b",)),
        ("", ()),
        ([], ()),
    ],
)
def test_lists_are_read_from_text_numbers_and_lists(given_sites, kept):
    made = DoubleNegate(sites=given_sites)
    assert made.sites == kept
    assert hash(made) == hash(DoubleNegate(sites=kept))


def test_numbers_and_truth_values_come_typed():
    made = DoubleNegate.from_options({"times": "3", "scale": "2", "careful": "false", "label": 7})
    assert (made.times, made.scale, made.careful, made.label) == (3, 2.0, False, "7")
    assert str(made) == "double-negate{times=3,label=7,scale=2.0,careful=false}"
    assert str(DoubleNegate()) == "double-negate"


def test_unknown_options_get_the_closest_and_aliases_their_field():
    with pytest.raises(UsageError) as caught:
        DoubleNegate.from_options({"timez": 1})
    assert str(caught.value) == "Unknown option of pass double-negate: 'timez'; did you mean times?"
    with pytest.raises(UsageError) as caught:
        DoubleNegate.from_options({"qqqq": 1})
    assert str(caught.value) == (
        "Unknown option of pass double-negate: 'qqqq'; "
        "there are careful, count, exclude, label, scale, sites, style, times."
    )
    assert DoubleNegate.from_options({"count": 4}) == DoubleNegate(times=4)
    with pytest.raises(UsageError, match=r"^Option 'times' of pass double-negate is given twice; keep one\.$"):
        DoubleNegate.from_options({"times": 1, "count": 1})


def test_dashes_do_for_underscores():
    assert PruneLastToken.from_options({"input-name": "rows", "logits-to-keep": 2}) == PruneLastToken(
        input_name="rows", keep=2
    )
    assert make_pass("prune-last-token{num-logits-to-keep=2}") == PruneLastToken(keep=2)


def test_passes_are_values():
    assert Tidy() == Tidy()
    assert len({Tidy(), Tidy(sites=("a",)), Tidy.from_options({"sites": "a"})}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Tidy().sites = ("b",)  # type: ignore[misc]


def test_a_pass_reports_every_candidate_in_graph_order():
    model = parse(CHAIN)
    result = DoubleNegate()(model)
    assert result.modified
    assert result.inexact == {"y"}
    assert [(site.id, site.status, site.reason) for site in result.report.sites] == [
        ("relu:a", "rewritten", "doubled"),
        ("exp:z", "refused", "Exp cannot be doubled"),
    ]
    assert (result.report.nodes_before, result.report.nodes_after) == (4, 6)
    assert (result.report.count("rewritten"), result.report.count("skipped"), result.report.count("refused")) == (
        1,
        0,
        1,
    )
    assert result.report.seconds > 0
    assert model.meta[REPORTS_KEY] == [result.report]


def test_what_is_not_selected_is_skipped_and_says_so():
    model = parse(CHAIN)
    result = DoubleNegate(exclude=("relu",))(model)
    assert not result.modified
    assert [(site.id, site.status, site.reason) for site in result.report.sites] == [
        ("relu:a", "skipped", "not selected"),
        ("exp:z", "refused", "Exp cannot be doubled"),
    ]
    assert op_types(model) == ["Relu", "Neg", "Abs", "Exp"]


def test_a_second_run_changes_nothing():
    model = parse(CHAIN)
    DoubleNegate()(model)
    before = ir.to_proto(model).SerializeToString()
    result = DoubleNegate()(model)
    assert not result.modified
    assert result.inexact == frozenset()
    assert ir.to_proto(model).SerializeToString() == before
    assert len(model.meta[REPORTS_KEY]) == 2


def test_nodes_are_counted_in_subgraphs_and_functions():
    assert count_nodes(parse(CHAIN)) == 4
    nested = """
    <ir_version: 9, opset_import: ["" : 18, "local" : 1]>
    g (float[4] x, bool flag) => (float[4] y)
    {
        y = If (flag) <
            then_branch = t () => (float[4] a) { a = local.twice(x) },
            else_branch = e () => (float[4] b) { b = Neg(x) }
        >
    }
    <domain: "local", opset_import: ["" : 18]>
    twice (v) => (w) { u = Add(v, v) w = Identity(u) }
    """
    assert count_nodes(parse(nested)) == 5


def test_edits_between_passes_in_other_runners_are_seen():
    model = parse(CHAIN)
    ir.passes.Sequential(DoubleNegate(label="first"), ForeignRename(), DoubleNegate(label="second"))(model)
    # Names of before the foreign pass are free again, those that it gave are taken.
    assert not Names.of(model).has_value("a")
    assert Names.of(model).value("renamed_0") == "renamed_0_1"
    assert value_of(model, "renamed_0").name == "renamed_0"
