"""``graphsurgery verify``."""

from __future__ import annotations

from pathlib import Path

import click

from graphsurgery.cli.output import emit, progress, report_console, report_options, verbosity_options, warn, write_file


@click.command("verify", short_help="Check with ONNX Runtime that two models compute the same.")
@click.argument("reference", metavar="A", type=click.Path(path_type=Path))
@click.argument("rewritten", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--depth",
    default="outputs",
    show_default=True,
    metavar="outputs|generate|regions|auto",
    help="outputs: whole models, every output. generate: greedy decoding, the cache handed from call to call. "
    "regions: only what differs, on random weights: needs no data file. auto: outputs where both fit into memory.",
)
@click.option("--feeds", type=click.Path(path_type=Path), help="An .npz file with inputs, in place of drawn ones.")
@click.option("--seed", type=int, default=0, show_default=True, help="What feeds are drawn from.")
@click.option("--memory", metavar="SIZE", help="Memory that may be used, such as 8GiB [default: what is free].")
@click.option("--real-weights", is_flag=True, help="regions: read the weights from the data files.")
@click.option("--bisect", is_flag=True, help="Run B's passes again one by one and name the first that differs from A.")
@click.option("--steps", type=int, metavar="N", help="generate: tokens to decode behind each prompt [default: 10].")
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="IDS|TEXT|FILE",
    help="generate: token ids (1,2,3), text for the tokenizer.json beside A, or a file of either; in place of drawn ones.",
)
@click.option("--decode", type=click.Path(path_type=Path), help="generate: the file that decodes behind B's prompts.")
@click.option(
    "--reference-decode", type=click.Path(path_type=Path), help="generate: the file that decodes behind A's prompts."
)
@report_options
@verbosity_options
def command(
    reference: Path,
    rewritten: Path,
    depth: str,
    feeds: Path | None,
    seed: int,
    memory: str | None,
    real_weights: bool,
    bisect: bool,
    steps: int | None,
    prompts: tuple[str, ...],
    decode: Path | None,
    reference_decode: Path | None,
    report_form: str,
    report_file: Path | None,
    verbose: int,
    quiet: bool,
) -> int:
    """Hold B, a rewritten model, against A, the model as exported.

    Exit codes: 0 equal, 1 different, 5 could not be checked.
    """
    from graphsurgery.equivalence.verify import verify_models
    from graphsurgery.sizes import parse_size

    budget = None if memory is None else parse_size(memory, "--memory")
    with progress(quiet=quiet) as watcher:
        result = verify_models(
            reference,
            rewritten,
            depth=depth,
            seed=seed,
            feeds=feeds,
            memory=budget,
            progress=watcher,
            steps=steps,
            prompts=prompts or None,
            decode=decode,
            decode_reference=reference_decode,
            real_weights=real_weights,
            bisect=bisect,
        )
    warn(list(result.warnings), quiet=quiet)
    if report_file is not None:
        write_file(report_file, result.dumps() + "\n")
    if report_form == "json":
        emit(result.dumps() + "\n")
    else:
        result.render(report_console(), verbose=bool(verbose))
    return result.exit_code
