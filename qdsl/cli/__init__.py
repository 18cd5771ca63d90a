"""The command line.  Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(name="qdsl", no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]},
                  help="A compiler for quantized weight formats: one YAML file becomes a reference, kernels and a linear layer.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
SHOWN = 50                                                       # differences and notes, of those that there are
A_PROCESS = 8                                                    # specs that are worth a process of their own
Names = Annotated[list[str], typer.Argument(help="Spec files, or names of formats that ship with qdsl.", show_default=False)]


def main() -> None:
    """Run the command line; where standard output cannot be written, end with exit code 1 and a sentence."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:                           # the caller has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())   # so that nothing is flushed again at the end
        if not isinstance(error, BrokenPipeError):
            typer.echo(f"error: standard output: {error.strerror}", err=True)
        sys.exit(1)


def _version(value: bool) -> None:
    if value:
        import qdsl

        typer.echo(f"qdsl {qdsl.__version__}")
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                                   help="Print the version.")] = False) -> None:
    """Options before a command."""


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


@contextmanager
def _reported(code: int = 1) -> Iterator[None]:
    """Problems of specs and files as messages; a wrong spec never shows a traceback.  code: the exit code of a wrong file."""
    from qdsl.checkpoint.safetensors import CheckpointError
    from qdsl.places import UnknownSpec
    from qdsl.quantize import QuantizeError
    from qdsl.rewrite import RewriteError
    from qdsl.spec.source import SpecError

    try:
        yield
    except UnknownSpec as error:
        _fail(f"error: {error}", 2)
    except SpecError as error:
        count = len(error.problems)
        _fail(f"{error}\n\n{count} problem{'s' if count > 1 else ''}")
    except BrokenPipeError:                                      # of standard output, as where `head` has enough
        raise
    except (CheckpointError, QuantizeError, RewriteError, OSError) as error:
        _fail(f"error: {error}", code)


def _local(ref: str) -> Path:
    """The local path of a file, a folder, a URL or a repository."""
    from qdsl.checkpoint.references import local_path

    with _reported():
        return local_path(ref)


def _source(help: str) -> Any:
    """A file or folder that is read, which may be on a server."""
    return typer.Argument(parser=_local, metavar="REF", help=help, show_default=False)


@app.command()
def check(specs: Names, as_json: Json = False) -> None:
    """Check specs, and say everything that is wrong, with its place."""
    from qdsl import places
    from qdsl.passes import compile_spec
    from qdsl.spec.schema import load
    from qdsl.spec.source import SpecError

    found: list[dict[str, Any]] = []
    problems = missing = 0
    for name in specs:
        try:
            with_path = places.find(name)
            programs = compile_spec(load(with_path, name if Path(name).is_file() else str(with_path)))
        except SpecError as error:
            problems += len(error.problems)
            found.append({"spec": name, "ok": False, "problems": [
                {"line": p.span.line, "column": p.span.column, "message": p.message, "notes": list(p.notes)}
                for p in error.problems]})
            if not as_json:
                typer.echo(str(error), err=True)
            continue
        except (places.UnknownSpec, OSError) as error:
            missing += 1
            found.append({"spec": name, "ok": False, "error": str(error)})
            if not as_json:
                typer.echo(f"error: {error}", err=True)
            continue
        storages = list(dict.fromkeys(program.storage for program in programs))
        found.append({"spec": name, "ok": True, "format": programs[0].spec.name.value, "storages": storages})
        if not as_json:
            typer.echo(f"{name}: ok, {', '.join(storages)}")
    if as_json:
        typer.echo(json.dumps({"schema": 1, "specs": found}))
    if problems:
        _fail("" if as_json else f"\n{problems} problem{'s' if problems > 1 else ''}", 2 if missing else 1)
    if missing:
        raise typer.Exit(2)


