"""Commands that start a format: a spec from tensors or a packing function, and a spec with a golden file and its tests."""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdsl.cli.app import app, fail, json_text, reported
from qdsl.cli.options import Force, Json
from qdsl.core.places import check_regular
from qdsl.core.text import join_names

if TYPE_CHECKING:
    from qdsl.infer.run import Inferred

File = Annotated[Path | None, typer.Argument(metavar="FILE", show_default=False,
                                               help="A .safetensors or .npz file with the stored tensors.")]
Packed = Annotated[str | None, typer.Option("--packed", metavar="NAME", help="The tensor that holds the codes.")]
ValuesName = Annotated[str, typer.Option("--values", metavar="NAME", help="The decoded weights, float32 [N, K].")]
ValuesFile = Annotated[Path | None, typer.Option("--values-in", metavar="FILE", help="Their file, where it is another one.")]
Scales = Annotated[list[str] | None, typer.Option("--scales", metavar="NAME", help="A tensor of scales; may be repeated.")]
Zeros = Annotated[list[str] | None, typer.Option("--zeros", metavar="NAME", help="A tensor of zero points; may be repeated.")]


@app.command()
def infer(file: File = None, packed: Packed = None, values: ValuesName = "expected", values_file: ValuesFile = None,
          scales: Scales = None, zeros: Zeros = None,
          function: Annotated[str | None, typer.Option("--function", metavar="MODULE:NAME", help="Instead of a file: a "
                                                       "function that packs codes, int32 [N, K].")] = None,
          shape: Annotated[str | None, typer.Option("--shape", metavar="N,K", help="Of the codes of a function.")] = None,
          bits: Annotated[int, typer.Option("--bits", min=1, max=8, help="Of the codes of a function.")] = 4,
          name: Annotated[str, typer.Option("--name", help="What the format is called.")] = "inferred",
          out: Annotated[Path | None, typer.Option("--out", "-o", help="The spec to write; by default it is printed.")] = None,
          force: Force = False, as_json: Json = False) -> None:
    """Find the layout of a packed weight, and print a spec that decodes it.

    The spec is built and compared with the values.  Exit code 1 where it does not decode all of them exactly.
    """
    from qdsl.host.files import check_output, write_text

    if (file is None) == (function is None):
        fail("give a file with --packed and --values, or --function with --shape", 2)
    with reported():
        if out is not None:
            check_output(out, *([file] if file else []), force=force)
        inferred = _of_function(str(function), shape, bits, name) if file is None else \
            _infer_from_tensors(file, packed, values, values_file, [*(scales or ()), *(zeros or ())], name)[0]
        if out is not None:
            write_text(out, inferred.text)
    if as_json:
        typer.echo(json_text({"ok": inferred.is_exact, "spec": inferred.text, "exact": inferred.exact,
                              "values": inferred.values, "problems": list(inferred.problems)}))
    else:
        typer.echo(inferred.text if out is None else f"written  {out}", nl=out is not None)
        typer.echo(_summary(inferred, "bytes that the function packs" if file is None else "values"), err=True)
    if not inferred.is_exact:
        raise typer.Exit(1)


@app.command()
def new(name: Annotated[str | None, typer.Argument(help="The format: the files are NAME.yaml and NAME.safetensors.  Without it "
                                                   "the command asks for all that follows.", show_default=False)] = None,
        file: Annotated[Path | None, typer.Option("--from-infer", metavar="FILE", help="Find the layout of the tensors of this "
                                                  "file, as `qdsl infer` does.")] = None,
        packed: Packed = None, values: ValuesName = "expected", values_file: ValuesFile = None, scales: Scales = None,
        zeros: Zeros = None,
        bits: Annotated[int, typer.Option("--bits", min=2, max=8, help="Of a code, without --from-infer.")] = 4,
        group: Annotated[int, typer.Option("--group", min=1, help="Columns that share a scale, without --from-infer.")] = 32,
        force: Force = False, as_json: Json = False) -> None:
    """Start a format: write a spec, with --from-infer a golden file of its tensors and values, and run `qdsl test` on them."""
    if name is None:
        name, file, asked = _asked(file)
        packed, values, scales = asked.get("packed", packed), asked.get("values", values), [*asked.get("scales", scales or ())]
        bits, group = asked.get("bits", bits), asked.get("group", group)
    from qdsl.checkpoint.files import safetensors
    from qdsl.cli.formats import test
    from qdsl.host.files import check_output, write_text
    from qdsl.infer.start import starting_spec

    _check_name(name)
    spec, golden = Path(f"{name}.yaml"), Path(f"{name}.safetensors")
    with reported():
        check_output(spec, *([file] if file else []), force=force)
        text = starting_spec(name, bits, group)
        tensors: dict[str, Any] = {}
        if file is not None:
            check_output(golden, file, *([values_file] if values_file else []), force=force)
            inferred, tensors = _infer_from_tensors(file, packed, values, values_file, [*(scales or ()), *(zeros or ())], name)
            text = inferred.text
            if not inferred.is_exact:
                typer.echo(_summary(inferred, "values"), err=True)
            safetensors.write(golden, tensors)
        write_text(spec, text)
    if not as_json:
        for path in (spec, golden)[:2 if tensors else 1]:
            typer.echo(f"written  {path}")
    test(str(spec), golden if tensors else None, as_json)


