"""The command that shows what qdsl does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qdsl.cli.app import app, fail, json_text, print_table, reported
from qdsl.cli.options import Json


@app.command()
def demo(weights: Annotated[Path | None, typer.Option("--weights", help="A safetensors file of float weights; without it, "
                                                                         "those that ship with the repository.")] = None,
         out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER",
                                              help="Folder for the FP8 checkpoint.")] = Path("build/demo"),
         as_json: Json = False) -> None:
    """Quantize real weights into every format, write and read an FP8 checkpoint, and ask a language model in three formats."""
    from qdsl.jobs import demo as demonstration

    def say(line: str) -> None:
        if not as_json:
            typer.echo(line)

    with reported():
        try:
            result = demonstration.run(weights, out, say)
        except ValueError as error:
            fail(f"{error}")
    if not as_json:
        print_table(demonstration.HEADS, [demonstration.format_row(row) for row in result["formats"]])
        typer.echo(demonstration.LEGEND + "\n")
    answers = demonstration.ask_models(say) if weights is None else []
    if as_json:
        typer.echo(json_text({**result, "answers": answers}))
    elif answers:
        print_table(demonstration.ANSWER_HEADS, [demonstration.answer_cells(row) for row in answers])