@app.command()
def build(specs: Annotated[list[str] | None, typer.Argument(help="Spec files, or names of formats that ship with qdsl.")] = None,
          every: Annotated[bool, typer.Option("--all", help="Build every spec that ships with qdsl.")] = False,
          out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of generated modules.")] = None,
          verify: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a module is not up to date.")] = False,
          as_json: Json = False) -> None:
    """Build specs into modules, and say what was written."""
    from qdsl import places
    from qdsl.emit import build as builder
    from qdsl.processes import processors, results

    if bool(specs) == every:
        _fail("error: name the specs to build, or give --all", 2)
    rows: list[dict[str, str]] = []
    with _reported():
        paths = places.shipped() if every else [places.find(name) for name in specs or []]
        made = results(builder.files_of, paths, min(processors(), math.ceil(len(paths) / A_PROCESS)), ahead=len(paths))
        for path, files in zip(paths, made, strict=True):
            folder = out or (places.generated() if path.parent.resolve() == places.specs() else Path("generated"))
            try:
                rows += [{"spec": str(path), "path": _short(w.path), "change": w.change}
                         for w in builder.put(files, folder, write=not verify)]
            except builder.BuildError as error:
                _fail(f"error: {error}")
    changed = [row for row in rows if row["change"] != "same"]
    if as_json:
        typer.echo(json.dumps({"schema": 1, "files": rows}))
    else:
        for row in changed if verify else rows:
            typer.echo(f"{'stale' if verify else row['change']:<8} {row['path']}")
    if verify and changed:
        again = ["--all"] if every else [*(specs or []), *(["--out", str(out)] if out else [])]
        _fail(f"generated modules are not what their specs say: run `qdsl build {shlex.join(again)}`")


def _short(path: Path) -> str:
    """A path as the user would write it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the formats that ship with qdsl."""
    from qdsl import places
    from qdsl.emit.page import summary
    from qdsl.passes import compile_spec
    from qdsl.spec.schema import load

    with _reported():
        rows = [summary(compile_spec(load(path))) for path in places.shipped()]
    if as_json:
        typer.echo(json.dumps({"schema": 1, "formats": rows}))
        return
    _table(["format", "bits per weight", "storages", "what it is"],
           [[row["name"], row["bits"], ", ".join(row["storages"]), row["title"]] for row in rows])


@app.command()
def show(spec: Annotated[str, typer.Argument(help="A spec file, or the name of a format that ships with qdsl.")],
         svg: Annotated[Path | None, typer.Option("--svg", help="Write the bit picture to this file.")] = None,
         program: Annotated[bool, typer.Option("--program", help="Print the typed programs.")] = False,
         as_json: Json = False) -> None:
    """Show a format: its formula, its layouts, and where every bit lies."""
    from qdsl import places
    from qdsl.emit import page, picture
    from qdsl.files import check_output, write_text
    from qdsl.ir.text import text
    from qdsl.passes import compile_spec
    from qdsl.spec.schema import load

    with _reported():
        programs = compile_spec(load(places.find(spec)))
        if svg is not None:
            check_output(svg, places.find(spec))
            write_text(svg, picture.svg(page.distinct(programs)))
            typer.echo(f"written  {svg}")
        elif as_json:
            typer.echo(json.dumps({"schema": 1, **page.data(programs)}))
        else:
            typer.echo("\n".join(text(p) for p in programs) if program else "\n".join(page.terminal(programs)))