def _check_name(name: str) -> None:
    """Exit with code 2 for a name that no format may have, or that one has which ships with qdsl."""
    from qdsl.core import places

    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        fail(f"'{name}' is no name of a format: expected small letters, digits and _", 2)
    if name in [path.stem for path in places.shipped()]:
        fail(f"'{name}' is a format that ships with qdsl, and QDSL_SPECS would refuse another one: choose another name", 2)


def _asked(file: Path | None) -> tuple[str, Path | None, dict[str, Any]]:
    """(name, file, options) of a new format, as a user answers.  Raises Exit for a file that cannot be read."""
    name = typer.prompt("Name of the format")
    _check_name(name)
    if file is None:
        answer = typer.prompt("File with its stored tensors and decoded weights (.safetensors, .npz; empty for none)", default="",
                              show_default=False)
        file = Path(answer) if answer else None
    if file is None:
        bits, group = typer.prompt("Bits of a code, 2 to 8", default=4), typer.prompt("Columns that share a scale", default=32)
        if not 2 <= bits <= 8 or group < 1:
            fail(f"codes of {bits} bits in groups of {group}: expected 2 to 8 bits, and a column or more", 2)
        return name, None, {"bits": bits, "group": group}
    tensors = _read(file, None)
    for key, tensor in tensors.items():
        typer.echo(f"  {key}: {str(tensor.dtype)[6:]} {list(tensor.shape)}")
    by_size = sorted(tensors, key=lambda key: -tensors[key].nbytes)
    codes = next((key for key in by_size if not tensors[key].is_floating_point()), None)
    packed = typer.prompt("Tensor of the codes", default=codes)
    weights = next((key for key in by_size if str(tensors[key].dtype) == "torch.float32" and tensors[key].dim() == 2), None)
    values = typer.prompt("Decoded weights, float32 [N, K]", default=weights)
    others = [key for key in tensors if key not in (packed, values)]
    scales = typer.prompt("Tensors of scales and zero points, with commas", default=",".join(others), show_default=bool(others))
    return name, file, {"packed": packed, "values": values, "scales": [key.strip() for key in scales.split(",") if key.strip()]}


def _infer_from_tensors(file: Path, packed: str | None, values: str, values_file: Path | None, others: list[str],
                name: str) -> tuple[Inferred, dict[str, Any]]:
    """A spec from the tensors of a file; and the tensors that it takes, with the values as 'expected'."""
    for path in filter(None, (file, values_file)):               # before torch is imported
        if check_regular(path).suffix != ".safetensors" and not zipfile.is_zipfile(path):
            fail(f"{path}: neither a .safetensors nor a .npz file")
    from qdsl.analyze.check.formats import EXPECTED
    from qdsl.infer.run import InferError, infer
    from qdsl.infer.text import stored_name

    if packed is None:
        fail(f"name the tensor that holds the codes with --packed; {file} has {join_names([*map(repr, _read(file, None))])}", 2)
    tensors = _read(file, {packed, *others, *({values} if values_file is None else ())})
    weights = tensors.pop(values) if values_file is None else _read(values_file, {values})[values]
    try:
        inferred = infer(packed, tensors, weights, name)
    except InferError as error:
        fail(f"{error}")
    return inferred, {**{stored_name(key): tensors[key] for key in inferred.names}, EXPECTED: weights}


def _read(path: Path, names: Collection[str] | None) -> dict[str, Any]:
    """The tensors of these names in a .npz or .safetensors file, or all of them."""
    from qdsl.analyze.check.formats import GoldenError, read_golden

    try:
        tensors, _ = read_golden(path, names)
    except GoldenError as error:
        fail(f"{error}")
    return tensors


def _of_function(function: str, shape: str | None, bits: int, name: str) -> Inferred:
    """A spec from a packing function, which is imported from the working directory or from installed packages."""
    from qdsl.infer.function import infer_function
    from qdsl.infer.run import InferError

    parts = (shape or "").split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        fail(f"--shape {shape or ''}: expected N,K", 2)
    try:
        return infer_function(_imported(function), (int(parts[0]), int(parts[1])), bits, name)
    except InferError as error:
        fail(f"{error}")


def _imported(function: str) -> Callable[[Any], Any]:
    module, _, attribute = function.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        packing = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        fail(f"--function {function}: {error}", 2)
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(packing):
        fail(f"--function {function}: not a function", 2)
    return packing                                               # type: ignore[no-any-return]


def _summary(inferred: Inferred, what: str) -> str:
    """How much of the values a spec decodes, and what does not fit."""
    head = f"exact: all {inferred.values} {what}" if inferred.is_exact else \
        f"the closest: {inferred.exact} of {inferred.values} {what} are exact"
    return "\n".join([head, *(f"  {problem}" for problem in inferred.problems)])
