"""The `qdsl` command line: its groups, options and helpers that commands share.  Nothing heavy is imported before a command
needs it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import ENOENT
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, NoReturn
from unicodedata import category

import typer

from qdsl.cli.words import DTYPE_NAMES, Commands, Group
from qdsl.core.text import counted, name_key
from qdsl.host import unfinished


class Failure(Exception):
    """Ends a command with a message and an exit code: 1 for a wrong input, 2 for a wrong command line."""

    def __init__(self, message: str, exit_code: int, head: str) -> None:
        super().__init__(message)
        self.exit_code, self.head = exit_code, head

    def format_message(self) -> str:
        """The message, as typer prints it."""
        return str(self)


class _Commands(Group):
    """The command group; with --json, any failure is printed as one JSON object on standard output."""

    def main(self, args: Sequence[str] | None = None, *arguments: Any, **options: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in words
        try:
            code = super().main(words, *arguments, **{**options, **({"standalone_mode": False} if as_json else {})})
        except Exception as error:
            if not hasattr(error, "exit_code"):                  # as typer's errors have
                raise
            message, code = error.format_message(), error.exit_code     # type: ignore[attr-defined]
            if as_json:
                typer.echo(json_text({"error": message, "exit_code": code}))
            else:
                typer.echo(getattr(error, "head", "") + message, err=True)
        sys.exit(code or 0)


app = Commands(name="qdsl", cls=_Commands, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False,
               context_settings={"help_option_names": ["-h", "--help"]},
               help="Read, convert, quantize and run models with quantized weights, and compile formats of your own from a spec.")

LONGEST = 4000                                                   # characters of a line of a message: some quote a file
SHOWN = 50                                                       # the most differences or notes that are printed


def main() -> None:
    """Run the command line; where standard output cannot be written, print a message and end with exit code 1."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:                           # the caller has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        with unfinished.command():
            try:
                app()
            except SystemExit as ended:
                if ended.code:
                    raise
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
def _options(version: Annotated[bool, typer.Option("--version", "-V", callback=_version, is_eager=True,
                                                   help="Print the version.")] = False) -> None:
    """Options before a command.  Specs of QDSL_SPECS that are wrong end it here: nearly every command imports them."""
    from qdsl.core.places import FOLDER_VARIABLE, UnknownSpec

    if os.environ.get(FOLDER_VARIABLE):
        from qdsl.compiler.spec.source import SpecError

        try:
            import_module("qdsl.generated")
        except (UnknownSpec, OSError) as error:
            raise Failure(f"{error}", 2, f"error: {FOLDER_VARIABLE}: ") from None
        except SpecError as error:
            raise Failure(f"{error}", 1, "") from None


def fail(message: str, code: int = 1, head: str = "error: ") -> NoReturn:
    """End the command with a message, control characters escaped and long lines cut.

    code: 1 for a wrong input, 2 for a wrong command line.
    """
    from qdsl.checkpoint.report.contents import escaped

    raise Failure("\n".join("\t".join(map(escaped, _shortened(line).split("\t"))) for line in message.split("\n")), code, head)


def _shortened(line: str) -> str:
    """A line without its middle where it is longer than LONGEST."""
    return line if len(line) <= LONGEST else f"{line[:LONGEST // 2]} ... {line[-LONGEST // 2:]}"


def without_controls(text: str) -> str:
    """Text that a model wrote, for a terminal: control characters but tabs and line feeds are escaped."""
    return "".join(repr(c)[1:-1] if category(c) == "Cc" and c not in "\t\n" else c for c in text)


def one_of(word: str, choices: Iterable[str]) -> str:
    """The choice that a word names in any letters, or in the other name of a dtype.  Exits with code 2 for other words."""
    names = {DTYPE_NAMES.get(choice, choice): choice for choice in choices}
    key = name_key(word)
    if (name := DTYPE_NAMES.get(key, key)) not in names:
        fail(f"no '{word}': expected one of {', '.join(names.values())}", 2)
    return names[name]


@contextmanager
def reported(code: int = 1) -> Iterator[None]:
    """Turn errors of specs and files into failures of the command.  code: 2 where only the command line is read."""
    from qdsl.checkpoint.files.safetensors import CheckpointError
    from qdsl.compiler.spec.source import SpecError
    from qdsl.core.places import UnknownSpec
    from qdsl.core.producer import ProducerError
    from qdsl.host.files import OutputError
    from qdsl.jobs.engine import RewriteError
    from qdsl.jobs.gguf import QuantizeError

    try:
        yield
    except (UnknownSpec, OutputError, ProducerError) as error:
        fail(f"{error}", 2)
    except SpecError as error:
        fail(f"{error}\n\n{counted(len(error.problems), 'problem')}", head="")
    except BrokenPipeError:                                      # of standard output, as when `head` ends
        raise
    except OSError as error:
        fail(os_message(error), code)
    except (CheckpointError, QuantizeError, RewriteError) as error:
        fail(f"{error}", code)


def os_message(error: OSError) -> str:
    """The message of an error of files, without its number, and with similar names: 'model.gguf: No such file or directory'."""
    from qdsl.checkpoint.files.references import path_hint

    if error.filename is None or error.strerror is None:
        return f"{error}"
    near = path_hint(Path(os.fsdecode(error.filename))) if error.errno == ENOENT else ""
    return f"{error.filename}: {error.strerror}{near}"


def needs(what: str, extras: str, *packages: str) -> None:
    """Exit with code 2 where packages are not installed, before anything that takes long to import.  extras: that have them."""
    from qdsl.core.places import install_command

    if missing := [name for name in packages if find_spec(name) is None]:
        fail(f"{what} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
             f"{install_command(extras)}", 2)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit at SIGTERM as at an interrupt, so that temporary files are removed."""
    import signal

    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _local(ref: str) -> Path:
    """The local path of a file, a folder, a URL or a repository."""
    from qdsl.checkpoint.files.references import local_path

    with reported():
        return local_path(ref)


def input_argument(help: str) -> Any:
    """An argument for a file or folder that is read, which may be remote."""
    return typer.Argument(parser=_local, help=help, show_default=False)


def json_text(report: Mapping[str, Any]) -> str:
    return json.dumps({"schema": 1, **report})


def print_report(report: dict[str, Any], as_json: bool) -> bool:
    """Print a report as JSON, or else its notes.  Returns whether the whole report is printed."""
    if as_json:
        typer.echo(json_text(report))
        return True
    for note in report["notes"][:SHOWN]:
        typer.echo(f"note: {without_controls(note)}")
    return False


def width() -> int | None:
    """The columns of a line: those of the terminal, or of COLUMNS, which is for pipes, too; None for a pipe without it."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    """Print a table, as wide as the terminal; a pipe gets whole cells."""
    from qdsl.core.table import table_lines

    typer.echo("\n".join(table_lines(heads, rows, "", width())))
