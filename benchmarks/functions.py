"""What extract-functions does to a 32-layer export: size of the protobuf without weights, time to create a session.

    python benchmarks/functions.py [--layers 32] [--runs 5] [FIXTURE ...]

Grows committed exports to N layers and prints a Markdown table. Times are medians of alternating runs in this process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import onnx
import onnxruntime as ort

from graphsurgery.model_io import load, save
from graphsurgery.pipeline import Pipeline

HERE = Path(__file__).parent
FIXTURES = HERE.parent / "fixtures"


def proto_bytes(path: Path) -> int:
    """Size of the model's protobuf without the contents of its initializers."""
    proto = onnx.ModelProto.FromString(path.read_bytes())
    return int(proto.ByteSize() - sum(tensor.ByteSize() for tensor in proto.graph.initializer))


def session_seconds(path: Path) -> float:
    """Time to create a session at the default level."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    started = time.perf_counter()
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("fixtures", nargs="*", default=["llama", "qwen3_moe_grouped"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    print(f"| export, {arguments.layers} layers | nodes | protobuf KB | session s |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.fixtures:
            flat, functions = Path(folder, f"{name}.onnx"), Path(folder, f"{name}.functions.onnx")
            grow = [sys.executable, FIXTURES / "grow.py", FIXTURES / name / "model.onnx", "-o", flat]
            subprocess.run([*grow, "--layers", str(arguments.layers)], check=True, stdout=subprocess.DEVNULL)
            model = load(flat)
            before = len(model.graph)
            report = Pipeline(["extract-functions"])(model)
            save(model, functions)
            times: dict[Path, list[float]] = {flat: [], functions: []}
            for _ in range(arguments.runs):
                for path, found in times.items():
                    found.append(session_seconds(path))
            for path, nodes in ((flat, before), (functions, report.passes[0].nodes_after)):
                size, seconds = proto_bytes(path) / 1024, statistics.median(times[path])
                label = name if path is flat else f"{name}, functions"
                print(f"| {label} | {nodes} | {size:.0f} | {seconds:.3f} |")


if __name__ == "__main__":
    main()
