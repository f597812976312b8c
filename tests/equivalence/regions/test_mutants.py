"""Every node that a pass inserted, changed: found at depth regions where the whole model shows it, and nowhere else."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import pytest

from graphsurgery.equivalence.verify import verify_models
from graphsurgery.model_io import load
from graphsurgery.pipeline import Pipeline
from graphsurgery.rewrite import PASS_KEY
from tests.equivalence.regions.planted import copied, verified

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir


_OTHER = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Add",
    "Div": "Mul",
    "Min": "Max",
    "Less": "Greater",
    "LessOrEqual": "Less",
    "ArgMax": "ArgMin",
    "ReduceMax": "ReduceMin",
    "ReduceSum": "ReduceMax",
    "Not": "Identity",
    "Exp": "Neg",
    "Max": "Min",
}


def _mutants(model: ir.Model) -> list[int]:
    """Positions of nodes that a pass inserted and for which there is an operator with the same inputs."""
    return [
        position
        for position, node in enumerate(model.graph)
        if PASS_KEY in node.metadata_props and (node.op_type in _OTHER or node.op_type in ("Where", "Concat"))
    ]


def _mutate(model: ir.Model, position: int) -> None:
    node = model.graph[position]
    if node.op_type in ("Where", "Concat"):
        slots = (1, 2) if node.op_type == "Where" else (0, 1)
        one, other = (node.inputs[slot] for slot in slots)
        node.replace_input_with(slots[0], other)
        node.replace_input_with(slots[1], one)
        return
    node.op_type = _OTHER[node.op_type]


def _disagreements(fixture: Path, folder: Path, specs: list[str], chosen: Any) -> list[str]:
    """Mutants of which one depth says that they are different and the other does not."""
    source = copied(fixture, folder, data=True)
    model = load(source)
    Pipeline(specs)(model)
    positions = _mutants(model)
    assert positions
    wrong = []
    caught = 0
    for position in chosen(model, positions):

        def mutation(model: ir.Model, position: int = position) -> None:
            _mutate(model, position)

        deep = verified(source, specs, mutation)
        whole = verify_models(source, source.with_name("result.onnx"), depth="outputs", opt_level_check=False)
        caught += whole.status != "equal"
        if (deep.status == "equal") != (whole.status == "equal"):
            node = model.graph[position]
            wrong.append(
                f"{node.op_type} {node.name}: regions {deep.status}, outputs {whole.status}: {deep.reasons} {whole.reasons}"
            )
    assert caught
    return wrong


@pytest.mark.parametrize(
    ("fixture", "specs"),
    [
        ("llama", ["prune-last-token{depth=layer}", "block-attention{q_blocks=2,kv_blocks=2}"]),
        ("gpt_oss_batched", ["block-attention{q_blocks=2,kv_blocks=2,headpar_split=2}"]),
    ],
)
def test_mutants_are_found_at_both_depths_or_at_none(fixtures_dir, tmp_path, sample_random, fixture, specs):
    assert _disagreements(fixtures_dir / fixture, tmp_path, specs, lambda _, all_: sample_random.sample(all_, 3)) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("fixture", "specs"),
    list(
        itertools.product(
            ("llama", "gemma2", "gpt_oss_batched", "optimum_qwen3_moe"),
            (
                ["prune-last-token{depth=layer}", "block-attention{q_blocks=2,kv_blocks=2}"],
                ["block-attention{q_blocks=2,head_blocks=2,headpar_split=2}"],
                ["prune-last-token{depth=norm,keep=2}"],
            ),
        )
    ),
)
def test_mutants_of_every_kind_are_found_at_both_depths_or_at_none(
    fixtures_dir, tmp_path, sample_random, fixture, specs
):
    def chosen(model: ir.Model, positions: list[int]) -> list[int]:
        """One of the nodes that have an operator and a name but for numbers, of layers and blocks, in common."""
        kinds: dict[tuple[str, str], list[int]] = {}
        for position in positions:
            node = model.graph[position]
            kinds.setdefault((node.op_type, re.sub(r"\d+", "", node.name or "")), []).append(position)
        return [sample_random.choice(alike) for alike in kinds.values()]

    assert _disagreements(fixtures_dir / fixture, tmp_path, specs, chosen) == []
