from __future__ import annotations

import builtins
import dataclasses
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto as T

from graphsurgery.equivalence.feeds import make_feeds
from graphsurgery.equivalence.protos import read_proto
from graphsurgery.equivalence.running import (
    LoadError,
    Model,
    RunError,
    Session,
    Settings,
    Store,
    available_memory,
    has_racing_scatter,
    require_runtime,
    run_all,
)
from graphsurgery.equivalence.signature import read_signature
from graphsurgery.errors import CannotCheckError
from tests.equivalence.builders import CASES, FIXTURES, case, decoder, mixture, save


def first_feed(model) -> Any:
    return make_feeds(read_signature(model), 0)[0][0]


def test_missing_runtime_says_what_to_type(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **kept):
        if name == "onnxruntime":
            raise ImportError(name)
        return real(name, *rest, **kept)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CannotCheckError, match=r'pip install "graphsurgery\[verify\]"'):
        require_runtime()


@pytest.mark.parametrize(("reduces", "expected"), [(True, True), (False, False)])
def test_racing_scatters_are_seen(reduces, expected):
    assert has_racing_scatter(mixture(scatter=reduces)) is expected


def test_racing_scatters_are_seen_in_exports():
    assert has_racing_scatter(read_proto(case("m01")))
    assert has_racing_scatter(read_proto(FIXTURES / "qwen3_moe_grouped" / "model.onnx"))
    assert not has_racing_scatter(read_proto(case("a08")))


def test_an_unknown_operator_is_named():
    with pytest.raises(LoadError, match=r"no operator vendor\.ops::Scale") as caught:
        Session(Model(case("s13")), Settings())
    assert caught.value.missing_op
    assert "\n" not in str(caught.value)


def test_a_broken_graph_is_no_unknown_operator(tmp_path):
    model = decoder()
    model.graph.node[3].input[0] = "nowhere"
    with pytest.raises(LoadError, match="cannot be loaded") as caught:
        Session(Model(save(model, tmp_path / "m.onnx")), Settings())
    assert not caught.value.missing_op


def test_a_refused_feed_gives_the_reason_in_one_line(tmp_path):
    path = save(decoder(), tmp_path / "m.onnx")
    arrays = first_feed(decoder()).build()
    arrays["input_ids"] = arrays["input_ids"] + 1000
    with Session(Model(path), Settings()) as session, pytest.raises(RunError, match="out of data bounds") as caught:
        session.run(arrays)
    assert "ONNXRuntimeError" not in str(caught.value)


def test_inputs_that_a_model_lacks_are_not_fed(tmp_path):
    path = save(decoder(), tmp_path / "m.onnx")
    arrays = first_feed(decoder()).build() | {"unknown": np.zeros(1)}
    with Session(Model(path), Settings()) as session:
        outputs = session.run(arrays)
    assert list(outputs) == ["logits", "present.0.key", "present.0.value"]


def test_further_outputs_come_with_the_same_values():
    path = CASES / "s01_everything_external_even_shapes.onnx"
    proto = read_proto(path)
    name = next(node.output[0] for node in proto.graph.node if node.op_type == "Softmax")
    arrays = first_feed(proto).build()
    with Session(Model(path), Settings()) as session:
        plain = session.run(arrays)
    with Session(Model(path).with_outputs(proto, [name, "logits"]), Settings()) as session:
        more = session.run(arrays)
    assert list(more) == [*plain, name]
    assert all(np.array_equal(plain[key], more[key]) for key in plain)
    assert name not in {value.name for value in proto.graph.output}


def test_further_outputs_of_a_model_that_is_a_link(tmp_path):
    store, view = tmp_path / "blobs", tmp_path / "view"
    store.mkdir()
    view.mkdir()
    save(decoder(), tmp_path / "m.onnx", external=True)
    (tmp_path / "m.onnx").rename(store / "aa")
    (tmp_path / "m.onnx.data").rename(store / "bb")
    (view / "m.onnx").symlink_to(store / "aa")
    (view / "m.onnx.data").symlink_to(store / "bb")
    proto = read_proto(view / "m.onnx")
    with Session(Model(view / "m.onnx").with_outputs(proto, ["hidden"]), Settings()) as session:
        assert "hidden" in session.run(first_feed(proto).build())


def test_outputs_beyond_the_limit_go_to_disk_and_come_back():
    outputs = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "b": np.zeros((0, 2), np.int64)}
    with Store(8) as store:
        store.put(0, outputs)
        assert store.names(0) == ("a", "b")
        assert store.names(1) == ()
        np.testing.assert_array_equal(store.value(0, "a"), outputs["a"])
        assert store.value(0, "b").shape == (0, 2)
        folder = store._folder
        assert folder is not None
    with Store(1000) as store:
        store.put(0, outputs)
        assert store._folder is None
        store.put(1, {"s": [outputs["a"]]})
        assert store.value(1, "s")[0] is outputs["a"]


def test_feeds_that_fail_are_told_apart(tmp_path):
    path = save(decoder(), tmp_path / "m.onnx")
    good = first_feed(decoder())
    bad = dataclasses.replace(good, name="bad", build=lambda: good.build() | {"input_ids": np.full((1, 5), 999)})
    seen: list[str] = []
    with Store(1 << 20) as store:
        settings = Settings(optimized=True, prepack=False)
        failures = run_all(Model(path), settings, [bad, good], store, seen.append, [4, 7])
        assert list(failures) == [4]
        assert "out of data bounds" in failures[4]
        assert seen == ["bad", "b1-s5-p0"]
        assert store.names(4) == ()
        assert store.value(7, "logits").shape == (1, 5, 40)


def test_memory_is_known_here():
    memory = available_memory()
    assert memory is not None
    assert memory > 1 << 20


def test_half_precision_outputs_are_arrays(tmp_path):
    path = save(decoder(T.FLOAT16), tmp_path / "m.onnx")
    with Session(Model(path), Settings(threads=1)) as session:
        assert session.run(first_feed(decoder(T.FLOAT16)).build())["logits"].dtype == np.float16
