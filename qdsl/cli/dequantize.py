"""The command that writes plain floats."""

from __future__ import annotations

import shlex
from dataclasses import replace
from errno import ENOENT
from pathlib import Path
from typing import Annotated, Any

import typer

from qdsl.cli import options as shared
from qdsl.cli.app import app, exit_on_sigterm, fail, input_argument, json_text, one_of, os_message, print_report, reported
from qdsl.cli.model_class import compared, layer_shapes
from qdsl.cli.options import AllowUnknown, Force, Json, headed, read_part, read_patterns, refuse_options
from qdsl.cli.progress import progress
from qdsl.core.text import counted

FOLDERS = "Folders"                                              # the heading of options for folders of safetensors


@app.command()
def dequantize(context: typer.Context,
               file: Annotated[Path, input_argument("A GGUF file, or the first of a split one; a folder of safetensors files, or "
                                                    "one file.")],
               out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE|FOLDER", show_default=False,
                                                 help="The .safetensors file to write; of a folder, the folder.")],
               dtype: Annotated[str, typer.Option("--dtype", metavar="f32|bf16|f16", help="f32 is exact.")] = "f32",
               jobs: Annotated[int | None, headed(FOLDERS, "--jobs", "-j", min=1, help=shared.JOBS_HELP)] = None,
               skip: Annotated[list[str] | None, headed(FOLDERS, "--skip", help="A regular expression for layers that stay "
                                                        "quantized: whole names, or parts between dots.")] = None,
               shard: Annotated[str | None, headed(FOLDERS, "--shard", help=shared.SHARD_HELP)] = None,
               force: Force = False, allow_unknown: AllowUnknown = False, as_json: Json = False) -> None:
    """Write the weights of a quantized model as plain floats: a GGUF file as a safetensors file, a folder as a folder.

    A folder keeps its plain tensors and other files.  Run the same command again to resume.
    """
    from qdsl.jobs.gguf.dequantize import DTYPES

    dtype = one_of(dtype, DTYPES)
    if not file.exists():
        fail(os_message(FileNotFoundError(ENOENT, "No such file or directory", str(file))))
    if file.is_dir() or file.suffix == ".safetensors":
        _dequantize_folder(file, out, dtype, jobs, skip, shard, force, allow_unknown, as_json)
    else:
        refuse_options(context, FOLDERS, "folders of safetensors files")
        _dequantize_gguf(file, out, dtype, force, allow_unknown, as_json)


def _dequantize_gguf(file: Path, out: Path, dtype: str, force: bool, allow_unknown: bool, as_json: bool) -> None:
    from qdsl.host.files import check_output
    from qdsl.jobs.gguf.dequantize import dequantize_file

    with reported(), exit_on_sigterm():
        check_output(out, file, force=force)
        if out.suffix != ".safetensors":
            fail(f"--out is a .safetensors file, not '{out}'; "
                 f"`qdsl quantize {shlex.quote(str(file))} --type F32 --allow-requantize --out X.gguf` writes floats as GGUF", 2)
        written = dequantize_file(file, out, dtype, force, progress, allow_unknown)
    if as_json:
        typer.echo(json_text(written))
    else:
        typer.echo(f"written  {out}: {counted(written['tensors'], 'tensor')}, {written['nbytes']} bytes")
        for text in written["allowed"]:
            typer.echo(f"note: {text}")


def _dequantize_folder(path: Path, out: Path, dtype: str, jobs: int | None, skip: list[str] | None, shard: str | None,
                       force: bool, allow_unknown: bool, as_json: bool) -> None:
    from qdsl.checkpoint.detect.shaped import shaped_layers
    from qdsl.checkpoint.files.folder import Folder
    from qdsl.jobs.compress.units import FORMATS
    from qdsl.jobs.convert import run
    from qdsl.jobs.convert.target import parse_conversion
    from qdsl.jobs.engine import stage

    (part, label), patterns = read_part(shard), read_patterns(skip)
    with reported(), exit_on_sigterm():
        stage.check_output(out, path, force)
        with Folder(path) as source:
            detected = shaped_layers(source, layer_shapes)
            if detected.groups or any(layer.format in FORMATS for layer in detected.layers):
                command = shlex.join(["qdsl", "decompress", str(path), "--out", str(out)])
                fail(f"{path} is compressed without loss: `{command}` writes the plain folder")
            if not detected.layers:
                fail(f"{path}: no quantized layer: its weights are plain floats already")
            detected, transposed = compared(source, detected)
            aim = replace(parse_conversion(dtype, True, skip=patterns, allow_unknown=allow_unknown), transposed=transposed)
            report = run.convert(source, detected, aim, out, jobs=jobs, part=part, force=force, tell=progress)
    print_dequantized(report, dtype, as_json, label)


def print_dequantized(report: dict[str, Any], dtype: str, as_json: bool, part: str = "") -> None:
    """Print the report of a folder.  part: words for a part of it."""
    from qdsl.jobs.convert.report import unchanged_lines

    if print_report(report, as_json):
        return
    for line in unchanged_lines(report):
        typer.echo(line)
    for layers in report["layers"]:
        typer.echo(f"{counted(layers['count'], 'layer')} of {layers['from']} as {dtype}")
    typer.echo(f"written  {part}{report['out']}: {counted(len(report['shards']), 'file')} of tensors, {report['nbytes']} bytes")
