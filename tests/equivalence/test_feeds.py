from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto as T
from onnx import helper

from graphsurgery.equivalence.feeds import make_feeds
from graphsurgery.equivalence.given import given_feeds
from graphsurgery.equivalence.protos import read_proto
from graphsurgery.equivalence.roles import Role
from graphsurgery.equivalence.signature import read_signature
from graphsurgery.errors import UsageError
from tests.equivalence.builders import CASES, FIXTURES, Graph, case, cross_decoder, decoder


def feeds_of(model, **options) -> Any:
    return make_feeds(read_signature(model), 0, **options)[0]


def by_name(model, **options) -> Any:
    return {feed.name: feed.build() for feed in feeds_of(model, **options)}


def test_the_kinds_of_batch_that_matter_are_there():
    sizes = [feed.sizes for feed in feeds_of(decoder())]
    assert {each.padding for each in sizes} == {"none", "left", "right"}
    assert any(each.past == 0 for each in sizes)
    assert any(each.past > 0 and each.length > 1 and each.batch > 1 for each in sizes)
    assert any(each.length == 1 for each in sizes)
    assert any(each.length >= 200 for each in sizes)
    assert {each.batch for each in sizes} == {1, 2, 3}
    assert len({feed.name for feed in feeds_of(decoder())}) == 10


def test_a_seed_gives_the_same_arrays_and_another_seed_others():
    signature = read_signature(decoder())
    first, again = make_feeds(signature, 3)[0], make_feeds(signature, 3)[0]
    for a, b in zip(first, again, strict=True):
        for name, array in a.build().items():
            np.testing.assert_array_equal(array, b.build()[name])
    other = make_feeds(signature, 4)[0]
    assert (first[0].build()["input_ids"] != other[0].build()["input_ids"]).any()


def test_an_added_input_does_not_shift_the_others():
    signature = read_signature(decoder())
    spec = dataclasses.replace(signature.inputs[0], name="added")
    wider = dataclasses.replace(signature, inputs=(spec, *signature.inputs))
    for a, b in zip(make_feeds(signature, 0)[0], make_feeds(wider, 0)[0], strict=True):
        np.testing.assert_array_equal(a.build()["past.0.key"], b.build()["past.0.key"])


