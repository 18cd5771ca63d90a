"""The commands that compress checkpoints without loss, and undo it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qdsl.cli.app import SHOWN, app, exit_on_sigterm, fail, input_argument, one_of, print_report, reported
from qdsl.cli.model_class import missing_in, model_shapes
from qdsl.cli.options import Force, Jobs, Json, OutFolder, Shard, read_part
from qdsl.cli.progress import progress
from qdsl.core.text import counted

Like = Annotated[str | None, typer.Option("--like", help="A checkpoint with the same tensors, whose headers state "
                 "shapes where neither the folder nor the model's class does.")]


@app.command()
def compress(folder: Annotated[Path, input_argument("A folder of safetensors files, a pipeline of diffusers, or one file.")],
             format: Annotated[str, typer.Option("--format", "-f", metavar="hlane|fix4|fix3|df11", show_default=False, help=
                                                 "hlane is the smallest, fix4 the fastest to decode, fix3 smaller than that, "
                                                 "df11 the dfloat11 package's.")],
             out: OutFolder,
             jobs: Jobs = None, shard: Shard = None, force: Force = False,
             check: Annotated[bool, typer.Option("--check", help="Decode and compare the written tensors before they take their "
                                                                 "place.")] = False,
             component: Annotated[list[str] | None, typer.Option("--component", help="A model of several, such as transformer, "
                                  "that is compressed; by default all but autoencoders.")] = None,
             patterns: Annotated[str | None, typer.Option("--patterns", help="df11: the package's pattern_dict as JSON, a file, "
                                 "or a config.json with it; by default a numbered block is a group.")] = None,
             threads: Annotated[int | None, typer.Option("--threads-per-block", help="df11: a power of two; by default 512, 256 "
                                                         "for GPUs with little shared memory.")] = None,
             by_group: Annotated[bool, typer.Option("--file-per-group", help="df11: a file for each group.")] = False,
             plain_config: Annotated[bool, typer.Option("--plain-config", help="df11: the dfloat11 package's config.json, to be "
                                     "loaded with that package.")] = False,
             like: Like = None, as_json: Json = False) -> None:
    """Write a checkpoint with its bfloat16 matrices compressed without loss, and everything else unchanged.

    Compressed checkpoints, such as DF11, change their format.  Run the same command again to resume.
    """
    from qdsl.codecs.huffman_windows.reference import THREADS
    from qdsl.jobs.compress import patterns as reading
    from qdsl.jobs.compress import run
    from qdsl.jobs.compress.units import FORMATS, THREAD_COUNTS, Compression
    from qdsl.jobs.engine.others import check_folder

    part, label = read_part(shard)
    format = one_of(format, FORMATS)
    if format != "df11" and (patterns is not None or threads is not None or by_group or plain_config):
        fail("--patterns, --threads-per-block, --file-per-group and --plain-config are of df11", 2)
    if threads is not None and threads not in THREAD_COUNTS:
        fail(f"--threads-per-block is a power of two from 8 to 1024, not {threads}", 2)
    if part is not None and check:
        fail("--check reads whole files, which --shard does not write: give it to the call that completes them", 2)
    with reported(), exit_on_sigterm():
        if patterns is not None and not patterns.lstrip().startswith("{"):
            check_folder(out, Path(patterns))
        aim = Compression(format, threads or THREADS, None if patterns is None else reading.read(patterns), by_group,
                  tuple(component or ()), plain_config)
        report = run.compress(folder, aim, out, like=like, shapes=model_shapes, jobs=jobs, part=part, check=check,
                              force=force, tell=progress)
        report["notes"] += map(str, missing_in(folder))
    print_compressed(report, as_json, label)


def print_compressed(report: dict[str, Any], as_json: bool, part: str = "") -> None:
    """Print the report of `compress`.  part: words for a part of a folder."""
    if print_report(report, as_json):
        return
    for tensor in report["raw"][:SHOWN]:
        typer.echo(f"not compressed: {tensor['name']!r}: {tensor['why']}")
    if len(report["raw"]) > SHOWN:
        typer.echo(f"not compressed: {len(report['raw']) - SHOWN} more")
    if report["matrices"]:
        before, after = report["nbytes_before"], report["nbytes_after"]
        typer.echo(f"{report['matrices']} matrices as {report['units']} of {report['format']}: {before} bytes are {after}, "
                   f"{100 * after / before:.2f} %, {report['bits_per_weight']:.3f} bits per weight"
                   f"{', decoded and the same' if report.get('checked') else ''}")
    _print_written(report, part)


@app.command()
def decompress(folder: Annotated[Path, input_argument("A folder written by `compress`, or for DF11 by the dfloat11 package.")],
               out: OutFolder,
               like: Like = None,
               jobs: Jobs = None, shard: Shard = None, force: Force = False,
               as_json: Json = False) -> None:
    """Write the original checkpoint of a compressed one, byte for byte.

    Run the same command again to resume.
    """
    from qdsl.jobs.compress import restore

    part, label = read_part(shard)
    with reported(), exit_on_sigterm():
        report = restore.decompress(folder, out, like=like, shapes=model_shapes, jobs=jobs, part=part, force=force, tell=progress)
    print_restored(report, as_json, label)


def print_restored(report: dict[str, Any], as_json: bool, part: str = "") -> None:
    """Print the report of `decompress`.  part: words for a part of a folder."""
    if not print_report(report, as_json):
        _print_written(report, part)


def _print_written(report: dict[str, Any], part: str) -> None:
    files = f": {counted(len(report['shards']), 'file')} of tensors, {report['nbytes']} bytes" if report["shards"] else ""
    typer.echo(f"written  {part}{report['out']}{files}")
