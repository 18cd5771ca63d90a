"""The command that counts what kernels do."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from qdsl.cli.app import Json, Params, app, fail, print_table, read_param, reported


@app.command()
def analyze(spec: Annotated[str, typer.Argument(help="A spec file, or the name of a format that ships with qdsl.")],
            storage: Annotated[str | None, typer.Option("--storage", help="A storage; the format's first by default.")] = None,
            param: Params = None,
            kernel: Annotated[list[str] | None, typer.Option("--kernel", help="linear, the default, or dequantize.")] = None,
            rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of x.")] = 1,
            shape: Annotated[tuple[int, int], typer.Option("--shape", min=1, help="N and K of the weight.")] = (4096, 4096),
            x: Annotated[str, typer.Option("--x", help="The type of x and of what comes out: bf16 or f16.")] = "bf16",
            arch: Annotated[list[str] | None, typer.Option("--arch", help="sm_80, sm_89, sm_90 or sm_100.")] = None,
            gpu: Annotated[list[str] | None, typer.Option("--gpu", help="a100, rtx4090, h100, h200 or b200.")] = None,
            dump: Annotated[bool, typer.Option("--dump", help="Print the hot loop, disassembled.")] = False,
            as_json: Json = False) -> None:
    """Count what a format's kernels do per weight, and predict their speed; no GPU is needed."""
    from qdsl.analyze import AnalyzeError, launches, survey, text

    kinds = kernel or ["linear"]
    for names, known in ((kinds, launches.KERNELS), ([x], launches.TYPES)):
        if wrong := [name for name in names if name not in known]:
            fail(f"no '{wrong[0]}': expected one of {', '.join(known)}", 2)
    try:
        archs, gpus = survey.targets(arch or [], gpu or [])
    except AnalyzeError as error:
        fail(f"{error}", 2)
    params = dict(map(read_param, param or []))
    kernels: list[dict[str, Any]] = []
    with reported():
        try:
            packed = launches.weight(launches.module(spec), shape, storage, params)
            for surveyed in survey.survey(packed, kinds, rows, x, archs, gpus):
                kernels += survey.data(surveyed, listing=dump)
                if not as_json:
                    for report in map(surveyed.reports.__getitem__, archs):
                        typer.echo("\n".join([*text.block(surveyed.title, report), *(report.listing if dump else ()), ""]))
                    print_table(text.HEADS, [text.row(surveyed.reports[gpu.arch], prediction)
                                             for gpu, prediction in zip(gpus, surveyed.predictions, strict=True)])
        except survey.REFUSALS as error:
            fail(f"{error}", 1 if isinstance(error, AnalyzeError) else 2)
    typer.echo(json.dumps({"schema": 1, "kernels": kernels}) if as_json else text.LEGEND)
