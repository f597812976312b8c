"""The plan of what becomes constant: complete, and made without touching the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.analysis.folding import plan_folding
from graphsurgery.analysis.shapes import Shapes
from tests.passes.test_bind_dims import FLAT
from tests.passes.test_bind_dims_control import BRANCHES, FUNCTIONS, LOOP, OPEN_BRANCH
from tests.small_models import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from graphsurgery.analysis.folding import BodyPlan, Folding


def plan(text: str, **numbers: int) -> Folding:
    model = parse(text)
    before = ir.to_proto(model).SerializeToString()
    made = plan_folding(model, Shapes(model), numbers)
    assert ir.to_proto(model).SerializeToString() == before
    return made


def listed(constants: Mapping[ir.Value, np.ndarray]) -> dict[str | None, object]:
    return {value.name: array.tolist() for value, array in constants.items()}


def dead(body: BodyPlan) -> set[str]:
    return {node.op_type for node in body.dead}


def test_only_what_is_read_becomes_a_constant():
    main = plan(FLAT, B=2, S=3).main
    assert listed(main.constants) == {"shape": [2, 3, 4], "target": [2, -1], "sizes": [2, 3]}
    assert dead(main) == {"Shape", "Gather", "Unsqueeze", "Concat"}
    assert [node.op_type for node in main.certain] == ["Expand", "Reshape"]


def test_nothing_is_known_without_numbers():
    made = plan(FLAT)
    assert (made.main.constants, made.main.dead, made.numbers, made.reveals) == ({}, [], {}, False)


def test_branches():
    main = plan(BRANCHES, B=2, S=1).main
    assert {node.outputs[0].name: branch.name for node, branch in main.taken.items()} == {
        "y": "then_part",
        "q": "else_part2",
    }
    assert [node.op_type for node in main.certain] == ["Add", "Reshape", "Identity", "Neg"]


def test_nodes_of_open_branches_are_not_certain():
    main = plan(OPEN_BRANCH, B=2, S=3).main
    assert [node.op_type for node in main.certain] == ["If"]
    assert listed(main.constants) == {"u": [2, 3, 4], "wanted": [2, -1], "v": [-2, -3, -4]}


def test_loops_that_never_run():
    made = plan(LOOP, B=2, S=3, P=0)
    assert {old.name: new.name for old, new in made.main.bypassed.items()} == {"longer": "x"}
    assert made.reveals
    assert not plan(LOOP, B=2, S=3, P=1).reveals


def test_variants_of_functions():
    made = plan(FUNCTIONS, B=2, S=3, P=5)
    constants = {
        key[1]: [listed(variant.plan.constants) for variant in variants if variant.plan is not None]
        for key, variants in made.functions.items()
    }
    assert constants == {
        "rows": [{"target": [2, 12]}, {"target": [2, 20]}],
        "flat": [{"one": [40]}],
    }
    same = plan(FUNCTIONS, B=2, S=5, P=5)
    assert {key[1]: len(variants) for key, variants in same.functions.items()} == {"rows": 1, "flat": 1}


def test_float_detours():
    text = """
    <ir_version: 9, opset_import: ["" : 18]>
    g (int64[B,S] input_ids, float[B,S,4] x) => (float[N,M] y)
    <int64[1] four = {4}, float[1] block = {64.0}>
    {
        s = Shape<start = 1, end = 2>(input_ids)
        f = Cast<to = 1>(s)
        d = Div(f, block)
        c = Ceil(d)
        n = Cast<to = 7>(c)
        target = Concat<axis = 0>(n, four)
        y = ConstantOfShape(target)
        whole = Shape(y)
        z = Expand(y, whole)
    }
    """
    made = plan(text, B=2, S=100)
    assert listed(made.main.constants) == {"target": [2, 4]}
    assert str(made.view.shape(made.main.certain[0].outputs[0])) == "(2, 4)"
