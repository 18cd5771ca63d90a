"""Commands that read checkpoints: their contents, their weights, and their differences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qdsl.cli.app import SHOWN, app, fail, input_argument, json_text, needs, reported, width
from qdsl.cli.model_class import layer_shapes
from qdsl.cli.options import Jobs, Json, read_size
from qdsl.cli.progress import progress
from qdsl.core.text import counted
from qdsl.host.progress import CHECK, COMPARE

SUSPICIOUS = ("warnings", "unknown", "acts", "not_understood")


@app.command()
def inspect(file: Annotated[str, typer.Argument(help="A GGUF file, the first of a split one, a .safetensors file, or a folder "
                                                     "of them; or a URL or repository, of which headers are read.",
                                                show_default=False)],
            shared_memory: Annotated[str | None, typer.Option("--shared-memory", help="What a GPU gives a kernel, such as 48KiB; "
                                     "exit code 1 where DF11's need more.")] = None,
            check: Annotated[bool, typer.Option("--check", help="Read the scales, too, and list those that are NaN or "
                                                "infinite.")] = False,
            strict: Annotated[bool, typer.Option("--strict", help="Exit code 3 for notes, warnings, and what models are not run "
                                                 "with, too.")] = False,
            as_json: Json = False) -> None:
    """List the contents of a checkpoint: tensors or layers, types, bits per weight, sums, metadata, and problems.

    Exit code 1 where tensors cannot be read, or where no quantized layer is recognised; 3 where settings contradict tensors in
    what numbers depend on.
    """
    from qdsl.checkpoint.detect.groups import SHARED_MEMORY
    from qdsl.checkpoint.files.references import local_headers
    from qdsl.checkpoint.report.contents import contents, lines
    from qdsl.checkpoint.report.survey import fits

    if check and "://" in file:
        fail("--check reads weights, and of a URL only headers are read: download it first", 2)
    limit = SHARED_MEMORY if shared_memory is None else read_size(shared_memory)
    with reported(), local_headers(file) as path:
        report = {**contents(path, limit, layer_shapes, check), "file": file}
    typer.echo(json_text(report) if as_json else "\n".join(lines(report, width())))
    models = report.get("models", [report])
    if any(model["problems"] for model in models):
        raise typer.Exit(1)
    for model in models:
        if (unread := model.get("layers")) and not any(layer["format"] for layer in unread) and not model["groups"]:
            if as_json:                                          # the report says why
                raise typer.Exit(1)
            of_all = [entry["what"] for entry in model["contradictions"] if "layer" not in entry]
            why, *_ = [*of_all, unread[0]["why"]]
            fail(f"{model['file']}: none of its {len(unread)} quantized layers is recognised: {why}")
    if shared_memory is not None and not all(fits(group) for model in models for group in model.get("groups", ())):
        raise typer.Exit(1)
    is_suspect = any(model["notes"] or any(model.get(kind) for kind in SUSPICIOUS) for model in models)
    if any(model.get("contradictions") for model in models) or (strict and is_suspect):
        raise typer.Exit(3)


@app.command()
def verify(a: Annotated[Path, input_argument("A folder of safetensors files, one file, or a GGUF file.")],
           b: Annotated[Path | None, input_argument("What it is compared with; without it, its own checksums.")] = None,
           jobs: Jobs = None,
           decoded: Annotated[bool, typer.Option("--decoded", help="Compare the weights that quantized layers stand for, "
                                                                   "whatever their formats and storages.")] = False,
           tolerance: Annotated[float, typer.Option("--tolerance", min=0, help="How far decoded weights may lie apart, as a part "
                                                    "of their tensor's largest magnitude.")] = 0.0,
           as_json: Json = False) -> None:
    """Compare two checkpoints bit for bit, and print the differences: exit code 1 if there are any, or if one cannot be read.

    A GGUF file is compared with the model that it was quantized from: errors must be those of its types.  A single checkpoint
    is compared with the checksums that qdsl wrote with it.
    """
    from qdsl.checkpoint.files.gguf import is_gguf
    from qdsl.checkpoint.report import verify as verifying
    from qdsl.host.processes import affordable, needed

    if b is None:
        if decoded or tolerance:
            fail("--decoded and --tolerance compare two checkpoints", 2)
        _verify_checksums(a, as_json)
        return
    if tolerance and not decoded:
        fail("--tolerance is one between decoded weights: give --decoded", 2)
    if is_gguf(a) or is_gguf(b):
        if decoded:
            fail("--decoded compares folders; a GGUF file is decoded anyway", 2)
        differences = _gguf_differences(*((a, b) if is_gguf(a) else (b, a)))
        _print_differences(differences, "equal within the errors of types", as_json)
        return
    with reported():
        total = verifying.size(a)
        jobs = jobs or min(affordable(needed(verifying.PIECE)), 1 + total // verifying.WORTH)
        with progress({COMPARE: total}) as tell:
            if decoded:
                from qdsl.checkpoint.report.verify_decoded import decoded_differences

                differences = verifying.model_differences(
                    a, b, lambda x, y, report: decoded_differences(x, y, tolerance, jobs=jobs, tell=report), tell)
            else:
                differences = verifying.model_differences(
                    a, b, lambda x, y, report: verifying.differences(x, y, jobs=jobs, tell=report), tell)
    hint = "" if decoded or all(difference.kind != "shape" for difference in differences) else (
        "; --decoded compares the weights that layers stand for, whatever their layouts")
    equal = f"equal within {tolerance:g} of the largest magnitudes" if tolerance else "equal"
    _print_differences(differences, equal, as_json, hint)


def _verify_checksums(path: Path, as_json: bool) -> None:
    """Print the damaged tensors of a checkpoint.  Raises typer.Exit where there are any."""
    from qdsl.checkpoint.files import checksums

    with reported(), progress({CHECK: checksums.size(path)}) as tell:
        problems = checksums.checksum_problems(path, tell)
    last = counted(len(problems), "problem") if problems else "all tensors fit their checksums"
    _print_result({"problems": problems}, problems, last, as_json)


def _gguf_differences(file: Path, other: Path) -> list[Any]:
    """Differences between a GGUF file and the model that it was quantized from: another GGUF file, or a folder."""
    from qdsl.jobs.gguf.compare import differences
    from qdsl.jobs.gguf.source import Gguf, Weights, open_source

    with reported():
        quantized: Weights
        source: Weights
        if other.is_dir() and '"_class_name"' in _config_text(other):
            quantized, source = _diffusers_pair(file, other)
        else:
            quantized, source = Gguf(file), language_folder(other, None) or open_source(other)
        with progress({COMPARE: sum(tensor.nbytes for tensor in quantized.tensors.values())}) as tell:
            return differences(quantized, source, tell)


def language_folder(path: Path, architecture: str | None, allow_unknown: bool = False) -> Any:
    """A folder of a language model as the source of a GGUF file; None for other folders.  allow_unknown: of its settings."""
    if architecture is not None or '"model_type"' not in _config_text(path):
        return None
    needs(f"{path}: writing a language model as a GGUF file", "models", "transformers", "gguf")
    try:
        from qdsl.models.gguf_folder import LanguageFolder

        return LanguageFolder(path, allow_unknown)
    except ImportError as error:
        fail(f"{path}: writing a language model as a GGUF file: {error}", 2)


def _config_text(folder: Path) -> str:
    """The text of config.json, '' where there is none."""
    from qdsl.checkpoint.files.folder import CONFIG_LIMIT
    from qdsl.host.files import open_input

    config = folder / "config.json"
    if not config.is_file():
        return ""
    with reported(), open_input(config) as file:
        return file.read(CONFIG_LIMIT).decode(errors="replace")


def _diffusers_pair(file: Path, folder: Path) -> Any:
    """A GGUF file and a folder of diffusers, with the same tensor names."""
    needs(f"{folder}: comparing it with a GGUF file", "diffusers", "diffusers")
    try:
        from qdsl.models.diffusers.compare import decoded_pair
        from qdsl.models.plan import LoadError
    except ImportError as error:
        fail(f"{folder}: comparing it with a GGUF file: {error}", 2)
    try:
        return decoded_pair(file, folder)
    except LoadError as error:
        fail(f"{error}")


def _print_differences(differences: list[Any], equal: str, as_json: bool, hint: str = "") -> None:
    """Print differences, and a hint behind their number.  Raises typer.Exit where there are any."""
    from qdsl.checkpoint.report.contents import escaped

    _print_result({"differences": [difference.data() for difference in differences]},
                  [f"{escaped(difference.tensor)}: {difference}" for difference in differences],
                  f"differences: {len(differences)}{hint}" if differences else equal, as_json)


def _print_result(report: dict[str, Any], lines: list[str], last: str, as_json: bool) -> None:
    """Print what a comparison says, and its lines.  Raises typer.Exit where there are any."""
    if as_json:
        typer.echo(json_text({"equal": not lines, **report}))
    else:
        more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        typer.echo("\n".join([*lines[:SHOWN], *more, last]))
    if lines:
        raise typer.Exit(1)
