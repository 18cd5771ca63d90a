"""The commands that convert checkpoints and complete folders."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from qdsl.cli.app import app, exit_on_sigterm, fail, input_argument, print_report, print_table, reported
from qdsl.cli.compress import print_compressed, print_restored
from qdsl.cli.model_class import compared, layer_shapes, model_shapes
from qdsl.cli.options import (
    AllowUnknown,
    Force,
    Jobs,
    Json,
    OutFolder,
    Params,
    Producer,
    Shard,
    read_param,
    read_part,
    read_patterns,
)
from qdsl.cli.progress import progress
from qdsl.cli.words import DTYPE_NAMES
from qdsl.core.text import counted, name_key


@app.command()
def convert(folder: Annotated[Path, input_argument("A folder of safetensors files, or one file.")],
            out: OutFolder,
            to: Annotated[str | None, typer.Option("--to", help="A storage of the layers' format, such as awq; as FORMAT.STORAGE "
                                                                "for the layers of one format alone.")] = None,
            requantize: Annotated[str | None, typer.Option("--requantize", help="A format, or FORMAT.STORAGE, that all quantized "
                                                           "layers are to have: numbers change, and it says how much.")] = None,
            param: Params = None,
            producer: Producer = None,
            skip: Annotated[list[str] | None, typer.Option("--skip", help="A regular expression for layers that stay as they "
                                                             "are: whole names, or parts between dots.")] = None,
            keep_misfits: Annotated[bool, typer.Option("--keep-misfits", help="Leave layers as they are that the storage cannot "
                                                                              "hold.")] = False,
            jobs: Jobs = None, shard: Shard = None, force: Force = False, allow_unknown: AllowUnknown = False,
            as_json: Json = False) -> None:
    """Write a checkpoint with every quantized layer in another storage of its format, exactly, and everything else unchanged.

    Run the same command again to resume.
    """
    from qdsl.checkpoint.detect.shaped import shaped_layers
    from qdsl.checkpoint.files.folder import Folder
    from qdsl.jobs.compress.units import FORMATS
    from qdsl.jobs.convert import run
    from qdsl.jobs.convert.config import check_settings
    from qdsl.jobs.convert.plan_conversion import changed_layers
    from qdsl.jobs.convert.target import parse_conversion
    from qdsl.jobs.engine import stage
    from qdsl.jobs.gguf.dequantize import DTYPES

    part, label = read_part(shard)
    if param and requantize is None:
        fail("--param is for --requantize: --to keeps the parameters of each layer", 2)
    if (to is None) == (requantize is None):
        fail("say what to write: --to awq, or another storage of the layers' format, keeps all numbers; --requantize fp8_block, "
             "or another format, with its --param, writes other numbers", 2)
    patterns = read_patterns(skip)
    if to is not None and name_key(to) in FORMATS:
        fail(f"{to} is written by `qdsl compress --format {name_key(to)}`, from another lossless format too", 2)
    if to is not None and to.lower() in {*DTYPES, *map(DTYPE_NAMES.get, DTYPES)}:
        fail(f"--to takes a storage of the layers' format: `qdsl dequantize --dtype {to.lower()}` writes plain floats", 2)
    with reported(2):
        aim = parse_conversion(to or requantize or "", requantize is not None, dict(map(read_param, param or [])), skip=patterns,
                    keep_misfits=keep_misfits, producer=producer or "", allow_unknown=allow_unknown)
        check_settings(aim)
    with reported():
        stage.check_output(out, folder, force)                   # before layers are detected, which may take long
    with reported(), exit_on_sigterm(), Folder(folder) as source:
        detected = shaped_layers(source, layer_shapes)
        changed_layers(source, detected, aim)                    # before libraries of models are imported
        detected, transposed = compared(source, detected)
        aim = replace(aim, transposed=transposed)
        report = run.convert(source, detected, aim, out, jobs=jobs, part=part, force=force, tell=progress)
    print_converted(report, as_json, label)


@app.command("merge-index")
def merge_index(out: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False,
                                                     help="The folder that all parts were written to.")],
                as_json: Json = False) -> None:
    """Complete a folder whose parts were written with --shard: the index, the config, and all other files."""
    from qdsl.jobs.engine import stage

    with reported(), exit_on_sigterm():
        if stage.was_merged(out):
            print_report({"out": str(out), "notes": [f"{out} was complete already"]}, as_json)
            return
        command = stage.read_request(out).get("command")
        if command == "compress":
            from qdsl.jobs.compress import run as compressing

            print_compressed(compressing.merge(out, shapes=model_shapes, jobs=None, tell=progress), as_json)
        elif command == "decompress":
            from qdsl.jobs.compress import restore

            print_restored(restore.merge(out, shapes=model_shapes), as_json)
        else:
            from qdsl.jobs.convert import run

            print_converted(run.merge(out, layer_shapes), as_json)


def print_converted(report: dict[str, Any], as_json: bool, part: str = "") -> None:
    """Print the report of `convert` or of `quantize --format`.  part: words for a part of a folder."""
    if print_report(report, as_json):
        return
    from qdsl.jobs.convert.report import HEADS, table, unchanged_lines

    if "quantized" in report:
        print_table(HEADS, table(report))
    for line in unchanged_lines(report):
        typer.echo(line)
    for layers in report["layers"]:
        typer.echo(f"{counted(layers['count'], 'layer')} from {layers['from']} to {layers['to']}")
    if report["requantized"]:
        ratios = {name: _ratio(cost["snr_db"]) for name, cost in report["requantized"].items()}
        worst = min(ratios, key=ratios.__getitem__)
        verb = "quantized" if "quantized" in report else "requantized"
        typer.echo(f"{verb}: signal to noise {_ratio(report['snr_db']):.2f} dB, the least of {worst!r}, {ratios[worst]:.2f} dB")
    for model, readers in report["readers"].items():
        of_model = f" ({model})" if model else ""
        typer.echo(f"read by{of_model}: {readers}")
        for program, why in report["not_read_by"][model].items():
            typer.echo(f"not read by{of_model} {program}: {why}")
    typer.echo(f"written  {part}{report['out']}: {counted(len(report['shards']), 'file')} of tensors, {report['nbytes']} bytes")


def _ratio(decibels: float | None) -> float:
    """Decibels, infinite where nothing was lost, for which JSON has no number."""
    return math.inf if decibels is None else decibels