@app.command()
def analyze(spec: Annotated[str, typer.Argument(help="A spec file, or the name of a format that ships with qdsl.")],
            storage: Annotated[str | None, typer.Option("--storage", help="A storage; the format's first by default.")] = None,
            param: Annotated[list[str] | None, typer.Option("--param", help="A parameter, as key=value.")] = None,
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
    for given, known in ((kinds, launches.KERNELS), ([x], launches.TYPES)):
        if wrong := [each for each in given if each not in known]:
            _fail(f"error: no '{wrong[0]}': expected one of {', '.join(known)}", 2)
    try:
        archs, gpus = survey.targets(arch or [], gpu or [])
    except AnalyzeError as error:
        _fail(f"error: {error}", 2)
    params = dict(map(_param, param or []))
    found: list[dict[str, Any]] = []
    with _reported():
        try:
            packed = launches.weight(launches.module(spec), shape, storage, params)
            for each in survey.survey(packed, kinds, rows, x, archs, gpus):
                found += survey.data(each, listing=dump)
                if not as_json:
                    for name in archs:
                        typer.echo("\n".join(text.block(each.title, each.reports[name])))
                        typer.echo("\n".join([*(each.reports[name].listing if dump else ()), ""]))
                    _table(text.HEADS, [text.row(each.reports[g.arch], p) for g, p in zip(gpus, each.predictions, strict=True)])
        except survey.REFUSALS as error:
            _fail(f"error: {error}")
    typer.echo(json.dumps({"schema": 1, "kernels": found}) if as_json else text.LEGEND)


def _param(text: str) -> tuple[str, Any]:
    """A parameter that a user wrote as key=value: true or false, an integer, a number, or else a word."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        _fail(f"error: --param is key=value, not '{text}'", 2)
    for read in (int, float):
        with suppress(ValueError):
            return key, read(value)
    return key, {"true": True, "false": False}.get(value.lower(), value)


@app.command()
def inspect(file: Annotated[str, typer.Argument(help="A GGUF file, the first of a split one, a .safetensors file, or a folder "
                                                     "of them; or a URL or repository, of which headers are read.",
                                                show_default=False)],
            shared_memory: Annotated[int | None, typer.Option("--shared-memory", min=0, help="Bytes that a GPU gives a kernel; "
                                     "exit code 1 where DF11's need more.")] = None,
            as_json: Json = False) -> None:
    """List what lies in a checkpoint: tensors or layers, types, bits per weight, sums, metadata, and what is wrong."""
    from qdsl.checkpoint.contents import contents, lines
    from qdsl.checkpoint.groups import SHARED_MEMORY
    from qdsl.checkpoint.references import local_headers
    from qdsl.checkpoint.survey import fits

    with _reported(), local_headers(file) as path:
        found = {**contents(path, SHARED_MEMORY if shared_memory is None else shared_memory), "file": file}
    typer.echo(json.dumps({"schema": 1, **found}) if as_json else "\n".join(lines(found)))
    if shared_memory is not None and not all(fits(group) for model in found.get("models", [found])
                                             for group in model.get("groups", ())):
        raise typer.Exit(1)


@app.command()
def dequantize(file: Annotated[Path, _source("A GGUF file, or the first of a split one.")],
               out: Annotated[Path, typer.Option("--out", "-o", help="The .safetensors file to write.", show_default=False)],
               dtype: Annotated[str, typer.Option("--dtype", help="f32, which is exact, bf16 or f16.")] = "f32",
               as_json: Json = False) -> None:
    """Write the weights of a GGUF file as plain floats in a safetensors file, one tensor after the other."""
    from qdsl.checkpoint.dequantize import DTYPES, dequantize_file

    if dtype not in DTYPES:
        _fail(f"error: no '{dtype}': expected one of {', '.join(DTYPES)}", 2)
    with _reported():
        written = dequantize_file(file, out, dtype)
    if as_json:
        typer.echo(json.dumps({"schema": 1, **written}))
    else:
        typer.echo(f"written  {out}: {written['tensors']} tensors, {written['nbytes']} bytes")


@app.command()
def quantize(file: Annotated[Path, _source("A GGUF file, or the first of a split one; a .safetensors file, or a folder.")],
             mix: Annotated[str | None, typer.Option("--type", "-t", help="Write a GGUF file: a mix of llama-quantize's, such as "
                                                     "Q4_K_M, or COPY.", show_default=False)] = None,
             format: Annotated[str | None, typer.Option("--format", "-f", help="Write a folder of safetensors: a format, such as "
                                                        "fp8_block, or FORMAT.STORAGE.", show_default=False)] = None,
             out: Annotated[Path | None, typer.Option("--out", "-o", help="The GGUF file or the folder to write.")] = None,
             storage: Annotated[str | None, typer.Option("--storage", help="Of the format; its first by default.")] = None,
             param: Annotated[list[str] | None, typer.Option("--param", help="Of the format, or an option of its quantizer, as "
                                                                             "key=value.")] = None,
             ignore: Annotated[list[str] | None, typer.Option("--ignore", help="A regular expression for layers that stay plain: "
                                                              "whole names, or parts between dots.")] = None,
             component: Annotated[list[str] | None, typer.Option("--component", help="A model of several, such as transformer, "
                                  "that is quantized; by default all but autoencoders.")] = None,
             shard: Annotated[str | None, typer.Option("--shard", metavar="I/N", help="Of a folder write the I-th of N parts "
                                                       "alone, from 1; `merge-index` completes it when all are there.")] = None,
             imatrix: Annotated[Path | None, typer.Option("--imatrix", help="How much columns matter, as llama-imatrix "
                                                                            "writes it.")] = None,
             pure: Annotated[bool, typer.Option("--pure", help="One type for all matrices.")] = False,
             tensor_type: Annotated[list[str] | None, typer.Option("--tensor-type", help="PATTERN=TYPE for tensors whose names "
                                    "the regular expression is found in; the first that fits counts.")] = None,
             output_type: Annotated[str | None, typer.Option("--output-tensor-type", help="A type for output.weight.")] = None,
             embedding_type: Annotated[str | None, typer.Option("--token-embedding-type",
                                                                help="A type for the token embedding.")] = None,
             leave_output: Annotated[bool, typer.Option("--leave-output-tensor", help="Keep output.weight as it is.")] = False,
             requantize: Annotated[bool, typer.Option("--allow-requantize", help="Take weights that are quantized already, for "
                                                                                 "a worse model.")] = False,
             arch: Annotated[str | None, typer.Option("--arch", help="A diffusion model's architecture, such as flux.")] = None,
             jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes; by default one for each "
                                                                                  "processor.")] = None,
             dry_run: Annotated[bool, typer.Option("--dry-run", help="Show types and sizes; write nothing.")] = False,
             svg: Annotated[Path | None, typer.Option("--svg", help="Draw what quantizing cost into this file.")] = None,
             as_json: Json = False) -> None:
    """Write a model in smaller types, as a GGUF file or as a folder, and say what that cost in quality.

    --type takes llama-quantize's mixes.  --format takes qdsl's formats; re-run the same command to resume.
    """
    if (mix is None) == (format is None):
        _fail("error: give --type to write a GGUF file, or --format to write a folder of safetensors", 2)
    of_type = {"--imatrix": imatrix, "--pure": pure, "--tensor-type": tensor_type, "--output-tensor-type": output_type,
               "--token-embedding-type": embedding_type, "--leave-output-tensor": leave_output,
               "--allow-requantize": requantize, "--arch": arch, "--dry-run": dry_run}
    of_format = {"--storage": storage, "--param": param, "--ignore": ignore, "--component": component, "--shard": shard}
    if wrong := [name for name, value in (of_format if format is None else of_type).items() if value]:
        _fail(f"error: {wrong[0]} is for {'--format' if format is None else '--type'}", 2)
    if format is not None:
        to = f"{format}.{storage}" if storage else format
        _quantize_folder(file, to, out, param, ignore, component, jobs, shard, svg, as_json)
        return
    from qdsl.files import check_output, write_text
    from qdsl.quantize import mixes, plan, quality
    from qdsl.quantize.imatrix import read
    from qdsl.quantize.source import open_source

    if out is None and not dry_run:
        _fail("error: say with --out what to write, or give --dry-run", 2)
    if svg is not None and dry_run:
        _fail("error: --svg draws what quantizing cost, which a --dry-run does not know", 2)
    with _reported():
        inputs = [file, *([imatrix] if imatrix else [])]
        if out is not None:
            check_output(out, *inputs)
        if svg is not None:
            check_output(svg, *inputs, *([out] if out else []))
        options = mixes.Options(mixes.mix_of(mix or ""), imatrix is not None, pure, leave_output,
                                output=output_type and mixes.type_named(output_type),
                                embedding=embedding_type and mixes.type_named(embedding_type),
                                overrides=tuple(map(mixes.override_of, tensor_type or ())))
        source = _language_folder(file, arch) or open_source(file, arch)
        importance = read(imatrix) if imatrix else None
        planned = plan.plan(source, options, importance, requantize)
        costs = {}
        if out is not None and not dry_run:
            from qdsl.progress import progress
            from qdsl.quantize import run

            with progress(planned.weights, " weights") as tell, _ended_by_exit():
                costs = run.quantize_file(source, planned, options, out, importance, jobs=jobs or run.default_jobs(planned),
                                          tell=tell)
        report = plan.data(planned, file, costs)
        if svg is not None:
            write_text(svg, quality.svg(f"{file.name} as {options.mix.name}: signal to noise", report["tensors"]))
    if as_json:
        typer.echo(json.dumps({"schema": 1, "out": None if dry_run else str(out), **report}))
        return
    for heads, *rows in plan.tables(report):
        _table(heads, rows)
    for note in report["notes"]:
        typer.echo(f"note: {note}")
    bits = report["bits_per_weight"]
    typer.echo(f"{'would write' if dry_run else 'written'}  {out or ''}  {report['nbytes']} bytes of weights"
               + ("" if bits is None else f", {bits:.3f} bits per weight"))


def _language_folder(path: Path, architecture: str | None) -> Any:
    """A folder of a language model, to be written as a GGUF file; None for what is none."""
    if architecture is not None or '"model_type"' not in _config_text(path):
        return None
    try:
        from qdsl.models.gguf_folder import LanguageFolder

        return LanguageFolder(path)
    except ImportError as error:
        _fail(f"error: {path}: writing a language model as a GGUF file needs the packages transformers and gguf ({error})")


def _quantize_folder(path: Path, to: str, out: Path | None, param: list[str] | None, ignore: list[str] | None,
                     component: list[str] | None, jobs: int | None, shard: str | None, svg: Path | None, as_json: bool) -> None:
    """Write a folder of plain safetensors with its Linear layers in a format."""
    import re
    from functools import partial

    from qdsl.convert import run
    from qdsl.convert.aim import aimed
    from qdsl.files import check_output, write_text
    from qdsl.processes import processors
    from qdsl.progress import progress
    from qdsl.quantize import quality

    if out is None:
        _fail("error: say with --out which folder to write", 2)
    for pattern in ignore or ():
        try:
            re.compile(pattern)
        except re.error as error:
            _fail(f"error: --ignore '{pattern}' is no regular expression: {error}", 2)
    part = None if shard is None else _part(shard)
    with _reported(), _ended_by_exit():
        if svg is not None:
            check_output(svg, path)
        aim = aimed(to, True, dict(map(_param, param or [])), tuple(ignore or ()), tuple(component or ()))
        report = run.quantize(path, aim, out, jobs=jobs or processors(), part=part, tell=partial(progress, unit="B"))
        if svg is not None:
            rows = [{**row, "type": to} for row in report["quantized"]]
            write_text(svg, quality.svg(f"{path.name} as {to}: signal to noise", rows))
    _converted(report, as_json, "" if part is None else f"part {shard} of ")


@contextmanager
def _ended_by_exit() -> Iterator[None]:
    """A process that is told to end tidies up as one that is interrupted does."""
    import signal

    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command()
def convert(folder: Annotated[Path, _source("A folder of safetensors files, or one file.")],
            out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.", show_default=False)],
            to: Annotated[str | None, typer.Option("--to", help="A storage of the layers' format, such as awq; as FORMAT.STORAGE "
                                                                "for the layers of one format alone.")] = None,
            requantize: Annotated[str | None, typer.Option("--requantize", help="A format, or FORMAT.STORAGE, that all quantized "
                                                           "layers are to have: numbers change, and it says how much.")] = None,
            param: Annotated[list[str] | None, typer.Option("--param", help="Of that format, or an option of its quantizer, as "
                                                                            "key=value.")] = None,
            jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes; by default one for each "
                                                                                 "processor.")] = None,
            shard: Annotated[str | None, typer.Option("--shard", metavar="I/N", help="Write the I-th of N parts alone, from 1; "
                                                      "`merge-index` completes the folder when all are there.")] = None,
            as_json: Json = False) -> None:
    """Write a checkpoint with every quantized layer in another storage of its format, exactly, and all else as it was.

    What is broken off is taken up again by the same command.
    """
    from functools import partial

    from qdsl.checkpoint.folder import Folder
    from qdsl.checkpoint.layers import layers
    from qdsl.convert import run
    from qdsl.convert.aim import aimed
    from qdsl.processes import processors
    from qdsl.progress import progress

    part = None if shard is None else _part(shard)
    if (to is None) == (requantize is None) or (param and to):
        _fail("error: give --to, or --requantize and perhaps --param", 2)
    with _reported(), _ended_by_exit(), Folder(folder) as source:
        aim = aimed(to or requantize or "", requantize is not None, dict(map(_param, param or [])))
        found = run.convert(source, layers(source), aim, out, jobs=jobs or processors(), part=part,
                            tell=partial(progress, unit="B"))
    _converted(found, as_json, "" if part is None else f"part {shard} of ")


def _part(text: str) -> tuple[int, int]:
    """Which of how many parts, from 1."""
    place, _, count = text.partition("/")
    if not (place.isdecimal() and count.isdecimal() and 1 <= int(place) <= int(count)):
        _fail(f"error: --shard is I/N with I from 1 to N, not '{text}'", 2)
    return int(place), int(count)


@app.command("merge-index")
def merge_index(out: Annotated[Path, typer.Argument(help="The folder that all parts were written to.", show_default=False)],
                as_json: Json = False) -> None:
    """Complete a folder whose parts were written with --shard: the index, the config, and all files beside them."""
    from functools import partial

    from qdsl.progress import progress
    from qdsl.rewrite import stage

    with _reported(), _ended_by_exit():
        command = stage.asked(out).get("command")
        if command == "compress":
            from qdsl.compress import run as compressing

            _compressed(compressing.merge(out, shapes=_model_shapes, jobs=None, tell=partial(progress, unit="B")), as_json)
        elif command == "decompress":
            from qdsl.compress import restore

            _restored(restore.merge(out, shapes=_model_shapes), as_json)
        else:
            from qdsl.convert import run

            _converted(run.merge(out), as_json)


def _converted(found: dict[str, Any], as_json: bool, part: str = "") -> None:
    if as_json:
        typer.echo(json.dumps({"schema": 1, **found}))
        return
    for note in found["notes"][:SHOWN]:
        typer.echo(f"note: {note}")
    if "quantized" in found:
        from qdsl.convert import report

        _table(report.HEADS, report.table(found))
        typer.echo("\n".join(report.plain_lines(found)))
    for each in found["layers"]:
        typer.echo(f"{each['count']} layers from {each['from']} to {each['to']}")
    if found["requantized"]:
        ratios = {name: _ratio(cost["snr_db"]) for name, cost in found["requantized"].items()}
        worst = min(ratios, key=ratios.__getitem__)
        typer.echo(f"{'quantized' if 'quantized' in found else 'requantized'}: signal to noise {_ratio(found['snr_db']):.2f} dB, "
                   f"the least of {worst!r}, {ratios[worst]:.2f} dB")
    for model, names in found.get("readers", {}).items():
        typer.echo(f"read by{f' ({model})' if model else ''}: {names}")
    typer.echo(f"written  {part}{found['out']}: {len(found['shards'])} files of tensors, {found['nbytes']} bytes")


def _ratio(decibels: float | None) -> float:
    """Infinite where nothing was lost, for which JSON has no number."""
    return math.inf if decibels is None else decibels


Like = Annotated[str | None, typer.Option("--like", metavar="REF", help="A checkpoint with the same tensors, whose headers state "
                 "shapes where neither the folder nor the model's class does.")]


def _model_shapes(folder: Any) -> Any:
    """The shapes of the parameters of a folder's model, as the class of its library has them."""
    from qdsl.rewrite import RewriteError

    try:
        from qdsl.models.shapes import model_shapes
    except ImportError as error:
        raise RewriteError(f"no class of the model is installed, {error}") from None
    return model_shapes(folder)


@app.command()
def compress(folder: Annotated[Path, _source("A folder of safetensors files, one of several such models, as in diffusers, or one "
                                               "file.")],
             format: Annotated[str, typer.Option("--format", "-f", help="hlane, the smallest; fix4, the fastest to decode; df11, "
                                                                        "the dfloat11 package's.", show_default=False)],
             out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.", show_default=False)],
             jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes; by default as many as there "
                                                                                  "are processors and memory for.")] = None,
             shard: Annotated[str | None, typer.Option("--shard", metavar="I/N", help="Encode the I-th of N parts alone, from 1; "
                                                       "`merge-index` completes the folder when all are there.")] = None,
             check: Annotated[bool, typer.Option("--check", help="Decode what was written, and compare it, before it takes its "
                                                                 "place.")] = False,
             component: Annotated[list[str] | None, typer.Option("--component", help="A model of several, such as transformer, "
                                  "that is compressed; by default all but autoencoders.")] = None,
             patterns: Annotated[str | None, typer.Option("--patterns", help="df11: the package's pattern_dict as JSON, a file, "
                                 "or a config.json with it; by default numbered blocks are held together.")] = None,
             threads: Annotated[int | None, typer.Option("--threads-per-block", help="df11: a power of two; by default 512, 256 "
                                                         "for GPUs with little shared memory.")] = None,
             by_group: Annotated[bool, typer.Option("--file-per-group", help="df11: a file for each group.")] = False,
             plain_config: Annotated[bool, typer.Option("--plain-config", help="df11: the dfloat11 package's config.json, to be "
                                     "loaded with that package.")] = False,
             like: Like = None, as_json: Json = False) -> None:
    """Write a checkpoint with its bfloat16 matrices in fewer bits, without loss, and all else as it was.

    Compressed checkpoints, such as DF11, change their format.  Run the same command again to resume.
    """
    from functools import partial

    from qdsl.compress import patterns as reading
    from qdsl.compress import run
    from qdsl.compress.units import FORMATS, Aim
    from qdsl.entropy.huffman_windows import THREADS
    from qdsl.progress import progress

    part = None if shard is None else _part(shard)
    if format not in FORMATS:
        _fail(f"error: no '{format}': expected one of {', '.join(FORMATS)}", 2)
    if format != "df11" and (patterns is not None or threads is not None or by_group or plain_config):
        _fail("error: --patterns, --threads-per-block, --file-per-group and --plain-config are of df11", 2)
    if threads is not None and threads not in [1 << power for power in range(3, 11)]:
        _fail(f"error: --threads-per-block is a power of two from 8 to 1024, not {threads}", 2)
    if part is not None and check:
        _fail("error: --check reads whole files, which --shard does not write: give it to the call that completes them", 2)
    with _reported(), _ended_by_exit():
        aim = Aim(format, threads or THREADS, None if patterns is None else reading.read(patterns), by_group,
                  tuple(component or ()), plain_config)
        found = run.compress(folder, aim, out, like=like, shapes=_model_shapes, jobs=jobs, part=part, check=check,
                             tell=partial(progress, unit="B"))
    _compressed(found, as_json, "" if part is None else f"part {shard} of ")


