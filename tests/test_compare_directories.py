"""Diff of two directories, and the report as Markdown and as a table."""

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING

import onnx
import pytest
from rich.console import Console

from graphsurgery.compare import diff_models
from graphsurgery.errors import InputRefusedError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from graphsurgery.compare import DiffReport

VISION = '<ir_version: 9, opset_import: ["" : 18]> v (float[N,4] pixels) => (float[N,4] features) { %s }'
DECODER = """
<ir_version: 9, opset_import: ["" : 18]>
d (float[B,4] embeds) => (float[B,4] logits) <float[4] w = {1.0, 2.0, 3.0, 4.0}>
{ [mul] a = Mul(embeds, w) [norm] b = Softmax <axis = 1> (a) [tail|1] logits = Tanh(b) }
"""


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(onnx.parser.parse_model(text.replace("tail|1", "tail")).SerializeToString())
    return path


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two model directories: a decoder that differs, a vision model that does not, and others that are alone."""
    a, b = tmp_path / "phi", tmp_path / "next"
    _write(a / "decoder.onnx", DECODER)
    _write(
        b / "decoder.onnx",
        DECODER.replace("axis = 1", "axis = 0").replace("logits = Tanh(b)", "c = Abs(b) logits = Tanh(c)"),
    )
    for directory in (a, b):
        _write(directory / "parts" / "vision.onnx", VISION % "features = Relu(pixels)")
        _write(directory / ".cache" / "old.onnx", VISION % "features = Relu(pixels)")
        (directory / "decoder.onnx.data").write_bytes(b"")
    _write(a / "embedding.onnx", VISION % "features = Neg(pixels)")
    _write(b / "speech.onnx", VISION % "features = Exp(pixels)")
    return a, b


def test_models_are_paired_by_relative_name(two: tuple[Path, Path]):
    report = diff_models(*two)
    rows = [(m.model, m.submodel, m.status, m.severity, m.changes()) for m in report.models]
    assert rows == [
        ("phi", "decoder", "compared", "moderate", "+1 -0 nodes, 1 with other attributes"),
        ("phi", "embedding", "removed", "major", "model removed"),
        ("parts", "vision", "compared", "none", "no change"),
        ("phi", "speech", "added", "none", "model added"),
    ]
    assert (report.severity, report.growth) == ("major", "blocking")
    removed, added = report.models[1], report.models[3]
    assert (removed.a, removed.b) == (str(two[0] / "embedding.onnx"), None)
    assert (removed.sizes["nodes"].before, removed.sizes["nodes"].after) == (1, None)
    assert (added.a, added.b) == (None, str(two[1] / "speech.onnx"))
    assert (added.sizes["nodes"].before, added.sizes["nodes"].after) == (None, 1)


def test_an_added_model_alone_is_no_change_of_what_was_there(two: tuple[Path, Path], tmp_path: Path):
    more = shutil.copytree(two[0], tmp_path / "more")
    _write(more / "speech.onnx", VISION % "features = Exp(pixels)")
    assert diff_models(two[0], more).severity == "none"
    assert diff_models(more, two[0]).severity == "major"


def test_a_directory_against_a_file_is_a_usage_error(two: tuple[Path, Path]):
    file = two[0] / "decoder.onnx"
    for pair in ((two[0], file), (file, two[0])):
        with pytest.raises(UsageError) as caught:
            diff_models(*pair)
        assert str(caught.value) == f"{two[0]} is a directory and {file} is not: give two files or two directories."


def test_directories_without_models_and_files_that_are_none(two: tuple[Path, Path], tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputRefusedError, match=f"^{empty} holds no .onnx file: "):
        diff_models(two[0], empty)
    with pytest.raises(InputRefusedError, match=f"^{tmp_path / 'none'} cannot be listed .No such file or directory.: "):
        diff_models(two[0], tmp_path / "none")
    with pytest.raises(InputRefusedError, match=f"^{tmp_path / 'none.onnx'} does not exist"):
        diff_models(two[0] / "decoder.onnx", tmp_path / "none.onnx")
    (two[1] / "decoder.onnx").write_bytes(b"")
    with pytest.raises(InputRefusedError, match=r"decoder\.onnx is empty"):
        diff_models(*two)


def test_markdown(two: tuple[Path, Path]):
    a, b = two
    sizes = [(side / "decoder.onnx").stat().st_size for side in two]
    growth = 100 * (sizes[1] - sizes[0]) / sizes[0]
    others = [path.stat().st_size for path in (a / "embedding.onnx", a / "parts" / "vision.onnx", b / "speech.onnx")]
    assert 5 <= growth < 10
    assert (
        diff_models(*two).to_markdown()
        == f"""## Graph diff: 🔴 major

