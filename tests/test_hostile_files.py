"""Damaged and hostile files through load, inspect and apply: refused in one line, in time, nothing touched elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from onnx import TensorProto, helper

from graphsurgery.analysis._order import is_sorted
from graphsurgery.errors import GraphSurgeryError, InputRefusedError, SaveError
from graphsurgery.inspection import inspect_model
from graphsurgery.model_io import load
from graphsurgery.workflow import ApplyRequest, apply_passes
from tests.model_io_helpers import add_model
from tests.oracle import REFUSALS
from tests.strategies.hostile_files import CANARY, HOSTILE_LOCATIONS, damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CASES = Path(__file__).parent / "cases"
NAMES = (
    "f04_model_already_has_functions",
    "m03_topk_then_softmax_bias_interleaved",
    "p04_softcap_shared_const_stale_value_info",
    "p06_head_matmulnbits",
    "s01_everything_external_even_shapes",
    "s11_opset11_old_semantics",
)
SMALL = {name: (CASES / f"{name}.onnx").read_bytes() for name in NAMES}
ALL = {path.stem: path.read_bytes() for path in CASES.glob("*.onnx") if path.stat().st_size > 1000}
SECONDS = 60
"""Far more than anything takes, and far less than for ever."""


# ---- what is touched --------------------------------------------------------------------------------------------------------

_touched: list[tuple[str, str]] | None = None
_CHANGES = {
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
}


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    # Hooks stay for good: this one does nothing unless a test listens.
    if _touched is None:
        return
    if event == "open":
        path, mode, flags = arguments
        writes = (isinstance(mode, str) and any(letter in mode for letter in "wax+")) or (
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        )
        _touched.append(("write" if writes else "read", str(path)))
    elif event in _CHANGES:
        _touched.extend(("write", str(item)) for item in arguments if isinstance(item, str | os.PathLike))


sys.addaudithook(_watch)


@contextlib.contextmanager
def touched() -> Iterator[list[tuple[str, str]]]:
    """Paths that are opened, made, renamed or removed meanwhile."""
    global _touched
    _touched = []
    try:
        yield _touched
    finally:
        _touched = None


@contextlib.contextmanager
def in_time(seconds: int = SECONDS) -> Iterator[None]:
    """Fail where the block does not end."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


# ---- damaged files ------------------------------------------------------------------------------------------------------------


