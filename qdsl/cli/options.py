"""Options and arguments that commands share, and what reads their values."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from qdsl.cli.app import fail, reported


def _known_spec(word: str) -> str:
    """A word that names a spec.  Exits with code 2 for others."""
    from qdsl.checkpoint.detect.targets import spec_of

    with reported():
        spec_of(word)
    return word


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
PARAM_HELP = "Of the format, or an option of its quantizer, as key=value."
PRODUCER_HELP = "Whose settings the config gets, such as fp8 for vLLM's own FP8; by default the first producer of the storage."
ALLOW_HELP = "Go on where settings or tensors change the model and are not computed, or not understood."
SHARD_HELP = "Write only the I-th of N parts, from 1; `merge-index` completes the folder after all of them."
JOBS_HELP = "Processes; by default as many as processors and memory allow."
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help=JOBS_HELP)]
Shard = Annotated[str | None, typer.Option("--shard", help=SHARD_HELP)]
Params = Annotated[list[str] | None, typer.Option("--param", help=PARAM_HELP)]
OutFolder = Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="The folder to write.", show_default=False)]
Producer = Annotated[str | None, typer.Option("--producer", help=PRODUCER_HELP)]
AllowUnknown = Annotated[bool, typer.Option("--allow-unknown", help=ALLOW_HELP)]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that exists already.")]
Spec = Annotated[str, typer.Argument(callback=_known_spec, help="A spec file, or the name of a format that ships with qdsl.")]
Storage = Annotated[str | None, typer.Option("--storage", help="A storage; the format's first by default.")]
Rows = Annotated[int, typer.Option("--rows", min=1, help="Rows of x.")]
Extents = Annotated[tuple[int, int] | None, typer.Option("--shape", min=1, help="N and K of the weight.")]
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
         "TIB": 1 << 40}

# Kinds of devices that torch computes on, and `npu`, which a package adds to it.
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla", "ipu", "maia", "npu", "privateuseone")


def read_device(name: str | None) -> str | None:
    """The name of a device.  Exits with code 2 for one that no machine has; torch, which takes seconds to import, knows the rest.
    """
    kind, _, number = (name or "cpu").partition(":")
    if kind == "meta":
        fail(f"device '{name}' has no numbers: nothing can be computed on it", 2)
    if kind not in DEVICES or not (number.isdecimal() or kind == name or name is None):
        fail(f"device '{name}' cannot be used here: expected {', '.join(DEVICES[:4])}, or one of several as cuda:1", 2)
    return name


def headed(heading: str, *names: str, **settings: Any) -> Any:
    """An option below a heading of the help."""
    return typer.Option(*names, rich_help_panel=heading, **settings)


def refuse_options(context: typer.Context, heading: str, reason: str) -> None:
    """Exit with code 2 for a used option whose help has a heading.  reason: what such options are for."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if getattr(parameter, "rich_help_panel", None) == heading and source is not None and source.name != "DEFAULT":
            fail(f"{parameter.opts[0]} is for {reason}", 2)


def read_param(text: str) -> tuple[str, Any]:
    """Parses key=value of --param; values are true, false, integers, floats, or strings."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        fail(f"--param is key=value, not '{text}'", 2)
    for read in (int, float):
        with suppress(ValueError):
            return key, read(value)
    return key, {"true": True, "false": False}.get(value.lower(), value)


def read_size(text: str) -> int:
    """Parses a size in bytes, such as 20GB, 20 GiB or 49152.  Exits with code 2 for other text, and where a unit seems to be
    missing.
    """
    digits = text.strip().rstrip("BbIiKkMmGgTt ")
    unit = text.strip()[len(digits):].strip().upper()
    if unit not in UNITS or not digits.replace(".", "", 1).isdecimal():
        fail(f"{text!r} is no size; expected one such as 20GB or 20GiB", 2)
    if not unit and float(digits) < UNITS["KIB"]:
        fail(f"{text!r} without a unit is a number of bytes; write {digits}GB or {digits}GiB, or {digits}B", 2)
    return int(float(digits) * UNITS[unit])


def read_part(text: str | None) -> tuple[tuple[int, int] | None, str]:
    """Parses I/N of --shard: the number of the part, from 1, and of all parts; and words for reports.  (None, '') without it."""
    if text is None:
        return None, ""
    place, _, count = text.partition("/")
    if not (place.isdecimal() and count.isdecimal() and 1 <= int(place) <= int(count)):
        fail(f"--shard is I/N with I from 1 to N, not '{text}'", 2)
    return (int(place), int(count)), f"part {text} of "


def read_patterns(patterns: list[str] | None) -> tuple[str, ...]:
    """The regular expressions of --skip.  Exits with code 2 for an invalid one."""
    for pattern in patterns or ():
        try:
            re.compile(pattern)
        except re.error as error:
            fail(f"--skip '{pattern}' is no regular expression: {error}", 2)
    return tuple(patterns or ())
