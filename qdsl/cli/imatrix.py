"""The command that measures how much columns matter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qdsl.cli.app import app, input_argument, needs, reported
from qdsl.cli.models import Device, check_length, check_models, running
from qdsl.cli.options import Force
from qdsl.cli.progress import progress


@app.command()
def imatrix(model: Annotated[Path, input_argument("A folder of a language model, or a GGUF file.")],
            text: Annotated[Path, typer.Argument(metavar="TEXT", help="A file of text to run it on.", show_default=False)],
            out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.", show_default=False)],
            samples: Annotated[int, typer.Option("--samples", min=1, help="Most runs of tokens.")] = 1000,
            length: Annotated[int, typer.Option("--length", min=4, help="Tokens of a run.")] = 512,
            device: Device = None, force: Force = False) -> None:
    """Write an importance matrix for `quantize --imatrix`, as llama-imatrix does in its GGUF form."""
    needs("running a language model", "models", "transformers")
    check_models(str(model))
    from qdsl.host.files import check_output, read_utf8
    from qdsl.jobs.calibrate import Sampling, write_imatrix

    with running(), reported():
        check_output(out, model, text, force=force)
        check_length(read_utf8(text), length, "--length")
        left_out = write_imatrix(model, Sampling(text, "", samples, length), out, progress, device)
    for name in left_out:
        typer.echo(f"note: layer {name} has no tensor of its own in GGUF files")
    typer.echo(f"written  {out}")
