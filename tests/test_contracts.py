"""What a pruned output promises, against a plain reading of the same words."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsurgery.contracts import (
    CONTRACTS_KEY,
    RowSelection,
    parse_contracts,
    read_contracts,
    write_contracts,
)
from graphsurgery.errors import InputRefusedError
from tests.small_models import CHAIN, parse


def _selection(index="last", keep=1, **changes) -> RowSelection:
    sources = {"last": None, "mask": "attention_mask", "position": "position_ids", "runtime": "rows"}
    fields = {"source": sources[index], "sequence": "input_ids", "sequence_axis": 1, "row_axis": 1, "batch_axis": 0}
    return RowSelection(output="logits", index=index, keep=keep, **(fields | changes))


def _last_attended(mask_row: list[int], length: int) -> int:
    window = mask_row[len(mask_row) - length :]
    attended = [column for column, bit in enumerate(window) if bit]
    return attended[-1] if attended else length - 1


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 4), st.integers(1, 7), st.data())
def test_rows_by_mask(batch, length, past, keep, data):
    bits = st.lists(st.integers(0, 1), min_size=past + length, max_size=past + length)
    mask = data.draw(st.lists(bits, min_size=batch, max_size=batch))
    feeds = {"input_ids": np.zeros((batch, length), np.int64), "attention_mask": np.array(mask)}
    expected = [[max(0, _last_attended(row, length) - back) for back in range(keep - 1, -1, -1)] for row in mask]
    assert _selection("mask", keep).rows(feeds).tolist() == expected
    logits = np.arange(batch * length * 2.0).reshape(batch, length, 2)
    applied = _selection("mask", keep).apply(logits, feeds)
    assert applied.tolist() == [[logits[b, row].tolist() for row in rows] for b, rows in enumerate(expected)]


@given(st.integers(1, 3), st.integers(1, 5), st.data())
def test_rows_by_position_take_the_last_among_equals(batch, length, data):
    row = st.lists(st.integers(-1, 6), min_size=length, max_size=length)
    positions = data.draw(st.lists(row, min_size=batch, max_size=batch))
    feeds = {"input_ids": np.zeros((batch, length), np.int64), "position_ids": np.array(positions)}
    expected = [[max(column for column, value in enumerate(row) if value == max(row))] for row in positions]
    assert _selection("position").rows(feeds).tolist() == expected
    # Planes: row 0 of four, the maximum over three.
    other = np.array(positions) * 0 - 1
    four = feeds | {"position_ids": np.stack([np.array(positions), other + 9, other + 8, other + 7])}
    assert _selection("position").rows(four).tolist() == expected
    three = feeds | {"position_ids": np.stack([other, np.array(positions), other])}
    assert _selection("position").rows(three).tolist() == expected


def test_the_last_row_and_what_is_fed():
    feeds: dict[str, np.ndarray] = {"input_ids": np.zeros((2, 4), np.int64), "rows": np.array([[[3]], [[1]]], np.int32)}
    assert _selection("last", 2).rows(feeds).tolist() == [[2, 3], [2, 3]]
    assert _selection("runtime", 3).rows(feeds).tolist() == [[1, 2, 3], [0, 0, 1]]
    assert _selection("runtime").rows(feeds | {"rows": np.array([0, 2])}).tolist() == [[0], [2]]


def test_flat_rows_lie_behind_one_another():
    feeds = {"input_ids": np.zeros((2, 3), np.int64), "rows": np.array([0, 2])}
    selection = _selection("runtime", row_axis=0, batch_axis=None, flat=True)
    assert selection.apply(np.arange(12.0).reshape(6, 2), feeds).tolist() == [[0, 1], [10, 11]]
    last = _selection("last", 2, row_axis=0, batch_axis=None, flat=True)
    assert last.apply(np.arange(6.0), feeds).tolist() == [1, 2, 4, 5]


def test_a_packed_stream_has_no_batch():
    feeds = {"input_ids": np.zeros((5,), np.int64)}
    selection = _selection("last", sequence_axis=0, row_axis=0, batch_axis=None)
    assert selection.apply(np.arange(10.0).reshape(5, 2), feeds).tolist() == [[8, 9]]


def test_batch_and_rows_lie_on_any_axes():
    feeds = {"input_ids": np.zeros((2, 3), np.int64), "rows": np.array([0, 2])}
    logits = np.arange(24.0).reshape(3, 4, 2)
    applied = _selection("runtime", row_axis=0, batch_axis=2).apply(logits, feeds)
    assert applied.shape == (1, 4, 2)
    assert applied[0, :, 0].tolist() == logits[0, :, 0].tolist()
    assert applied[0, :, 1].tolist() == logits[2, :, 1].tolist()


def test_a_model_carries_its_contracts():
    model = parse(CHAIN)
    assert read_contracts(model) == ()
    contracts = (_selection("mask"), _selection("last", 2, flat=True, batch_axis=None))
    write_contracts(model, contracts)
    again = ir.from_proto(ir.to_proto(model))
    assert read_contracts(again) == contracts
    write_contracts(model, [])
    assert CONTRACTS_KEY not in model.metadata_props


@pytest.mark.parametrize("text", ["garbage", "3", "[3]", '[{"output": "y"}]', '[{"colour": "red"}]', '{"a": 1}'])
def test_metadata_that_no_pass_wrote_is_refused(text):
    with pytest.raises(InputRefusedError) as caught:
        parse_contracts(text)
    assert str(caught.value) == (
        "The model's metadata 'graphsurgery.contracts' is not what graphsurgery writes: remove it."
    )


def test_no_text_is_no_contract():
    assert parse_contracts(None) == parse_contracts("") == parse_contracts("[]") == ()
