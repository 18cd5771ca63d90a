"""Commands that count the instructions of kernels, and print which kernel a matmul uses."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import qdsl
from qdsl.cli.app import app, fail, json_text, one_of, print_table, reported
from qdsl.cli.options import Extents, Json, Params, Rows, Spec, Storage, read_param


@app.command()
def analyze(spec: Spec, storage: Storage = None, param: Params = None,
            kernel: Annotated[list[str] | None, typer.Option("--kernel", help="linear, the default, or dequantize.")] = None,
            rows: Rows = 1, shape: Extents = None,
            x: Annotated[str, typer.Option("--x", help="The type of x and of what comes out: bf16 or f16.")] = "bf16",
            arch: Annotated[list[str] | None, typer.Option("--arch", help="sm_75 to sm_120, gfx942, gfx950 or gfx1201.")] = None,
            gpu: Annotated[list[str] | None, typer.Option("--gpu", help="As h100; an unknown name prints all.")] = None,
            execute: Annotated[bool, typer.Option("--execute",
                                                  help="Run what was compiled on a CPU, with random weights.")] = False,
            programs: Annotated[str | None, typer.Option("--programs",
                                                         help="With --execute: FIRST:END of the grid alone.")] = None,
            dump: Annotated[bool, typer.Option("--dump", help="Print the hot loop, disassembled.")] = False,
            as_json: Json = False) -> None:
    """Count what a format's kernels do per weight, and predict their speed; no GPU is needed.

    With --execute run what was compiled, instruction by instruction, and check its results and its accesses of memory.
    """
    from qdsl.analyze import GPUS, AnalyzeError, launches, survey, text

    kinds = [one_of(kind, launches.KERNELS) for kind in kernel or ["linear"]]
    x = one_of(x, launches.TYPES)
    try:
        archs, gpus = survey.resolve_targets(arch or [], gpu or [])
    except AnalyzeError as error:
        fail(f"{error}", 2)
    params = dict(map(read_param, param or []))
    if programs and not execute:
        fail("--programs needs --execute", 2)
    if execute:
        _execute(spec, storage, params, kinds, rows, shape, x, archs, programs, as_json)
        return
    kernels: list[dict[str, Any]] = []
    with reported():
        try:
            module, storage = _loaded(spec, storage)
            packed = launches.meta_weight(module, shape or (4096, 4096), storage, params)
            for surveyed in survey.survey(packed, kinds, rows, x, archs, gpus):
                kernels += survey.report_data(surveyed, listing=dump)
                if not as_json:
                    for report in (surveyed.reports[name] for name in archs if name in surveyed.reports):
                        typer.echo("\n".join([*text.report_lines(surveyed.title, report), *(report.listing if dump else ()), ""]))
                    print_table(text.HEADS, [text.prediction_row(surveyed.reports[GPUS[prediction.gpu].arch], prediction)
                                             for prediction in surveyed.predictions])
        except survey.REFUSALS as error:
            fail(f"{error}", 1 if isinstance(error, AnalyzeError) else 2)
    typer.echo(json_text({"kernels": kernels}) if as_json else text.LEGEND)


@app.command()
def explain(spec: Spec, storage: Storage = None, param: Params = None,
            rows: Rows = 1, shape: Extents = None,
            x: Annotated[str, typer.Option("--x", help="The type of x and the result: bf16 or f16; f32 on a CPU.")] = "bf16",
            gpu: Annotated[list[str] | None, typer.Option("--gpu", help="As h100, or cpu; others print all.")] = None,
            as_json: Json = False) -> None:
    """Print which kernel a matmul uses on a GPU, or on this CPU, the alternatives, and the time of each.

    Times on GPUs are modelled, those on this CPU are measured.
    """
    from qdsl.analyze import AnalyzeError, choices, launches, processors
    from qdsl.analyze.gpus import gpu_of
    from qdsl.runtime import FormatError

    names = gpu or ["h100"]
    types = processors.CPU_TYPES if set(names) == {processors.CPU} else launches.TYPES
    x = one_of(x, types)
    try:
        gpus = [gpu_of(name) for name in names if name != processors.CPU]
    except AnalyzeError as error:
        fail(f"{error}", 2)
    with reported():
        try:
            module, storage = _loaded(spec, storage)
            extents, params = shape or (4096, 4096), dict(map(read_param, param or []))
            explained = []
            if gpus:
                packed = launches.meta_weight(module, extents, storage, params)
                explained = [choices.explain_choice(packed, rows, x, one) for one in gpus]
            if processors.CPU in names:
                packed = processors.random_weight(module.FORMAT, extents, storage, params)
                explained.append(processors.explain_choice(packed, rows, x))
        except FormatError as error:
            fail(f"{error}", 2)
    if as_json:
        typer.echo(json_text({"products": explained}))
        return
    for choice in explained:
        typer.echo(choices.choice_title(choice))
        print_table(choices.HEADS, choices.candidate_rows(choice))
        others = [f"not {kind}: {why}" for kind, why in choice["refused"].items()]
        counts = [f"counts of {choice['counts']}"] if choice["counts"] else []
        typer.echo("\n".join([f"chosen: {choice['reason']}", *others, *counts, ""]))


def _loaded(spec: str, storage: str | None) -> tuple[Any, str | None]:
    """The module of a format, and the name of its storage, which the word for the format may mean, too."""
    from qdsl.checkpoint.detect.targets import format_target

    module = qdsl.load(spec)
    if Path(spec).is_file():
        return module, storage
    return module, format_target(f"{module.FORMAT.name}.{storage}" if storage else spec).partition(".")[2] or None


def _execute(spec: str, storage: str | None, params: dict[str, int | str], kinds: list[str], rows: int,
             shape: tuple[int, int] | None, x: str, archs: list[str], programs: str | None, as_json: bool) -> None:
    """Print the results of --execute; exit code 3 where a checker reports a problem, or dequantize is not exact."""
    from qdsl.analyze.execute import ExecutionError, trial
    from qdsl.analyze.survey import REFUSALS

    chosen = _range(programs) if programs else None
    trials = []
    with reported():
        try:
            module, storage = _loaded(spec, storage)
            for kind, arch in ((kind, arch) for kind in kinds for arch in archs):
                trials.append(trial.run_trial(module, kind, arch, storage=storage, params=params, shape=shape or trial.SHAPE,
                                              rows=rows, x=x, programs=chosen))
                if not as_json:
                    typer.echo("\n".join([*trial.trial_lines(trials[-1]), ""]))
        except (*REFUSALS, ExecutionError) as error:
            fail(f"{error}", 1)
    if as_json:
        typer.echo(json_text({"trials": [asdict(result) for result in trials]}))
    if not all(result.is_right for result in trials):
        raise typer.Exit(3)


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        fail(f"--programs is FIRST:END, not '{text}'", 2)
    return range(int(first), int(end))
