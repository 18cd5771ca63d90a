"""Commands that check, build and show formats."""

from __future__ import annotations

import gc
import math
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdsl.cli.app import app, fail, json_text, os_message, print_table, reported
from qdsl.cli.options import Force, Json, Spec
from qdsl.core.text import counted, name_key

if TYPE_CHECKING:
    from qdsl.compiler.emit.module.build import BuiltFile

A_PROCESS = 8                                                    # specs that are worth a process of their own
Names = Annotated[list[str], typer.Argument(help="Spec files, or names of formats that ship with qdsl.", show_default=False)]


@app.command()
def check(specs: Names, as_json: Json = False) -> None:
    """Check specs, and print all problems with their lines and columns."""
    reports = []
    for name in specs:
        report, lines = _checked(name)
        reports.append(report)
        for line in lines if not as_json else ():
            typer.echo(line, err=not report["ok"])
    problems = sum(len(report.get("problems", ())) for report in reports)
    if as_json:
        typer.echo(json_text({"specs": reports}))
    elif problems:
        typer.echo(f"\n{counted(problems, 'problem')}", err=True)
    if problems or not all(report["ok"] for report in reports):
        raise typer.Exit(2 if any("error" in report for report in reports) else 1)


def _checked(name: str) -> tuple[dict[str, Any], list[str]]:
    """A spec checked: the report, and the same as lines.  `error` is why it could not be read, `problems` what is wrong in it."""
    from qdsl.checkpoint.detect.targets import spec_of
    from qdsl.compiler.passes import compile_spec
    from qdsl.compiler.passes.derive_planar import why_no_planar
    from qdsl.compiler.spec.schema import load
    from qdsl.compiler.spec.source import SpecError
    from qdsl.core import places

    try:
        path = spec_of(name)
        programs = compile_spec(load(path, name if Path(name).is_file() else str(path)))
    except SpecError as error:
        problems = [{"line": p.span.line, "column": p.span.column, "message": p.message, "notes": list(p.notes)}
                    for p in error.problems]
        return {"spec": name, "ok": False, "problems": problems}, [str(error)]
    except (places.UnknownSpec, OSError) as error:
        message = os_message(error) if isinstance(error, OSError) else str(error)
        return {"spec": name, "ok": False, "error": message}, [f"error: {message}"]
    storages = list(dict.fromkeys(program.storage for program in programs))
    reason = why_no_planar(programs)
    report = {"spec": name, "ok": True, "format": programs[0].spec.name.value, "storages": storages}
    return ({**report, "no_planar": reason} if reason else report,
            [f"{name}: ok, {', '.join(storages)}", *([f"  no planar storage: {reason}"] if reason else [])])


@app.command()
def test(spec: Spec,
         golden: Annotated[Path | None, typer.Option("--golden", help="A .npz or .safetensors file of stored tensors, and the "
                                                                      "weights as 'expected'.")] = None,
         as_json: Json = False) -> None:
    """Test a format: every bit, round trips, quantization, kernels in Triton's interpreter, and known values."""
    import qdsl
    from qdsl.analyze.check.check_kernels import check_kernels
    from qdsl.analyze.check.formats import GoldenError, check_format, check_golden
    from qdsl.checkpoint.detect.targets import spec_of
    from qdsl.compiler.spec.schema import load

    checks = []
    with reported():
        path = spec_of(spec)
        parsed, format = load(path, spec if Path(spec).is_file() else str(path)), qdsl.load(spec).FORMAT
        try:
            first = [check_golden(parsed, format, golden)] if golden else []
        except GoldenError as error:
            fail(f"{error}", 2)
        for outcome in chain(first, check_format(parsed, format), check_kernels(spec if Path(spec).is_file() else path.stem)):
            checks.append(outcome)
            if not as_json:
                params = "".join(f" {name}={value}" for name, value in outcome.params.items())
                where = f"{format.name}.{outcome.storage}" if outcome.storage else format.name
                typer.echo(f"{outcome.status:<8} {where}{params}  {outcome.name}: {outcome.text}")
    failed, skipped = (sum(outcome.status == status for outcome in checks) for status in ("FAILED", "skipped"))
    if as_json:
        typer.echo(json_text({"format": format.name, "ok": not failed, "checks": list(map(asdict, checks))}))
    else:
        typer.echo(f"{counted(len(checks), 'check')}: {failed} failed, {skipped} skipped")
    if failed:
        raise typer.Exit(1)