def _compressed(found: dict[str, Any], as_json: bool, part: str = "") -> None:
    if as_json:
        typer.echo(json.dumps({"schema": 1, **found}))
        return
    for each in found["raw"][:SHOWN]:
        typer.echo(f"as it was: {each['name']!r}: {each['why']}")
    if len(found["raw"]) > SHOWN:
        typer.echo(f"as they were: {len(found['raw']) - SHOWN} more")
    for note in found["notes"][:SHOWN]:
        typer.echo(f"note: {note}")
    if found["matrices"]:
        ratio = f", {100 * found['nbytes_after'] / found['nbytes_before']:.2f} %, {found['bits_per_weight']:.3f} bits per weight"
        typer.echo(f"{found['matrices']} matrices as {found['units']} of {found['format']}: {found['nbytes_before']} bytes are "
                   f"{found['nbytes_after']}{ratio}{', decoded and the same' if found.get('checked') else ''}")
    typer.echo(f"written  {part}{found['out']}" + (f": {len(found['shards'])} files of tensors, {found['nbytes']} bytes"
                                                   if found["shards"] else ""))


@app.command()
def decompress(folder: Annotated[Path, _source("What `compress`, or for DF11 the dfloat11 package, wrote.")],
               out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.", show_default=False)],
               like: Like = None,
               jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes; by default as many as there "
                                                                                    "are processors and memory for.")] = None,
               shard: Annotated[str | None, typer.Option("--shard", metavar="I/N", help="Write the I-th of N parts alone, from "
                                                         "1; `merge-index` completes the folder when all are there.")] = None,
               as_json: Json = False) -> None:
    """Write the checkpoint that a compressed one was made of, byte for byte.

    What is broken off is taken up again by the same command.
    """
    from functools import partial

    from qdsl.compress import restore
    from qdsl.progress import progress

    part = None if shard is None else _part(shard)
    with _reported(), _ended_by_exit():
        found = restore.decompress(folder, out, like=like, shapes=_model_shapes, jobs=jobs, part=part,
                                   tell=partial(progress, unit="B"))
    _restored(found, as_json, "" if part is None else f"part {shard} of ")


