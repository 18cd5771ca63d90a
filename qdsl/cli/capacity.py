"""The command that plans a GPU's memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from qdsl.cli.app import app, json_text, print_table, reported
from qdsl.cli.options import Json, read_size


@app.command()
def plan(model: Annotated[str, typer.Argument(show_default=False,
                                              help="A pipeline, a folder or a repository, of which headers are read.")],
         vram: Annotated[str, typer.Option("--vram", help="Memory for weights, such as 20GB or 20GiB.", show_default=False)],
         resident: Annotated[list[str] | None, typer.Option("--resident", help="A model that stays on the GPU while others take "
                                                            "turns; may be repeated.")] = None,
         as_json: Json = False) -> None:
    """Print what the models of a checkpoint need in several formats, and which formats fit a GPU.

    Exit code 1 where none fit.
    """
    from qdsl.checkpoint.files.references import local_headers
    from qdsl.jobs.convert.capacity import CHOICES, formats_that_fit

    limit = read_size(vram)
    with reported(), local_headers(model) as path:
        planned = formats_that_fit(path, limit, resident or (), model)
    if as_json:
        typer.echo(json_text({"model": model, **asdict(planned)}))
    else:
        unit, letter, size = ("GB", "B", 1e9) if limit >= 1e9 else ("MB", "M", 1e6)
        print_table(["model", "weights", *CHOICES],
                    [[part.name or model, f"{part.weights / size:.3f} {letter}",
                      *(f"{need.resident / size:.2f} + {need.scratch / size:.2f}" if (need := part.needs.get(format)) else "-"
                        for format in CHOICES)] for part in planned.models])
        typer.echo(f"{unit} of weights + {unit} of scratch; sizes in hlane, fix4 and fix3 are predicted")
        ways = (("all in memory", planned.together), ("one at a time", planned.in_turn))
        for way, chosen in ways[:len(planned.models)]:             # of one model both are the same
            formats = "nothing fits" if chosen is None else f"{chosen.peak / size:.2f} {unit} with " + ", ".join(
                f"{name or model} {format}" for name, format in chosen.formats.items())
            typer.echo(f"{way}: {formats}")
        for line in planned.commands:
            typer.echo(line)
    if planned.together is None and planned.in_turn is None:
        raise typer.Exit(1)
