"""Specs as text: round trip, and what the errors say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.errors import UsageError
from graphsurgery.specs import PassSpec, format_spec, parse_spec, split_specs

_NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_.:-]{0,12}", fullmatch=True)
_KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
_TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="ab,{}[]'\"\\= \t\n=", max_size=10),
    st.sampled_from(["8", "auto", "256MiB", "S=4096,P=0", "", "'", '"', "\\", "a\\'b", "[x]", " lead", "0-3"]),
)
_VALUES = st.one_of(_TEXTS, st.lists(_TEXTS, max_size=4).map(tuple))
_SPECS = st.builds(
    lambda name, options: PassSpec(name, tuple(options.items())), _NAMES, st.dictionaries(_KEYS, _VALUES, max_size=4)
)


@given(_SPECS)
def test_a_spec_survives_being_written_and_read(spec):
    text = format_spec(spec)
    assert parse_spec(text) == spec
    assert str(spec) == text
    assert format_spec(parse_spec(text)) == text


@given(st.lists(_SPECS, min_size=1, max_size=4))
def test_several_specs_survive_side_by_side(specs):
    assert split_specs(", ".join(map(str, specs))) == tuple(specs)


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("tidy", "tidy", {}),
        ("tidy{}", "tidy", {}),
        (" tidy { } ", "tidy", {}),
        ("p{index=mask,keep=2}", "p", {"index": "mask", "keep": "2"}),
        ("p{ index = mask , keep = 2 }", "p", {"index": "mask", "keep": "2"}),
        ("p{q-block-size=8}", "p", {"q_block_size": "8"}),
        ("p{sites=[0-3,sliding]}", "p", {"sites": ("0-3", "sliding")}),
        ("p{sites=[]}", "p", {"sites": ()}),
        ("p{assume='S=4096,P=0'}", "p", {"assume": "S=4096,P=0"}),
        ('p{assume="it\'s"}', "p", {"assume": "it's"}),
        (r"p{a='it\'s',b='\\'}", "p", {"a": "it's", "b": "\\"}),
        ("p{a=1.5,b=256MiB,c=-1}", "p", {"a": "1.5", "b": "256MiB", "c": "-1"}),
        ("mypackage.passes:Thing{a=b:c}", "mypackage.passes:Thing", {"a": "b:c"}),
    ],
)
def test_reading(text, name, options):
    spec = parse_spec(text)
    assert (spec.name, dict(spec.options)) == (name, options)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a pass name at the end"),
        ("   ", "expected a pass name at the end"),
        ("{a=1}", "expected a pass name at '{a=1}'"),
        ("8ball", "expected a pass name at '8ball'"),
        ("p{a=1", "expected ',' or '}' at the end"),
        ("p{", "expected an option name at the end"),
        ("p{a}", "expected '=' at '}'"),
        ("p{a=}", "expected a value at '}'"),
        ("p{a=1 b=2}", "expected ',' or '}' at 'b=2}'"),
        ("p{a=1,,b=2}", "expected an option name at ',b=2}'"),
        ("p{a=[1,2}", "expected ',' or ']' at '}'"),
        ("p{a=[1,]}", "expected a value at ']}'"),
        ("p{a='x}", "expected a closing ' at \"'x}\""),
        ("p{a=1}x", "expected ',' or the end at 'x'"),
        ("p x", "expected ',' or the end at 'x'"),
    ],
)
def test_what_cannot_be_read_is_pointed_at(text, problem):
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    assert str(caught.value) == (
        f"Cannot read pass spec {text!r}: {problem}; "
        "write name or name{option=value,...}, with quotes around values that hold commas."
    )


def test_an_option_is_given_once():
    with pytest.raises(
        UsageError, match=r"^Option 'q_size' is given twice in pass spec 'p\{q_size=1,q-size=2\}'; keep"
    ):
        parse_spec("p{q_size=1,q-size=2}")


def test_one_spec_is_one_spec():
    with pytest.raises(UsageError, match=r"^Expected one pass spec, got 2 in 'a,b'; give each its own -p\.$"):
        parse_spec("a,b")
    assert [spec.name for spec in split_specs("a{x=1},b")] == ["a", "b"]