def test_padding_positions_and_shapes_go_together():
    arrays = by_name(decoder())
    left = arrays["b2-s5-p0-left"]
    assert left["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert left["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]
    right = arrays["b3-s5-p0-right"]
    assert right["attention_mask"].sum(axis=1).tolist() == [5, 3, 1]
    assert right["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]
    chunk = arrays["b2-s23-p9-right"]
    assert chunk["attention_mask"].shape == (2, 32)
    assert chunk["attention_mask"][:, :9].all()
    assert chunk["position_ids"][0].tolist() == list(range(9, 32))
    assert chunk["past.0.key"].shape == (2, 1, 9, 16)
    assert 0.8 < chunk["past.0.key"].std() < 1.2
    for feed in arrays.values():
        assert feed["input_ids"].min() >= 0
        assert feed["input_ids"].max() < 40


def test_right_padded_positions_can_be_marked():
    right = by_name(decoder(), pad_position=-1)["b3-s5-p0-right"]
    assert right["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, -1, -1], [0, -1, -1, -1, -1]]


def test_positions_stay_inside_their_table():
    longest = max(feed.sizes.length + feed.sizes.past for feed in feeds_of(read_proto(case("a03"))))
    assert longest == 64


def test_a_written_cache_gets_a_causal_mask_over_its_slots():
    arrays = by_name(read_proto(FIXTURES / "llama_static" / "model.onnx"))
    feed = arrays["b1-s3-p4"]
    mask = feed["attention_mask"]
    assert mask.dtype == np.bool_
    assert mask.shape == (1, 1, 3, 10)
    assert mask[0, 0].sum(axis=1).tolist() == [5, 6, 7]
    assert feed["input.cache.layers.0.cumulative_length"] == 4
    assert feed["input.cache.layers.0.keys"].shape[2] == 10


def test_slots_are_never_written_twice():
    for feed in feeds_of(read_proto(case("a08"))):
        positions = feed.build()["position_ids"]
        assert positions.max() < 16
        assert all(len(set(row)) == len(row) for row in positions.tolist())


def test_additive_masks_are_zero_or_low():
    g = Graph()
    g.input("input_ids", T.INT64, "b", "s")
    g.input("attention_mask", T.FLOAT, "b", 1, "s", "t")
    feed = {feed.name: feed.build() for feed in make_feeds(read_signature(g.model()), 0)[0]}["b1-s5-p0"]
    assert set(np.unique(feed["attention_mask"]).tolist()) == {0.0, float(np.finfo(np.float32).min)}


def test_static_graphs_get_exactly_their_sizes():
    g = Graph()
    g.input("input_ids", T.INT64, 2, 4)
    g.input("attention_mask", T.INT64, 2, 10)
    g.input("past", T.FLOAT, 2, 1, 6, 8)
    new = g.input("new", T.FLOAT, 2, 1, 4, 8)
    g.op("Concat", "past", new, axis=2, out="present")
    g.output("present", T.FLOAT, 2, 1, 10, 8)
    feeds = make_feeds(read_signature(g.model()), 0)[0]
    assert {(feed.sizes.batch, feed.sizes.length, feed.sizes.past) for feed in feeds} == {(2, 4, 6)}
    assert {feed.sizes.padding for feed in feeds} == {"none", "left", "right"}


def test_packed_streams_have_no_batch():
    g = Graph()
    g.input("input_ids", T.INT64, "tokens")
    g.input("position_ids", T.INT64, "tokens")
    feeds = make_feeds(read_signature(g.model()), 0)[0]
    assert {feed.sizes.batch for feed in feeds} == {1}
    assert feeds[0].build()["position_ids"].tolist() == [0, 1, 2, 3, 4]


def patches() -> onnx.ModelProto:
    """The inputs of a vision encoder on a stream of patches: windows, borders, and a width that a reader tells."""
    g = Graph()
    g.input("hidden_states", T.FLOAT, "s", "f")
    g.input("grid_thw", T.INT64, "images", "sizes")
    g.input("position_ids", T.INT64, "s2", "two")
    g.input("window_index", T.INT64, "w")
    g.input("cu_seqlens", T.INT32, "b1")
    g.op("Reshape", "hidden_states", g.ints("five", [-1, 3, 2, 4, 4]), out="pixels")
    g.op("Reshape", "pixels", g.ints("three", [-1, 4, 96]), out="quads")
    g.op("Gather", "quads", "window_index", axis=0, out="windows")
    g.output("windows", T.FLOAT, "w", 4, 96)
    model = g.model()
    model.graph.value_info.append(helper.make_tensor_value_info("quads", T.FLOAT, ["(s//4)", 4, 96]))
    return model


def test_patches_of_images_come_as_one_stream():
    arrays = by_name(patches())
    (long,) = [feed for feed in arrays.values() if len(feed["hidden_states"]) == 200]
    assert {name: array.shape for name, array in long.items()} == {
        "hidden_states": (200, 96),
        "grid_thw": (2, 3),
        "position_ids": (200, 2),
        "window_index": (50,),
        "cu_seqlens": (3,),
    }
    assert long["cu_seqlens"].tolist() == [0, 100, 200]
    assert sorted(long["window_index"]) == list(range(50))
    assert long["position_ids"][[0, 1, 15, 199]].tolist() == [[0, 0], [0, 1], [1, 0], [13, 4]]
    assert arrays["b1-s5-p0"]["cu_seqlens"].tolist() == [0, 5]


@pytest.mark.parametrize(("positions", "side"), [(9, 3), (10, 3), (5, 2), (7, 4), (None, 4)])
def test_images_are_as_large_as_their_positions_allow(positions, side):
    g = Graph()
    g.input("pixel_values", T.FLOAT, "n", 3, "h", "w")
    g.input("patch_attention_mask", T.BOOL, "n", "rows", "columns")
    g.op("Conv", "pixel_values", g.weight("kernel", 8, 3, 2, 2), strides=[2, 2], out="patches")
    g.op("Reshape", "patches", g.ints("rows", [0, 8, -1]), out="flat")
    g.op("Transpose", "flat", perm=[0, 2, 1], out="turned")
    if positions is not None:
        g.op("Add", "turned", g.weight("positions", 1, positions, 8), out="placed")
    g.output("placed" if positions else "turned", T.FLOAT, "n", "p", 8)
    arrays = by_name(g.model())["b1-s5-p0"]
    assert arrays["pixel_values"].shape == (1, 3, 2 * side, 2 * side)
    assert arrays["patch_attention_mask"].shape == (1, side, side)


@pytest.mark.parametrize("planes", [3, 4])
def test_positions_with_several_axes(planes):
    g = Graph()
    g.input("inputs_embeds", T.FLOAT, "b", "s", 8)
    g.input("position_ids", T.INT64, planes, "b", "s")
    feeds = make_feeds(read_signature(g.model()), 0)[0]
    assert all(feed.build()["position_ids"].shape[0] == planes for feed in feeds)
    long = feeds[1].build()["position_ids"]
    assert long.shape[1:] == (feeds[1].sizes.batch, feeds[1].sizes.length)
    assert any((p := feed.build()["position_ids"])[0].tolist() != p[-1].tolist() for feed in feeds)


def test_fused_attention_says_what_it_does_not_take():
    feeds, left_out = make_feeds(read_signature(read_proto(FIXTURES / "genai_llama" / "model.onnx")), 0)
    reasons = {each.feed: each.reason for each in left_out}
    assert "behind a past" in reasons["b2-s4-p6-left"]
    assert "right-padded" in reasons["b2-s5-p0-left"]
    assert all(feed.sizes.padding != "left" for feed in feeds)
    # Single tokens behind a past are fed to full rows instead.
    assert any((each.batch, each.length, each.past) == (2, 1, 6) for each in (feed.sizes for feed in feeds))


def test_what_an_encoder_has_read_has_a_length_of_its_own():
    feeds = make_feeds(read_signature(cross_decoder()), 0)[0]
    assert len(feeds) == 10
    seen = set()
    for feed in feeds:
        arrays, sizes = feed.build(), feed.sizes
        mask = arrays["encoder_attention_mask"]
        assert sizes.encoder not in (sizes.length, sizes.past + sizes.length)
        assert mask.shape == (sizes.batch, sizes.encoder) == arrays["encoder_hidden_states"].shape[:2]
        assert feed.name.endswith(f"-e{sizes.encoder}")
        # Padding comes last, and never is all.
        assert (np.diff(mask, axis=1) <= 0).all()
        assert mask[:, 0].all()
        seen |= {bool(row.all()) for row in mask}
    assert seen == {True, False}
    assert {feed.sizes.encoder < feed.sizes.length for feed in feeds} == {True, False}
    assert sum(feed.sizes.batch == 1 and not feed.build()["encoder_attention_mask"].all() for feed in feeds) >= 2


def test_a_fixed_encoder_keeps_its_length():
    feeds = make_feeds(read_signature(cross_decoder(encoder=12)), 0)[0]
    assert {feed.sizes.encoder for feed in feeds} == {12}
    assert {feed.build()["encoder_hidden_states"].shape[1] for feed in feeds} == {12}


def test_an_encoder_of_its_own_has_no_other_length():
    g = Graph()
    g.input("encoder_input_ids", T.INT64, "b", "s")
    g.input("encoder_attention_mask", T.INT64, "b", "s")
    signature = read_signature(g.model())
    assert [spec.role for spec in signature.inputs] == [Role.TOKENS, Role.MASK]


def test_runtime_rows_are_the_last_token_or_any_from_zero_on():
    signature = read_signature(decoder())
    spec = dataclasses.replace(signature.inputs[0], name="rows", dims=("batch", 1, 1), elem_type=T.INT32)
    spec = dataclasses.replace(spec, role=Role.ROW_INDEX, limit=None)
    signature = dataclasses.replace(signature, inputs=(*signature.inputs, spec))
    feeds = {feed.name: feed for feed in make_feeds(signature, 0)[0]}
    last = feeds["b2-s5-p0-left"].build()["rows"]
    assert last.dtype == np.int32
    assert last.reshape(-1).tolist() == [4, 4]
    others = [feeds[name].build()["rows"] for name in ("b3-s5-p0-right", "b1-s1-p0", "b2-s4-p6-left", "b1-s200-p0")]
    assert all(0 in rows for rows in others)
    assert all(feed.build()["rows"].min() >= 0 for feed in feeds.values())
    assert all(feed.build()["rows"].max() < feed.sizes.length for feed in feeds.values())


def test_given_feeds_from_a_file():
    signature = read_signature(read_proto(case("p08")))
    feeds = given_feeds(CASES / f"{case('p08').stem}.feeds.npz", signature, frozenset())
    assert [(feed.name, feed.sizes.batch, feed.sizes.length, feed.sizes.past) for feed in feeds] == [
        ("f0", 3, 5, 0),
        ("f1", 3, 1, 5),
    ]
    assert feeds[0].seed is None


def test_given_feeds_must_be_whole(tmp_path):
    signature = read_signature(read_proto(case("p06")))
    with pytest.raises(UsageError, match="f0 has no array for input input_ids"):
        given_feeds({"other": np.zeros(1)}, signature, frozenset())
    with pytest.raises(UsageError, match="gives input input_ids 1 axes: the model has 2"):
        given_feeds({"input_ids": np.zeros(1)}, signature, frozenset())
    with pytest.raises(UsageError, match="cannot be read"):
        given_feeds(tmp_path / "none.npz", signature, frozenset())
    with pytest.raises(UsageError, match="No feeds"):
        given_feeds({}, signature, frozenset())


NAMES = ["input_ids", "inputs_embeds", "attention_mask", "position_ids", "past.0.key", "beam_idx", "seqlens_k", "x"]
KINDS = [T.INT64, T.INT32, T.FLOAT, T.FLOAT16, T.BFLOAT16, T.BOOL, T.UINT8]


@settings(max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from([*NAMES, "logits_to_keep", "image_grid_thw", "cache_position", "total_sequence_length"]),
        st.tuples(
            st.sampled_from(KINDS),
            st.lists(st.sampled_from(["b", "s", "p", "p + s", "other", None, 1, 2, 5, 0]), max_size=4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_a_model_declares_it_is_fed_so(inputs):
    g = Graph()
    for name, (kind, dims) in inputs.items():
        g.input(name, kind, *dims)
    signature = read_signature(g.model())
    for feed in make_feeds(signature, 0)[0]:
        arrays = feed.build()
        assert list(arrays) == list(inputs)
        for name, (kind, dims) in inputs.items():
            assert arrays[name].dtype == helper.tensor_dtype_to_np_dtype(kind)
            assert arrays[name].ndim == len(dims)
            assert all(size == dim for size, dim in zip(arrays[name].shape, dims, strict=True) if isinstance(dim, int))
