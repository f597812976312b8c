"""Running a model in ONNX Runtime on the CPU, one model at a time, and keeping what it returned.

Alphabet: B batch, S query length.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import onnx

from graphsurgery.equivalence.blaming import failing_node, maker_of
from graphsurgery.equivalence.protos import all_nodes, all_tensors, external_location, foreign_ops
from graphsurgery.errors import CannotCheckError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType, TracebackType

    from graphsurgery.equivalence.feeds import Array, Feed

__all__ = [
    "LoadError",
    "Model",
    "Outputs",
    "RunError",
    "Session",
    "Settings",
    "Store",
    "available_memory",
    "declares_wrong_dims",
    "has_racing_scatter",
    "one_line",
    "require_runtime",
    "run_all",
]

# What one output is: a tensor, a sequence of tensors, or nothing.
Value = Any
Outputs = dict[str, Value]


class LoadError(CannotCheckError):
    """ONNX Runtime does not load a model. ``missing_op`` tells that only an operator is unknown to it."""

    def __init__(self, message: str, *, missing_op: bool = False) -> None:
        super().__init__(message)
        self.missing_op = missing_op


class RunError(CannotCheckError):
    """ONNX Runtime cannot run a model on one feed."""


def require_runtime() -> ModuleType:
    """Import onnxruntime.

    Raises:
        CannotCheckError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise CannotCheckError(
            'Verifying needs ONNX Runtime, which is not installed: pip install "graphsurgery[verify]".'
        ) from error
    module: ModuleType = onnxruntime
    return module


