"""Words that help and usage have for values, in place of Python's types, and the values that a shell completes for a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

# Words by the name of a parameter, of any command; others have their name.
WORDS = {**dict.fromkeys(("file", "folder", "model", "models", "a", "like", "base", "against", "transformer", "text_encoder"),
                         "MODEL"), "b": "OTHER", "spec": "SPEC", "specs": "SPEC",
         **dict.fromkeys(("out", "svg", "golden", "weights", "imatrix", "text", "values_file"), "FILE"),
         "to": "STORAGE", "requantize": "FORMAT[.STORAGE]", "mix": "MIX", "output_type": "TYPE", "embedding_type": "TYPE",
         "tensor_type": "PATTERN=TYPE", "param": "KEY=VALUE", "skip": "PATTERN", "component": "NAME", "resident": "NAME",
         "kernel": "linear|dequantize", "x": "bf16|f16", "shape": "N K", "shard": "I/N", "programs": "FIRST:END",
         "patterns": "JSON", "vram": "SIZE", "shared_memory": "SIZE", "size": "WxH",
         **dict.fromkeys(("jobs", "rows", "ranks", "bits", "group", "threads", "steps", "context", "max_new_tokens", "samples",
                          "length", "seed"), "N")}
# Options that other programs have for what is a parameter of a format here.
PARAMETERS = {**dict.fromkeys(("--bits", "--wbits", "--w-bit", "--q-bits"), "bits=4"),
              **dict.fromkeys(("--group", "--group-size", "--groupsize", "--q-group-size"), "group=64"),
              **dict.fromkeys(("--sym", "--symmetric"), "symmetric=true")}
# Headings of the help, and the commands below each, in the order in which a newcomer meets them.
COMMANDS = {
    "Models": ("example", "generate", "serve", "evaluate", "plan", "serve-check"),
    "Checkpoints": ("inspect", "quantize", "imatrix", "convert", "merge-index", "dequantize", "compress", "decompress", "verify"),
    "Formats": ("list", "show", "new", "infer", "check", "test", "build", "explain", "analyze", "demo")}
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DTYPE_NAMES = {"f32": "float32", "fp32": "float32", "bf16": "bfloat16", "f16": "float16", "fp16": "float16", "f64": "float64"}


@dataclass(frozen=True)
class Completion:
    """A value that a shell offers."""

    value: str
    type: str = "plain"
    help: str | None = None


def _formats() -> Iterable[str]:
    from qdsl.core import places

    return [path.stem for path in (*places.shipped(), *places.user_specs())]


def _storages() -> Iterable[str]:
    from qdsl.checkpoint.detect.targets import storages

    return storages()


def _formats_and_storages() -> Iterable[str]:
    from qdsl.checkpoint.detect.targets import storages

    return [*_formats(), *(f"{format}.{storage}" for storage, of in storages().items() for format in of)]


def _producers() -> Iterable[str]:
    from qdsl.checkpoint.detect.producers import producers

    return [producer.name for producer in producers().every]


def _mixes() -> Iterable[str]:
    from qdsl.jobs.gguf.mixes import MIXES

    return MIXES


def _types() -> Iterable[str]:
    from qdsl.jobs.gguf.mixes import types

    return types()


# The values of a word; of FILE, FOLDER and MODEL the shell offers files by itself, of SPEC both.
VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "FORMAT": _formats, "SPEC": _formats, "STORAGE": _storages, "FORMAT[.STORAGE]": _formats_and_storages, "PRODUCER": _producers,
    "MIX": _mixes, "TYPE": _types, "DTYPE": lambda: DTYPES}


def completions(word: str, begun: str) -> list[Completion]:
    """The values of a word that begin so, in any case; a|b|c has the values a, b and c, and PATTERN=TYPE those of TYPE behind =.
    """
    head, equals, value_begun = begun.rpartition("=")
    kind = word.removeprefix("PATTERN=")
    if kind != word and not equals:
        return []
    values = kind.split("|") if "|" in kind and kind.islower() else VALUES[kind]() if kind in VALUES else ()
    return [Completion(head + equals + value) for value in values if value.lower().startswith(value_begun.lower())]


def _worded(parameter: Any) -> Any:
    """The parameter, with a word for its values in help, '' for a flag, and with their completion."""
    name = str(parameter.name)
    if parameter.metavar is None:
        parameter.metavar = "" if getattr(parameter, "is_flag", False) else WORDS.get(name, name.rpartition("_")[2].upper())
    parameter.display_type = lambda *_, **__: ""
    parameter.shell_complete = partial(_complete, parameter)
    return parameter


def _complete(parameter: Any, context: Any, begun: str) -> list[Completion]:
    return completions(parameter.metavar, begun)


class Command(TyperCommand):
    """A command whose help has words in place of Python's types."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What is left of the words of a command line.  Words that stand alone are told to follow an option."""
        is_param = "--param" in args                             # which the parser takes out
        try:
            return super().parse_args(ctx, args)
        except Exception as error:                               # a usage error, whichever click made it
            message = getattr(error, "message", None)
            own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
            if "--param" in own and (parameter := PARAMETERS.get(getattr(error, "option_name", ""))):
                error.message = f"{message}: it is a parameter of formats here, as --param {parameter}"  # type: ignore[attr-defined]
                error.possibilities = None                       # type: ignore[attr-defined]
            if isinstance(message, str) and "unexpected extra argument" in message:
                named = [option for option in ("--format", "--to", "--text", "--out") if option in own]
                if is_param:
                    named.insert(0, "--param KEY=VALUE")
                error.message = message + (                      # type: ignore[attr-defined]
                    f": write the option in front of each, as {' or '.join(named)}" if named else "")
            raise

    def get_params(self, ctx: Any) -> Any:
        """The parameters, with that of --help."""
        return list(map(_worded, super().get_params(ctx)))

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """What begins so, with a line of help each: a shell takes a second line for a value."""
        offered = super().shell_complete(ctx, incomplete)
        for one in offered:
            one.help = shorten(one.help or "", 60, placeholder="...")
        return offered


class Group(TyperGroup):
    """The commands of the command line."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands, in the order of the help."""
        return [name for names in COMMANDS.values() for name in names]

    def get_params(self, ctx: Any) -> Any:
        """The parameters, with that of --help."""
        return list(map(_worded, super().get_params(ctx)))


class Commands(typer.Typer):
    """The command line, each command of which is a Command."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """A decorator that registers a command, below its heading in the help."""
        register = super().command

        def named(function: CommandFunctionType) -> CommandFunctionType:
            own = name or function.__name__
            heading = next(heading for heading, names in COMMANDS.items() if own in names)
            return register(own, cls=Command, rich_help_panel=heading, **settings)(function)

        return named
