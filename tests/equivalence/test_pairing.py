from __future__ import annotations

import numpy as np
import pytest

from graphsurgery.contracts import RowSelection
from graphsurgery.equivalence.pairing import (
    Pair,
    apply_contracts,
    candidates,
    excluded_elements,
    pair_outputs,
    row_axes,
    with_row_inputs,
)
from graphsurgery.equivalence.roles import Role
from graphsurgery.equivalence.signature import merge, read_signature
from tests.equivalence.builders import copy, decoder, prune, set_metadata


def test_outputs_pair_by_name_in_any_order():
    turned = copy(decoder())
    outputs = list(turned.graph.output)
    del turned.graph.output[:]
    turned.graph.output.extend(reversed(outputs))
    pairing = pair_outputs(decoder(), turned)
    assert [(pair.reference, pair.rewritten) for pair in pairing.pairs] == [
        (name, name) for name in ("logits", "present.0.key", "present.0.value")
    ]
    assert pairing.differences == ()
    assert pairing.notes == ()


def test_renamed_outputs_pair_by_order_with_a_note():
    renamed = copy(decoder())
    renamed.graph.output[1].name = "renamed"
    pairing = pair_outputs(decoder(), renamed)
    assert pairing.pairs[1] == Pair("present.0.key", "renamed")
    assert pairing.notes == ("output present.0.key of the reference has no namesake: compared with renamed, by order",)


def test_missing_and_extra_outputs_are_differences():
    fewer = copy(decoder())
    del fewer.graph.output[2]
    assert pair_outputs(decoder(), fewer).differences == ("output present.0.value is missing in the rewritten model",)
    assert pair_outputs(fewer, decoder()).differences == ("output present.0.value is not in the reference",)


def test_contracts_and_exact_outputs_come_from_the_metadata():
    pruned = prune(decoder(), "mask", source="attention_mask")
    set_metadata(pruned, "graphsurgery.exact_outputs", ["present.0.key"])
    pairs = {pair.reference: pair for pair in pair_outputs(decoder(), pruned).pairs}
    assert [contract.index for contract in pairs["logits"].contracts] == ["mask"]
    assert [name for name, pair in pairs.items() if pair.exact] == ["present.0.key"]
    # A reference that is already pruned computes what its own contract says.
    assert pair_outputs(pruned, copy(pruned)).pairs[0].contracts == ()


SHAPES = [((2, 5, 40), (2, 1, 40), {"B": 2, "S": 5}), ((1, 1, 40), (1, 1, 40), {"B": 1, "S": 1})]


def test_fewer_rows_without_a_contract_give_candidates():
    signature = read_signature(decoder())
    found = candidates(Pair("logits", "logits"), signature, SHAPES)
    assert [(row.index, row.source) for row in found] == [
        ("last", None),
        ("mask", "attention_mask"),
        ("position", "position_ids"),
    ]
    assert {(row.keep, row.row_axis, row.batch_axis, row.sequence) for row in found} == {(1, 1, 0, "input_ids")}


@pytest.mark.parametrize(
    "shapes",
    [
        [((2, 5, 40), (2, 5, 40), {"B": 2, "S": 5})],
        [((2, 5, 40), (2, 1, 30), {"B": 2, "S": 5})],
        [((2, 5, 40), (2, 40), {"B": 2, "S": 5})],
        [((2, 9, 40), (2, 1, 40), {"B": 2, "S": 5})],
        [((2, 5, 40), (2, 1, 40), {"B": 2, "S": 5}), ((2, 7, 40), (2, 3, 40), {"B": 2, "S": 7})],
    ],
)
def test_other_shapes_give_none(shapes):
    assert candidates(Pair("logits", "logits"), read_signature(decoder()), shapes) == []


def test_an_added_row_index_is_seen_and_an_old_one_is_not():
    reference, rewritten = read_signature(decoder()), read_signature(prune(decoder(), "runtime"))
    merged = with_row_inputs(merge(reference, rewritten), reference, ())
    assert [spec.name for spec in merged.having(Role.ROW_INDEX)] == ["last_token_indices"]
    known = with_row_inputs(merge(rewritten, rewritten), rewritten, ())
    assert known.having(Role.ROW_INDEX) == ()


def test_contracts_apply_in_order():
    contract = RowSelection("logits", "last", 2, None, "input_ids", 1, 1, 0)
    value = np.arange(12).reshape(2, 3, 2)
    feeds = {"input_ids": np.zeros((2, 3), np.int64)}
    assert apply_contracts((), value, feeds) is value
    assert apply_contracts((contract,), value, feeds)[:, :, 0].tolist() == [[2, 4], [8, 10]]


def test_rows_of_outputs_by_symbol_and_by_size():
    signature = read_signature(decoder())
    sizes = {"B": 2, "S": 3, "P": 4, "T": 7}
    assert row_axes(("batch", "seq", 40), (2, 3, 40), signature, sizes) == (0, 1, "S")
    assert row_axes(("batch", 1, "past + seq", 16), (2, 1, 7, 16), signature, sizes) == (0, 2, "T")
    assert row_axes(("batch*seq", 40), (6, 40), signature, sizes) == (None, 0, "BS")
    assert row_axes(None, (2, 1, 7, 16), signature, sizes) == (0, 2, "T")
    assert row_axes(("what", "ever"), (2, 9), signature, sizes) == (0, None, None)


def test_what_depends_on_a_flip():
    sizes = {"B": 2, "S": 3, "P": 4, "T": 7}
    logits = excluded_elements((2, 3, 1), (0, 1, "S"), {1: 1}, sizes)
    assert logits[..., 0].tolist() == [[False] * 3, [False, True, True]]
    cache = excluded_elements((2, 1, 7, 1), (0, 2, "T"), {0: 2}, sizes)
    assert cache[0, 0, :, 0].tolist() == [False] * 6 + [True]
    assert not cache[1].any()
    flat = excluded_elements((6, 1), (None, 0, "BS"), {1: 2}, sizes)
    assert flat[:, 0].tolist() == [False] * 5 + [True]
    unknown = excluded_elements((2, 9), (0, None, None), {1: 0}, sizes)
    assert unknown.all(axis=1).tolist() == [False, True]