def has_racing_scatter(proto: onnx.ModelProto) -> bool:
    """Whether a scatter reduces: ONNX Runtime's CPU kernel loses additions there with more than one thread."""
    for node in all_nodes(proto):
        if node.op_type in {"ScatterND", "ScatterElements"} and any(
            attribute.name == "reduction" and attribute.s not in (b"", b"none") for attribute in node.attribute
        ):
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a session is opened.

    Attributes:
        optimized: at ONNX Runtime's default optimisation level instead of none.
        threads: intra-op threads.
        prepack: let kernels keep a second, re-ordered copy of constant weights.
        reuse: let values share memory by the dims that the file declares for them.
    """

    optimized: bool = False
    threads: int = 2
    prepack: bool = True
    reuse: bool = True


@dataclasses.dataclass(frozen=True)
class Model:
    """A model file as ONNX Runtime gets it.

    Attributes:
        path: the file.
        proto: a changed copy of its content, to be run in its place; None to run the file itself.
        folder: where the external data of ``proto`` lies, if not beside the file.
    """

    path: Path
    proto: onnx.ModelProto | None = None
    folder: Path | None = None

    def content(self) -> onnx.ModelProto:
        """What is run, without external data."""
        return self.proto if self.proto is not None else onnx.ModelProto.FromString(self.path.read_bytes())

    def with_outputs(self, proto: onnx.ModelProto, names: Iterable[str]) -> Model:
        """A copy that returns the values ``names`` too; ``proto`` is the content of the file."""
        present = {value.name for value in proto.graph.output}
        extra = [name for name in dict.fromkeys(names) if name not in present]
        if not extra:
            return self
        changed = onnx.ModelProto()
        changed.CopyFrom(proto)
        # Without a type: ONNX Runtime infers it.
        changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in extra)
        return Model(self.path, changed, self.folder)


class Session:
    """An open ONNX Runtime session; use it in a ``with`` statement, its memory goes when that ends."""

    def __init__(self, model: Model, settings: Settings) -> None:
        """Open the session.

        Raises:
            LoadError: ONNX Runtime does not take the model.
        """
        runtime = require_runtime()
        options = runtime.SessionOptions()
        level = runtime.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if settings.optimized else level.ORT_DISABLE_ALL
        options.intra_op_num_threads = settings.threads
        options.inter_op_num_threads = 1
        options.enable_mem_reuse = settings.reuse
        # Errors come as exceptions; its warnings about fusions are no business of the user.
        options.log_severity_level = 4
        if not settings.prepack:
            options.add_session_config_entry("session.disable_prepacking", "1")
        self._model = model
        source: str | bytes = str(model.path)
        try:
            if model.proto is not None:
                content, folder = _located(model.proto, model.folder or model.path.parent)
                options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
                source = content.SerializeToString()
            self._session = runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the binding raises bare RuntimeError subclasses and ValueError (over 2 GiB)
            raise _load_error(model, error) from error
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._inputs |= {value.name for value in self._session.get_overridable_initializers()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Nothing else refers to it, and it refers to nothing that leads back: its memory goes at once.
        del self._session

    def run(self, arrays: Mapping[str, Array]) -> Outputs:
        """Outputs by name; inputs that the model does not have are not fed.

        Raises:
            RunError: ONNX Runtime refuses the inputs, or a kernel fails.
        """
        fed = {name: array for name, array in arrays.items() if name in self._inputs}
        try:
            values = self._session.run(None, fed)
        except Exception as error:  # the binding raises bare RuntimeError subclasses
            where = failing_node(str(error))
            told = f"{one_line(error)}, {where}" if where else one_line(error)
            raise RunError(told + _blame(self._model, error)) from error
        return dict(zip(self._outputs, values, strict=True))


def declares_wrong_dims(failure: str) -> bool:
    """Whether a model failed on a feed only because values that it declares to be of one size are not."""
    return "attempting to re-use buffer" in failure


def _located(proto: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, Path]:
    """The model with data files named by their real place, and the folder that holds them.

    Model hubs keep both files as links into a common store; from bytes ONNX Runtime follows no link out of the folder.
    """
    files = {place.file for tensor in all_tensors(proto) if (place := external_location(tensor)) is not None}
    real = {file: Path(os.path.realpath(folder / file)) for file in files}
    if all(path == Path(os.path.realpath(folder)) / file for file, path in real.items()):
        return proto, folder
    common = Path(os.path.commonpath([path.parent for path in real.values()]))
    moved = onnx.ModelProto()
    moved.CopyFrom(proto)
    for tensor in all_tensors(moved):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = str(real[entry.value].relative_to(common))
    return moved, common


def one_line(error: BaseException) -> str:
    """The reason in an exception of ONNX Runtime, without its code and source positions."""
    text = " ".join(str(error).split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    for mark in ("Status Message: ", "failed:"):
        if mark in text:
            text = text.split(mark, 1)[1]
    return text[:400].rstrip(".")


def _load_error(model: Model, error: BaseException) -> LoadError:
    text = one_line(error)
    if "not a registered function/op" in text:
        names = foreign_ops(model.content())
        if names:
            return LoadError(
                f"{model.path} cannot run: ONNX Runtime has no operator {', '.join(names)}.", missing_op=True
            )
    return LoadError(f"{model.path} cannot be loaded by ONNX Runtime: {text}{_blame(model, error)}.")


def _blame(model: Model, error: BaseException) -> str:
    """The pass that made the node that an exception names, in brackets."""
    made = maker_of(str(error), model.content)
    return f" (made by {made})" if made else ""


class Store:
    """Outputs of many feeds: in memory up to a limit, the rest in a temporary directory.

    Args:
        limit: bytes kept in memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._kept: dict[int, Outputs] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def put(self, number: int, outputs: Outputs) -> None:
        """Keep the outputs of feed ``number``."""
        self._names[number] = tuple(outputs)
        arrays = [value for value in outputs.values() if isinstance(value, np.ndarray)]
        size = sum(array.nbytes for array in arrays)
        plain = len(arrays) == len(outputs) and all(array.dtype != np.object_ for array in arrays)
        if self._used + size <= self._limit or not plain:
            self._used += size
            self._kept[number] = outputs
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="graphsurgery-verify-")
        for position, array in enumerate(arrays):
            np.save(Path(self._folder.name) / f"{number}.{position}.npy", array)

    def names(self, number: int) -> tuple[str, ...]:
        """Names of the outputs of feed ``number``; none where it did not run."""
        return self._names.get(number, ())

    def value(self, number: int, name: str) -> Value:
        """One output of feed ``number``."""
        if number in self._kept:
            return self._kept[number][name]
        assert self._folder is not None
        return np.load(Path(self._folder.name) / f"{number}.{self._names[number].index(name)}.npy")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        if self._folder is not None:
            self._folder.cleanup()


def run_all(
    model: Model,
    settings: Settings,
    feeds: Sequence[Feed],
    store: Store,
    step: Callable[[str], None],
    numbers: Sequence[int] | None = None,
) -> dict[int, str]:
    """Run a model on every feed and keep the outputs in ``store``.

    Args:
        model: what to run.
        settings: how.
        feeds: on what.
        store: where outputs go.
        step: told the name of each feed that is done.
        numbers: the number under which each feed's outputs are stored; their positions if None.

    Returns:
        The number of each feed that could not be run, and ONNX Runtime's reason.

    Raises:
        LoadError: the model cannot be loaded at all.
    """
    failures: dict[int, str] = {}
    with Session(model, settings) as session:
        for number, feed in zip(range(len(feeds)) if numbers is None else numbers, feeds, strict=True):
            try:
                store.put(number, session.run(feed.build()))
            except RunError as error:
                failures[number] = str(error)
            step(feed.name)
    return failures


def available_memory() -> int | None:
    """Bytes of memory that can be had without swapping; None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
