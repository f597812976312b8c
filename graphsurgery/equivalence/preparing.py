"""Both models before anything runs: read, checked for data, turned into twins, their routers found.

What stands in the way of a check is a :class:`CannotCheckError` here, told before ONNX Runtime is asked.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from graphsurgery.equivalence.protos import missing_data, model_bytes, read_proto
from graphsurgery.equivalence.routers import find_routers, match_routers, with_bodies_inlined
from graphsurgery.equivalence.running import (
    LoadError,
    Model,
    Session,
    Settings,
    available_memory,
    has_racing_scatter,
)
from graphsurgery.equivalence.twins import float32_twin, holds_bfloat16
from graphsurgery.errors import CannotCheckError
from graphsurgery.weight_spec import restored_proto

if TYPE_CHECKING:
    from contextlib import ExitStack

    from graphsurgery.equivalence.routers import Router

__all__ = ["Prepared", "cannot_run_whole", "prepare"]

# Where the system does not tell how much memory there is.
_ASSUMED_MEMORY = 4 << 30


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Two models that are ready to run.

    Attributes:
        protos: content of the reference and of the rewritten model, float32 twins of bfloat16 models.
        models: both as they run.
        traced: both with the scores and choices of their routers as further outputs.
        routers: matched routers.
        settings: how they run with graph optimisations disabled.
        kept_bytes: bytes of outputs to keep in memory for each run.
        notes: what was assumed.
        warnings: what deserves a look.
    """

    protos: tuple[onnx.ModelProto, onnx.ModelProto]
    models: tuple[Model, Model]
    traced: tuple[Model, Model]
    routers: tuple[tuple[Router, Router], ...]
    settings: Settings
    kept_bytes: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def prepare(reference: Path, rewritten: Path, memory: int | None, stack: ExitStack) -> Prepared:
    """Read both models and decide how they run.

    Args:
        reference: the model as exported.
        rewritten: the model held against it.
        memory: bytes that may be used; None for what is available.
        stack: keeps temporary files for as long as the models run.

    Raises:
        InputRefusedError: a file is no model.
        CannotCheckError: data is missing or short, or memory does not suffice.
    """
    notes: list[str] = []
    warnings: list[str] = []
    first, second = (_read(path, other, notes) for path, other in ((reference, rewritten), (rewritten, reference)))
    protos = (first[0], second[0])
    budget = memory if memory is not None else available_memory() or _ASSUMED_MEMORY
    problem = _cannot_run((first, second), budget)
    if problem is not None:
        raise CannotCheckError(problem)
    need = _need((first, second))
    racing = has_racing_scatter(protos[0]) or has_racing_scatter(protos[1])
    if racing:
        notes.append("one thread: a scatter that reduces races in ONNX Runtime with more")
    # Kernels re-order constant weights into a copy of their own.
    settings = Settings(threads=1 if racing else 2, prepack=2 * need <= budget)
    models = (first[1], second[1])
    if any(holds_bfloat16(proto) for proto in protos) and not _runs_as_is(models, protos, settings):
        notes.append("bfloat16 models are verified as float32 twins: ONNX Runtime's CPU provider lacks the kernels")
        protos, models = _twins(protos, models, stack)
    traced, routers, more = _trace(protos, models)
    warnings += more
    return Prepared(protos, models, traced, routers, settings, budget // 4, tuple(notes), tuple(warnings))


def cannot_run_whole(reference: Path, rewritten: Path, memory: int | None) -> str | None:
    """Why two models cannot be run as a whole, in one clause; None where they can.

    Raises:
        InputRefusedError: a file is no model.
    """
    both = tuple(_read(path, other, []) for path, other in ((reference, rewritten), (rewritten, reference)))
    budget = memory if memory is not None else available_memory() or _ASSUMED_MEMORY
    problem = _cannot_run((both[0], both[1]), budget)
    return None if problem is None else problem.removesuffix(".")


def _cannot_run(both: tuple[tuple[onnx.ModelProto, Model], tuple[onnx.ModelProto, Model]], budget: int) -> str | None:
    for proto, model in both:
        problem = missing_data(proto, model.folder or model.path.parent)
        if problem:
            return f"{model.path} cannot run: {problem}."
    need = _need(both)
    if need > budget:
        return f"Running these models needs about {need / 1e9:.1f} GB of memory and {budget / 1e9:.1f} GB may be used."
    return None


def _need(both: tuple[tuple[onnx.ModelProto, Model], tuple[onnx.ModelProto, Model]]) -> int:
    return max(model_bytes(proto, model.path, model.folder) for proto, model in both)


def _read(path: Path, other: Path, notes: list[str]) -> tuple[onnx.ModelProto, Model]:
    """The content of a model and how it runs: a skeleton with the weights that its inputs stand for."""
    proto = read_proto(path)
    whole = restored_proto(proto)
    if whole is None:
        return proto, Model(path)
    fed = len(whole.graph.initializer) - len(proto.graph.initializer)
    notes.append(f"{path}: {fed} inputs are weights, which are taken from the files that its metadata names")
    # A skeleton need not have its data beside it; the other model, of which it was made, has.
    folder = path.parent if missing_data(whole, path.parent) is None else other.parent
    return whole, Model(path, whole, folder)


def _runs_as_is(
    models: tuple[Model, Model], protos: tuple[onnx.ModelProto, onnx.ModelProto], settings: Settings
) -> bool:
    """Whether both load and take and return no bfloat16; models may store weights so and cast them."""
    kinds = {
        value.type.tensor_type.elem_type for proto in protos for value in (*proto.graph.input, *proto.graph.output)
    }
    if onnx.TensorProto.BFLOAT16 in kinds:
        return False
    for model in models:
        try:
            with Session(model, settings):
                pass
        except LoadError as error:
            if not error.missing_op:
                return False
    return True


def _twins(
    protos: tuple[onnx.ModelProto, onnx.ModelProto], models: tuple[Model, Model], stack: ExitStack
) -> tuple[tuple[onnx.ModelProto, onnx.ModelProto], tuple[Model, Model]]:
    twins: list[tuple[onnx.ModelProto, Model]] = []
    for proto, model in zip(protos, models, strict=True):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphsurgery-twin-")))
        twin = float32_twin(proto, model.folder or model.path.parent, folder)
        external = any(folder.iterdir())
        twins.append((twin, Model(model.path, twin, folder if external else None)))
    return (twins[0][0], twins[1][0]), (twins[0][1], twins[1][1])


def _trace(
    protos: tuple[onnx.ModelProto, onnx.ModelProto], models: tuple[Model, Model]
) -> tuple[tuple[Model, Model], tuple[tuple[Router, Router], ...], list[str]]:
    """Add the routers' scores and choices to the outputs; matched routers and warnings."""
    flat = (with_bodies_inlined(protos[0]), with_bodies_inlined(protos[1]))
    (ours, hidden), (theirs, _) = find_routers(flat[0]), find_routers(flat[1])
    warnings = [f"{hidden} TopK nodes lie in subgraphs: their choices are not compared"] if hidden else []
    if not ours:
        return models, (), warnings
    pairs = match_routers(ours, theirs)
    if pairs is None:
        warnings.append(
            f"routers are not compared: the reference has {len(ours)}, the rewritten model {len(theirs)},"
            " and their names differ"
        )
        return models, (), warnings
    traced = (
        models[0].with_outputs(flat[0], [name for a, _ in pairs for name in (a.scores, a.indices)]),
        models[1].with_outputs(flat[1], [b.indices for _, b in pairs]),
    )
    return traced, tuple(pairs), warnings