def _restored(found: dict[str, Any], as_json: bool, part: str = "") -> None:
    if as_json:
        typer.echo(json.dumps({"schema": 1, **found}))
        return
    for note in found["notes"][:SHOWN]:
        typer.echo(f"note: {note}")
    typer.echo(f"written  {part}{found['out']}: {len(found['shards'])} files of tensors, {found['nbytes']} bytes")


@app.command()
def verify(a: Annotated[Path, _source("A folder of safetensors files, one file, or a GGUF file.")],
           b: Annotated[Path, _source("Another.")],
           jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes; by default one for each "
                                                                                "processor.")] = None,
           decoded: Annotated[bool, typer.Option("--decoded", help="Compare the weights that quantized layers stand for, "
                                                                   "whatever their formats and storages.")] = False,
           tolerance: Annotated[float, typer.Option("--tolerance", min=0, help="How far decoded weights may lie apart, as a part "
                                                    "of their tensor's largest magnitude.")] = 0.0,
           as_json: Json = False) -> None:
    """Compare two checkpoints bit for bit, and say where they differ: exit code 1 if they do, 2 if one cannot be read.

    A GGUF file is compared with the model that it was made of: errors must be those of its types.
    """
    from qdsl.checkpoint import verify as verifying
    from qdsl.processes import processors
    from qdsl.progress import progress

    if tolerance and not decoded:
        _fail("error: --tolerance is one between decoded weights: give --decoded", 2)
    if ".gguf" in (a.suffix, b.suffix):
        if decoded:
            _fail("error: --decoded compares folders; a GGUF file is decoded anyway", 2)
        _differ(_gguf_differences(*((a, b) if a.suffix == ".gguf" else (b, a))), "equal within the errors of types", as_json)
        return
    with _reported(2):
        total = verifying.size(a)
        jobs = jobs or min(processors(), 1 + total // verifying.WORTH)
        with progress(total, "B") as tell:
            if decoded:
                from qdsl.checkpoint.verify_decoded import decoded_differences

                found = verifying.of_models(
                    a, b, lambda x, y, told: decoded_differences(x, y, tolerance, jobs=jobs, tell=told), tell)
            else:
                found = verifying.of_models(a, b, lambda x, y, told: verifying.differences(x, y, jobs=jobs, tell=told), tell)
    _differ(found, f"equal within {tolerance:g} of the largest magnitudes" if tolerance else "equal", as_json)


def _gguf_differences(file: Path, other: Path) -> list[Any]:
    """Where a GGUF file is not the model that it was made of: another GGUF file, or a folder."""
    from qdsl.progress import progress
    from qdsl.quantize.compare import differences
    from qdsl.quantize.source import Gguf, Weights, open_source

    with _reported(2):
        made: Weights
        source: Weights
        if other.is_dir() and '"_class_name"' in _config_text(other):
            made, source = _diffusers_pair(file, other)
        else:
            made, source = Gguf(file), _language_folder(other, None) or open_source(other)
        with progress(sum(math.prod(tensor.shape) for tensor in made.tensors.values()), " weights") as tell:
            return differences(made, source, tell)


def _config_text(folder: Path) -> str:
    """The text of config.json, '' where there is none."""
    config = folder / "config.json"
    return config.read_text(errors="replace") if config.is_file() else ""


def _diffusers_pair(file: Path, folder: Path) -> Any:
    """A GGUF file and a folder of diffusers, by the same names."""
    try:
        from qdsl.models.diffusers.compare import decoded_pair
        from qdsl.models.plan import LoadError
    except ImportError as error:
        _fail(f"error: {folder}: comparing it with a GGUF file needs the package diffusers ({error})", 2)
    try:
        return decoded_pair(file, folder)
    except LoadError as error:
        _fail(f"error: {error}", 2)


def _differ(found: list[Any], equal: str, as_json: bool) -> None:
    """Print differences.  Raises typer.Exit where there are any."""
    from qdsl.checkpoint.contents import escaped

    if as_json:
        typer.echo(json.dumps({"schema": 1, "equal": not found, "differences": [each.data() for each in found]}))
    else:
        lines = [f"{escaped(each.tensor)}: {each}" for each in found[:SHOWN]]
        lines += [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        typer.echo("\n".join([*lines, f"{len(found)} tensors differ" if found else equal]))
    if found:
        raise typer.Exit(1)


@app.command()
def demo(weights: Annotated[Path | None, typer.Option("--weights", help="A safetensors file of float weights; without it, "
                                                                         "those that ship with the repository.")] = None,
         out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the FP8 checkpoint.")] = Path("build/demo"),
         as_json: Json = False) -> None:
    """Quantize real weights into every format, write and read an FP8 checkpoint, and ask a language model in three formats."""
    from qdsl import demo as demonstration

    def say(line: str) -> None:
        if not as_json:
            typer.echo(line)

    with _reported():
        try:
            result = demonstration.run(weights, out, say)
        except ValueError as error:
            _fail(f"error: {error}")
    if not as_json:
        _table(demonstration.HEADS, [demonstration.shown(row) for row in result["formats"]])
        typer.echo(demonstration.LEGEND + "\n")
    answers = demonstration.answers(say) if weights is None else []
    if as_json:
        typer.echo(json.dumps({"schema": 1, **result, "answers": answers}))
    elif answers:
        _table(demonstration.ANSWER_HEADS, [demonstration.answer_cells(row) for row in answers])


def _table(heads: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


# Their commands are those of this app.
from qdsl.cli import capacity as _capacity  # noqa: E402, F401
from qdsl.cli import models as _models  # noqa: E402, F401
from qdsl.cli import serve as _serve  # noqa: E402, F401
