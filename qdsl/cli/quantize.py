"""The command that quantizes models."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qdsl.cli import options as shared
from qdsl.cli.app import app, exit_on_sigterm, fail, input_argument, json_text, print_table, reported
from qdsl.cli.calibration import HEADING, CalibrationRun, moments_of, options_within
from qdsl.cli.checkpoints import language_folder
from qdsl.cli.convert import print_converted
from qdsl.cli.model_class import missing_in
from qdsl.cli.options import (
    AllowUnknown,
    Force,
    Jobs,
    Json,
    headed,
    read_device,
    read_param,
    read_part,
    read_patterns,
    refuse_options,
)
from qdsl.cli.progress import progress

if TYPE_CHECKING:
    from qdsl.jobs.gguf.mixes import Options

GGUF, FOLDER = "GGUF files, with --type", "Folders, with --format"   # headings of options that are for one of the two
OTHER_FILES = (".safetensors", ".bin", ".pt", ".pth", ".json")   # suffixes of files that are no GGUF files
_gguf, _folder, _calibrated = (partial(headed, heading) for heading in (GGUF, FOLDER, HEADING))

Mix = Annotated[str | None, typer.Option("--type", "-t", help="Write a GGUF file: a mix of llama-quantize's, such as Q4_K_M, or "
                                         "COPY.", show_default=False)]
Format = Annotated[str | None, typer.Option("--format", "-f", metavar="FORMAT[.STORAGE]", help="Write a folder of safetensors, "
                                            "such as fp8_block.", show_default=False)]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE|FOLDER", help="The GGUF file or the folder to write.")]
Svg = Annotated[Path | None, typer.Option("--svg", help="Draw what quantizing cost into this file.")]
Storage = Annotated[str | None, _folder("--storage", help="Of the format; its first by default.")]
Param = Annotated[list[str] | None, _folder("--param", help=shared.PARAM_HELP)]
Producer = Annotated[str | None, _folder("--producer", help=shared.PRODUCER_HELP)]
Skip = Annotated[list[str] | None, _folder("--skip", help="A regular expression for layers that stay plain: whole names, or "
                                                          "parts between dots.")]
Component = Annotated[list[str] | None, _folder("--component", help="A model of several, such as transformer, that is quantized; "
                                                                    "by default all but autoencoders.")]
Shard = Annotated[str | None, _folder("--shard", help=shared.SHARD_HELP)]
Imatrix = Annotated[Path | None, _gguf("--imatrix", help="How much columns matter, as llama-imatrix writes it.")]
Power = Annotated[float | None, _gguf("--imatrix-power", min=0, max=1, help="To which power importances count: 1 is ggml's "
                                      "measure, 0 none; by default 0.5 for IQ3, else 1, and 1 with --method gptq.")]
Pure = Annotated[bool, _gguf("--pure", help="One type for all matrices.")]
TensorType = Annotated[list[str] | None, _gguf("--tensor-type", help="PATTERN=TYPE for tensors whose names the regular "
                                               "expression is found in; the first that fits counts.")]
OutputType = Annotated[str | None, _gguf("--output-tensor-type", help="A type for output.weight.")]
EmbeddingType = Annotated[str | None, _gguf("--token-embedding-type", help="A type for the token embedding.")]
LeaveOutput = Annotated[bool, _gguf("--leave-output-tensor", help="Keep output.weight as it is.")]
Requantize = Annotated[bool, _gguf("--allow-requantize", help="Take weights that are quantized already, for a worse model.")]
Arch = Annotated[str | None, _gguf("--arch", help="A diffusion model's architecture, such as flux.")]
DryRun = Annotated[bool, _gguf("--dry-run", help="Show types and sizes; write nothing.")]
Calibrate = Annotated[Path | None, typer.Option("--calibrate", metavar="TEXT", help="Run the model on this text, and choose "
                                                "codes by what its layers get as inputs.")]
Samples = Annotated[int, _calibrated("--samples", min=1, help="Runs of tokens.")]
Length = Annotated[int, _calibrated("--length", min=4, help="Tokens of a run.")]
Method = Annotated[str | None, _calibrated("--method", help="importance: the inputs choose scales alone; by default the codes, "
                                                            "too.")]
Sequential = Annotated[bool, _calibrated("--sequential/--one-shot", help="Give each block the outputs of the quantized block "
                                         "before it, or of the plain one.")]
TargetBits = Annotated[float | None, _calibrated("--target-bits", min=0.1, help="Write a GGUF file of at most so many bits per "
                                                 "weight, in the types that change predictions least.")]
Types = Annotated[str | None, _calibrated("--types", help="That --target-bits may take, with commas between; by default Q2_K to "
                                          "Q6_K and Q8_0.")]
Device = Annotated[str | None, _calibrated("--device", callback=read_device, help="That runs the model, such as cuda; by default "
                                           "a GPU where there is one.")]


@app.command()
def quantize(context: typer.Context, file: Annotated[Path, input_argument("A GGUF or .safetensors file, or a folder.")],
             mix: Mix = None, format: Format = None, out: Out = None, jobs: Jobs = None, force: Force = False,
             allow_unknown: AllowUnknown = False, svg: Svg = None, storage: Storage = None, param: Param = None,
             producer: Producer = None, skip: Skip = None, component: Component = None, shard: Shard = None,
             imatrix: Imatrix = None, imatrix_power: Power = None, pure: Pure = False, tensor_type: TensorType = None,
             output_type: OutputType = None, embedding_type: EmbeddingType = None, leave_output: LeaveOutput = False,
             requantize: Requantize = False, arch: Arch = None, dry_run: DryRun = False, calibrate: Calibrate = None,
             samples: Samples = 128, length: Length = 2048, method: Method = None, sequential: Sequential = True,
             device: Device = None, target_bits: TargetBits = None, types: Types = None, as_json: Json = False) -> None:
    """Write a model in smaller types, as a GGUF file or as a folder, and print what that cost in quality.

    --type takes llama-quantize's mixes.  --format takes qdsl's formats.  Run the same command again to resume.
    """
    mix, format = _target(mix, format, out) if target_bits is None else (mix, format)
    refuse_options(context, *((FOLDER, "--format") if format is None else (GGUF, "--type")))
    run = CalibrationRun.of(context, calibrate, samples, length, method, sequential, device, target_bits, types)
    if format is not None:
        to = f"{format}.{storage}" if storage else format
        _quantize_folder(file, to, out, param, producer, skip, component, jobs, shard, force, svg, allow_unknown, as_json, run)
        return
    from qdsl.jobs.gguf import mixes

    with reported(2):
        if out is not None and (out.suffix in OTHER_FILES or out.is_dir()):
            fail(f"--type writes a GGUF file, and {out} {'is a folder' if out.is_dir() else 'names none'}: let its name end in "
                 ".gguf", 2)
        chosen = mixes.mix_for(target_bits) if target_bits else mixes.mix_of(mix or "")
        options = mixes.Options(chosen, imatrix is not None, pure, leave_output,
                                output=output_type and mixes.type_named(output_type),
                                embedding=embedding_type and mixes.type_named(embedding_type),
                                overrides=tuple(map(mixes.override_of, tensor_type or ())))
    if imatrix_power is not None and imatrix is None and run is None:
        fail("--imatrix-power is the exponent of importances: give them with --imatrix, or --calibrate", 2)
    _quantize_to_gguf(file, options, out, imatrix, imatrix_power, arch, requantize, jobs, force, dry_run, svg, allow_unknown,
                      as_json, run)


def _target(mix: str | None, format: str | None, out: Path | None) -> tuple[str | None, str | None]:
    """The mix of a GGUF file, or the format of a folder; a name that only the other option takes is taken as of that option.

    Exits with code 2 unless one is given, and where `out` is no name for what the other option writes.
    """
    from qdsl.checkpoint.detect.targets import format_target
    from qdsl.core.places import UnknownSpec
    from qdsl.jobs.gguf import QuantizeError
    from qdsl.jobs.gguf.mixes import mix_of

    if mix is not None and format is not None:
        fail("--type writes a GGUF file and --format a folder of safetensors: give one of them", 2)
    if mix is None and format is None:
        fail("say what to write: --type Q4_K_M, or another mix, writes a GGUF file; --format fp8_block, or another format that "
             "`qdsl list` prints, a folder of safetensors", 2)
    read, other, option = (mix_of, format_target, "--format") if format is None else (format_target, mix_of, "--type")
    with suppress(QuantizeError, UnknownSpec):
        read(mix or format or "")
        return mix, format
    with suppress(QuantizeError, UnknownSpec):
        other(mix or format or "")
        if out is not None and (out.suffix == ".gguf") != (option == "--type"):
            fail(f"{mix or format} is a name of {option}, which writes " + (
                f"a GGUF file: {out} does not end in .gguf" if option == "--type" else f"a folder, not {out}"), 2)
        return format, mix
    return mix, format


def _quantize_to_gguf(file: Path, options: Options, out: Path | None, imatrix: Path | None, power: float | None,
                      arch: str | None, requantize: bool, jobs: int | None, force: bool, dry_run: bool, svg: Path | None,
                      allow_unknown: bool, as_json: bool,
                      calibration: CalibrationRun | None) -> None:
    """Write a GGUF file, or with `dry_run` print its types and sizes."""
    from qdsl.host.files import check_output, write_text
    from qdsl.jobs.gguf import plan_file, quality
    from qdsl.jobs.gguf.imatrix import read
    from qdsl.jobs.gguf.source import open_source

    if out is None and not dry_run:
        fail("give --out to write a file, or --dry-run", 2)
    if svg is not None and dry_run:
        fail("--svg draws what quantizing cost, which a --dry-run does not know", 2)
    with reported():
        inputs = [file, *([imatrix] if imatrix else [])]
        if out is not None:
            check_output(out, *inputs, force=force or dry_run)
        if svg is not None:
            check_output(svg, *inputs, *([out] if out else []), force=force)
        importance = read(imatrix) if imatrix else None
        source = language_folder(file, arch, allow_unknown) or open_source(file, arch, allow_unknown)
        options = options_within(calibration, file, source, options, requantize, out)
        planned = plan_file.plan(source, options, importance, requantize)
        costs = {}
        if out is not None and not dry_run:
            from qdsl.jobs.gguf import run

            with exit_on_sigterm(), moments_of(calibration, file, planned, out) as moments, progress(planned.amounts) as tell:
                costs = run.quantize_file(source, planned, options, out, importance, power=power, force=force, tell=tell,
                                          jobs=jobs or run.default_jobs(planned, moments), calibration=moments)
        report = plan_file.data(planned, file, costs)
        if svg is not None:
            write_text(svg, quality.svg(f"{file.name} as {options.mix.name}: signal to noise", report["tensors"]))
    if as_json:
        typer.echo(json_text({"out": None if dry_run else str(out), **report}))
        return
    for heads, *rows in plan_file.tables(report):
        print_table(heads, rows)
    for note in report["notes"]:
        typer.echo(f"note: {note}")
    bits = report["bits_per_weight"]
    typer.echo(f"{'would write' if dry_run else 'written'}  {out or ''}  {report['nbytes']} bytes of weights"
               + ("" if bits is None else f", {bits:.3f} bits per weight"))


def _quantize_folder(path: Path, to: str, out: Path | None, param: list[str] | None, producer: str | None,
                     skip: list[str] | None, component: list[str] | None, jobs: int | None, shard: str | None, force: bool,
                     svg: Path | None, allow_unknown: bool, as_json: bool,
                      calibration: CalibrationRun | None) -> None:
    """Write a folder of plain safetensors with its Linear layers quantized."""
    from qdsl.host.files import check_output, write_text
    from qdsl.jobs.convert import run
    from qdsl.jobs.convert.config import check_settings
    from qdsl.jobs.convert.target import parse_conversion
    from qdsl.jobs.engine import stage
    from qdsl.jobs.gguf import quality

    if out is None:
        fail("give --out with the folder to write", 2)
    if calibration is not None and shard is not None:
        fail("--calibrate runs the whole model: quantize it without --shard", 2)
    patterns = read_patterns(skip)
    part, label = read_part(shard)
    with reported(2):
        aim = parse_conversion(to, True, dict(map(read_param, param or [])), patterns, tuple(component or ()),
                    producer=producer or "", allow_unknown=allow_unknown)
        check_settings(aim)
    with reported(), exit_on_sigterm():
        if svg is not None:
            check_output(svg, path, force=force)
        stage.check_output(out, path, force)                     # before the input is read
        aim, calibrate = (aim, None) if calibration is None else calibration.for_folder(path, aim)
        report = run.quantize(path, aim, out, jobs=jobs, part=part, force=force, tell=progress,
                              calibrate=calibrate, missing=lambda: missing_in(path))
        if svg is not None:
            rows = [{**row, "type": to} for row in report["quantized"]]
            write_text(svg, quality.svg(f"{path.name} as {to}: signal to noise", rows))
    print_converted(report, as_json, label)