`{a}` -> `{b}`

| Model | Sub-model | Changes | Nodes | Graph | Weights | Status |
|---|---|---|---|---|---|---|
| phi | decoder | +1 -0 nodes, 1 with other attributes | ⛔ 3 -> 4 (+33.3 %) | ⚠️ {sizes[0]} B -> {sizes[1]} B (+{growth:.1f} %) | 16 B | 🟡 moderate, ⛔ blocking |
| phi | embedding | model removed | 1 | {others[0]} B | 0 B | 🔴 major |
| parts | vision | no change | 1 | {others[1]} B | 0 B | ⚪ none |
| phi | speech | model added | 1 | {others[2]} B | 0 B | ⚪ none |

⛔ Blocking: 10 % or more growth in phi/decoder.

<details><summary>phi/decoder: +1 -0 nodes, 1 with other attributes</summary>

**nodes added** (1)

- `Abs tail`

**attributes** (1)

- `Softmax norm: axis 1 -> 0`

Outputs affected: `logits`

</details>
"""
    )


def test_markdown_of_names_with_marks(tmp_path: Path):
    model = onnx.parser.parse_model(DECODER.replace("tail|1", "tail"))
    model.graph.node[1].name = "a|b`c`\n*d*"
    a, b = tmp_path / "my_[model].onnx", tmp_path / "b.onnx"
    a.write_bytes(model.SerializeToString())
    model.graph.node[1].attribute[0].i = 0
    b.write_bytes(model.SerializeToString())
    text = diff_models(a, b).to_markdown()
    assert "| my\\_\\[model].onnx | - | 1 with other attributes | 3 |" in text
    assert "\n- `Softmax a|b'c' *d*: axis 1 -> 0`\n" in text


def test_markdown_says_when_nothing_grew(two: tuple[Path, Path]):
    text = diff_models(two[0], two[0]).to_markdown()
    assert text.startswith("## Graph diff: ⚪ none\n")
    assert text.endswith("|\n\nNo size or node count grew by 5 % or more.\n")
    assert "<details>" not in text


def test_markdown_warns_from_five_percent_on(tmp_path: Path):
    body = " ".join(f"v{n} = Relu(pixels)" for n in range(19)) + " features = Relu(pixels)"
    a = _write(tmp_path / "a.onnx", VISION % body)
    b = _write(tmp_path / "b.onnx", VISION % (body + " more = Relu(pixels)"))
    report = diff_models(a, b)
    assert report.growth == "warning"
    text = report.to_markdown()
    assert "| ⚠️ 20 -> 21 (+5.0 %) |" in text
    assert "🟡 moderate, ⚠️ warning |" in text
    assert "\n⚠️ Warning: 5 % or more growth in a.onnx.\n" in text


def _table(report: DiffReport, *, verbose: bool = False) -> str:
    stream = io.StringIO()
    report.render(Console(file=stream, width=160, highlight=False), verbose=verbose)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def test_the_table(two: tuple[Path, Path]):
    lines = _table(diff_models(*two)).splitlines()
    assert lines[0].split() == ["model", "sub-model", "changes", "nodes", "graph", "weights", "status"]
    assert lines[1].startswith("phi    decoder    +1 -0 nodes, 1 with other attributes  3 -> 4 (+33.3 %)  ")
    assert lines[1].endswith("  16 B     moderate, blocking")
    assert lines[5:] == [
        "phi/decoder:",
        "nodes added (1):",
        "  Abs tail",
        "attributes (1):",
        "  Softmax norm: axis 1 -> 0",
        "operators: Abs 0 -> 1",
        "outputs affected: logits",
        "severity: major",
    ]


def test_the_table_is_short_unless_all_is_asked_for(tmp_path: Path):
    body = "features = Relu(pixels)"
    a = _write(tmp_path / "a.onnx", VISION % body)
    b = _write(tmp_path / "b.onnx", VISION % (body + " ".join(f" v{n} = Relu(pixels)" for n in range(10))))
    assert "  Relu v7\n  and 2 more\n" in _table(diff_models(a, b))
    assert "  Relu v9\noperators: Relu 1 -> 11\n" in _table(diff_models(a, b), verbose=True)