def survive(data: bytes) -> None:
    """All commands on a file with this content: done, or one sentence; nothing outside the output directory changes."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "in").mkdir()
        (root / "out").mkdir()
        (root / CANARY).write_bytes(bytes(4096))
        path = root / "in" / "model.onnx"
        path.write_bytes(data)
        (path.parent / "model.onnx.data").write_bytes(bytes(100_000))
        with in_time(), touched() as seen:
            refused = _error(lambda: load(path))
            assert refused is None or isinstance(refused, InputRefusedError)
            assert refused is None or str(path) in str(refused)
            for what in ("inspect", "prefill", "decode", "unified") if refused is None else ("prefill",):
                _run(what, path, root / "out" / "out.onnx")
        assert path.read_bytes() == data
        assert sorted(item.name for item in path.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
        written = {Path(name) for kind, name in seen if kind == "write"}
        outside = [item for item in written if scratch in str(item) and root / "out" not in (item, *item.parents)]
        assert not outside
        assert not [name for _, name in seen if CANARY in name or "passwd" in name]
        if refused is not None:
            assert not list((root / "out").iterdir())


def _run(what: str, path: Path, output: Path) -> None:
    request = ApplyRequest(input=path, output=output, recipe=what, force=True)
    error = _error(lambda: inspect_model(path) if what == "inspect" else apply_passes(request))
    # A graph that loads may hold what only writing it finds.
    assert error is None or isinstance(error, InputRefusedError | SaveError), error


def _error(call: Callable[[], object]) -> GraphSurgeryError | None:
    """What ``call`` raises on purpose, in one line; anything else is a fault."""
    try:
        call()
    except GraphSurgeryError as error:
        found = error
    else:
        return None
    assert "\n" not in str(found)
    return found


@settings(max_examples=20)
@given(damaged(SMALL))
def test_damaged_files(case: tuple[str, bytes]) -> None:
    survive(case[1])


@pytest.mark.full
@given(damaged(ALL))
def test_damaged_files_of_every_kind(case: tuple[str, bytes]) -> None:
    survive(case[1])


# ---- kinds of damage, one by one ------------------------------------------------------------------------------------------------


def _write(tmp_path: Path, proto: onnx.ModelProto) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def _tensor(**fields: Any) -> TensorProto:
    return TensorProto(**({"name": "w", "data_type": TensorProto.FLOAT, "dims": [4], "raw_data": bytes(16)} | fields))


def _refused(tmp_path: Path, proto: onnx.ModelProto) -> str:
    path = _write(tmp_path, proto)
    with pytest.raises(InputRefusedError) as caught, in_time():
        load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


@pytest.mark.parametrize("location", HOSTILE_LOCATIONS)
def test_hostile_locations_are_not_followed(tmp_path: Path, location: str) -> None:
    tensor = _tensor()
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (tmp_path / CANARY).write_bytes(bytes(99))
    (tmp_path / "in").mkdir()
    survive(add_model([tensor]).SerializeToString())


@pytest.mark.parametrize(
    "tensor",
    [
        _tensor(raw_data=bytes(15)),
        _tensor(raw_data=b""),
        _tensor(dims=[]),
        _tensor(dims=[2**62]),
        _tensor(dims=[5000], raw_data=bytes(4 * 4999)),
        _tensor(dims=[0], raw_data=bytes(100_000)),
        _tensor(raw_data=None, float_data=[1.0, 2.0]),
        _tensor(raw_data=None, data_type=TensorProto.INT64, int64_data=[1] * 5),
        _tensor(raw_data=None, data_type=TensorProto.STRING, string_data=[b"a"]),
        _tensor(raw_data=bytes(3), data_type=TensorProto.INT4),
    ],
)
def test_inline_tensors_that_are_not_whole(tmp_path: Path, tensor: TensorProto) -> None:
    message = _refused(tmp_path, add_model([tensor]))
    assert f"the bytes of tensor 'w' are not as many as its shape {list(tensor.dims)} asks for" in message


@pytest.mark.parametrize(
    "tensor",
    [
        _tensor(dims=[0], raw_data=None),
        _tensor(dims=[], raw_data=bytes(4)),
        _tensor(dims=[3], raw_data=None, data_type=TensorProto.INT4, int32_data=[1, 2]),
        _tensor(dims=[2], raw_data=None, data_type=TensorProto.COMPLEX64, float_data=[1, 2, 3, 4]),
        _tensor(dims=[2], raw_data=None, data_type=TensorProto.FLOAT16, int32_data=[1, 2]),
        _tensor(dims=[1], raw_data=None, data_type=TensorProto.STRING, string_data=[b"a"]),
        _tensor(dims=[5000], raw_data=bytes(20_000)),
    ],
)
def test_inline_tensors_that_are_whole(tmp_path: Path, tensor: TensorProto) -> None:
    assert load(_write(tmp_path, add_model([tensor]))).graph.initializers["w"].shape == list(tensor.dims)


def _identities(*pairs: tuple[str, str]) -> list[onnx.NodeProto]:
    return [helper.make_node("Identity", [a], [b], name=f"{a}-{b}") for a, b in pairs]


def test_cycles_are_refused(tmp_path: Path) -> None:
    proto = add_model([])
    proto.graph.node.extend(_identities(("c", "a"), ("a", "b"), ("b", "c")))
    assert "(Identity) depends on its own results" in _refused(tmp_path, proto)


def test_a_cycle_through_a_body_is_refused(tmp_path: Path) -> None:
    proto = add_model([])
    body = helper.make_graph(_identities(("late", "inner")), "b", [], [helper.make_empty_tensor_value_info("inner")])
    branch = helper.make_node("If", ["x"], ["early"], name="branch", then_branch=body, else_branch=body)
    proto.graph.node.extend([branch, *_identities(("early", "late"))])
    assert "depends on its own results" in _refused(tmp_path, proto)


def test_a_cycle_within_a_body_is_refused(tmp_path: Path) -> None:
    proto = add_model([])
    body = helper.make_graph(_identities(("b", "a"), ("a", "b")), "b", [], [helper.make_empty_tensor_value_info("a")])
    proto.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=body, else_branch=body))
    assert "depends on its own results" in _refused(tmp_path, proto)


def test_unsorted_graphs_are_no_cycles(tmp_path: Path) -> None:
    proto = add_model([])
    proto.graph.node.extend(_identities(("b", "c"), ("a", "b"), ("x", "a")))
    # Many ways to one node are no cycle either, and are walked once.
    values = [f"v{number}" for number in range(60)]
    nodes = [helper.make_node("Add", [a, a], [b]) for a, b in zip(["x", *values], values, strict=False)]
    proto.graph.node.extend(reversed(nodes))
    with in_time():
        model = load(_write(tmp_path, proto))
    assert not is_sorted(model.graph)


@pytest.mark.parametrize("names", [["f"], ["f", "g"], ["f", "g", "h"]])
def test_functions_that_call_themselves_are_refused(tmp_path: Path, names: list[str]) -> None:
    proto = add_model([])
    opset = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    for number, name in enumerate(names):
        call = helper.make_node(names[number - 1], ["a"], ["b"], domain="own")
        proto.functions.append(helper.make_function("own", name, ["a"], ["b"], [call], opset))
    proto.opset_import.append(helper.make_opsetid("own", 1))
    assert "calls itself" in _refused(tmp_path, proto)


@pytest.mark.parametrize("field", ["op_type", "domain", "name", "input", "output"])
def test_text_that_is_not_utf8_is_refused(tmp_path: Path, field: str) -> None:
    proto = add_model([])
    number = onnx.NodeProto.DESCRIPTOR.fields_by_name[field].number
    bad = onnx.NodeProto.FromString(bytes([number << 3 | 2, 2, 0xFF, 0xFE]))
    if field in ("name", "input", "output"):
        bad.op_type = "Identity"
    proto.graph.node.append(bad)
    path = _write(tmp_path, proto)
    with pytest.raises(InputRefusedError, match=r"^\S+model\.onnx"):
        load(path)


def test_bodies_within_bodies_are_walked_once_each(tmp_path: Path) -> None:
    """Two branches at each of 29 levels: walked per attribute, that would be half a billion."""
    body = helper.make_graph(_identities(("x", "d")), "b", [], [helper.make_empty_tensor_value_info("d")])
    for _ in range(29):
        node = helper.make_node("If", ["x"], ["d"], then_branch=body, else_branch=onnx.GraphProto(name="e"))
        body = helper.make_graph([node], "b", [], [helper.make_empty_tensor_value_info("d")])
    proto = add_model([])
    proto.graph.node.extend(body.node)
    with in_time():
        model = load(_write(tmp_path, proto))
        assert is_sorted(model.graph)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (helper.make_node("MatMul", ["x"], ["y"]), "node 'y' (MatMul) lacks input 1, which its operator requires"),
        (helper.make_node("MatMul", ["x", ""], ["y"]), "node 'y' (MatMul) lacks input 1, which its operator requires"),
        (helper.make_node("Relu", ["x", "x"], ["y"]), "node 'y' (Relu) has 2 inputs and 1 outputs, more than"),
        (helper.make_node("Relu", ["x"], ["y", "z"]), "node 'y' (Relu) has 1 inputs and 2 outputs, more than"),
        (
            helper.make_node("Cast", ["x"], ["y"], to=1.0),
            "node 'y' (Cast) has an attribute 'to' of type FLOAT and not INT",
        ),
        (helper.make_node("Cast", ["x"], ["y"]), "node 'y' (Cast) lacks attribute 'to', which its operator requires"),
        (
            helper.make_node("Transpose", ["x"], ["y"], perm=1.5),
            "node 'y' (Transpose) has an attribute 'perm' of type FLOAT and not INTS",
        ),
    ],
)
def test_nodes_without_what_their_operator_requires_are_refused(
    tmp_path: Path, node: onnx.NodeProto, message: str
) -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert message in _refused(tmp_path, model)
    with pytest.raises(REFUSALS):
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_inputs_that_may_be_left_out_are_no_damage(tmp_path: Path) -> None:
    nodes = [helper.make_node("Clip", ["x", "", "high"], ["y"]), helper.make_node("Clip", ["x"], ["z"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in ("x", "y", "z")]
    high = helper.make_tensor("high", TensorProto.FLOAT, [], [1.0])
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [high])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert len(load(_write(tmp_path, model)).graph) == 2