@app.command()
def build(specs: Annotated[list[str] | None, typer.Argument(help="Spec files, or names of formats that ship with qdsl.")] = None,
          every: Annotated[bool, typer.Option("--all", help="Build every spec that ships with qdsl.")] = False,
          out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FOLDER",
                                                      help="Folder of modules; by default generated/.")] = None,
          verify: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a module is not up to date.")] = False,
          as_json: Json = False) -> None:
    """Build Python modules from specs, and list the written files."""
    from qdsl.checkpoint.detect.targets import spec_of
    from qdsl.core import places
    from qdsl.host.processes import call, shared_results
    from qdsl.host.system import processors

    if bool(specs) == every:
        fail("name the specs to build, or give --all", 2)
    rows: list[dict[str, str]] = []
    with reported():
        paths = places.shipped() if every else [spec_of(name) for name in specs or []]
        tasks = [(path, out or (places.generated() if path.parent.resolve() == places.specs() else Path("generated")), not verify)
                 for path in paths]
        jobs = min(processors(), math.ceil(len(paths) / A_PROCESS))
        built = shared_results(partial(call, "qdsl.compiler.emit.module.build", "build"), tasks, jobs,
                               lambda task: task[0].stat().st_size, gc.disable)    # of processes that end soon
        for path, files in zip(paths, built, strict=True):
            rows += _rows(path, files)
        if every:
            rows += _producer_rows(out or places.generated(), verify)
    changed = [row for row in rows if row["change"] != "same"]
    if as_json:
        typer.echo(json_text({"files": rows}))
    else:
        for row in changed if verify else rows:
            typer.echo(f"{'stale' if verify else row['change']:<8} {row['path']}")
    if verify and changed and as_json:
        raise typer.Exit(1)
    if verify and changed:
        again = ["--all"] if every else [*(specs or []), *(["--out", str(out)] if out else [])]
        fail(f"generated modules are not what their specs say: run `qdsl build {shlex.join(again)}`")


def _producer_rows(folder: Path, verify: bool) -> list[dict[str, str]]:
    """The rows of building all producers.  Fails for an invalid file, and for names of formats or tensors that do not exist."""
    from qdsl.checkpoint.detect.descriptions import descriptions
    from qdsl.compiler.emit.module import build as builder
    from qdsl.core import places
    from qdsl.core.producer import ProducerError

    source = places.specs() / builder.PRODUCERS
    try:
        rows = _rows(source, builder.write_files(builder.producer_files(source), folder, not verify))
        descriptions()
    except ProducerError as error:
        fail(f"{error}")
    return rows


def _rows(source: Path, files: Iterable[BuiltFile]) -> list[dict[str, str]]:
    return [{"spec": str(source), "path": _short(file.path), "change": file.change} for file in files]


def _short(path: Path) -> str:
    """A path relative to the working directory, where it lies in it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the formats that ship with qdsl, and those of the folder that QDSL_SPECS names."""
    import qdsl.generated
    from qdsl.core import places
    from qdsl.core.program import program_files, read_program, summary

    with reported():
        built = program_files(qdsl.generated.__path__)
        try:
            rows = [summary(read_program(built[path.stem])) for path in (*places.shipped(), *places.user_specs())]
        except (OSError, KeyError, ValueError):
            fail("a spec was not built yet: run `qdsl build --all`")
    if as_json:
        typer.echo(json_text({"formats": rows}))
        return
    print_table(["format", "bits per weight", "what it is", "storages"],
                [[row["name"], row["bits"], row["title"], ", ".join(row["storages"])] for row in rows])


@app.command()
def show(spec: Spec,
         svg: Annotated[Path | None, typer.Option("--svg", help="Write the bit picture to this file; - prints it.")] = None,
         program: Annotated[bool, typer.Option("--program", help="Print the typed programs.")] = False,
         force: Force = False, as_json: Json = False) -> None:
    """Show a format: its formula, its layouts, and the position of every bit."""
    from qdsl.checkpoint.detect.targets import format_target, spec_of
    from qdsl.compiler.emit.show import page, picture
    from qdsl.compiler.ir.text import text
    from qdsl.compiler.passes import compile_spec
    from qdsl.compiler.spec.schema import load
    from qdsl.host.files import check_output, write_text

    with reported():
        programs = compile_spec(load(path := spec_of(spec)))
        if str(svg) == "-":
            typer.echo(picture.svg_picture(page.distinct_layouts(programs)))
        elif svg is not None:
            check_output(svg, path, force=force)
            write_text(svg, picture.svg_picture(page.distinct_layouts(programs)))
            typer.echo(f"written  {svg}")
        elif as_json:
            typer.echo(json_text(page.spec_json(programs)))
        else:
            if path.stem != name_key(spec) and not Path(spec).is_file():
                typer.echo(f"{spec} is {format_target(spec)}")
            typer.echo("\n".join(text(p) for p in programs) if program else "\n".join(page.terminal_lines(programs)))
