"""Commands that serve a model, and that check a checkpoint before it is served on several GPUs."""

from __future__ import annotations

import socket
from dataclasses import asdict, replace
from typing import Annotated

import typer

from qdsl.cli.app import app, fail, json_text, needs, print_table, reported
from qdsl.cli.generate import Base, Exact, Threads
from qdsl.cli.models import Device, DType, Model, check_models, check_options, running
from qdsl.cli.options import Json

SERVER = ("pydantic", "fastapi", "uvicorn", "openai")            # packages of transformers' server


@app.command(name="serve-check")
def serve_check(model: Annotated[str, typer.Argument(help="A folder or a repository, of which headers are read.",
                                                     show_default=False)],
                ranks: Annotated[int, typer.Option("--tp", min=1, help="Ranks of tensor parallelism.")] = 1,
                ep: Annotated[bool, typer.Option("--ep", help="Ranks hold whole experts (expert parallelism).")] = False,
                as_json: Json = False) -> None:
    """Print which layers of a checkpoint can be divided among ranks, and how.

    Exit code 1 where a layer cannot.
    """
    from qdsl.checkpoint.files.folder import Folder
    from qdsl.checkpoint.files.references import local_headers
    from qdsl.checkpoint.report.serving import check_layers
    from qdsl.checkpoint.report.survey import grouped

    with reported(), local_headers(model) as path, Folder(path) as folder:
        rows = check_layers(folder, ranks, ep)
        if not rows:
            fail(f"{model} has no packed layers")
    if as_json:
        typer.echo(json_text({"model": model, "ranks": ranks, "layers": [asdict(row) for row in rows]}))
    else:
        alike = [(name, [one["row"] for one in group]) for name, group in grouped(
            [{"name": row.layer, "row": row} for row in rows], lambda one: replace(one["row"], layer="", problem=""))]
        print_table(["layers", "number", "kind", "packed", "rows and columns", "on each rank"],
                    [[name, str(len(group)), group[0].kind, group[0].packed, " x ".join(map(str, group[0].shape)),
                      group[0].how or "cannot be divided"] for name, group in alike])
        for _, group in alike:
            if group[0].problem:
                typer.echo(group[0].problem, err=True)
    wrong = sum(bool(row.problem) for row in rows)
    if wrong and not as_json:
        typer.echo(f"{wrong} of {len(rows)} layers cannot be served on {ranks} ranks", err=True)
    if wrong:
        raise typer.Exit(1)


@app.command()
def serve(model: Model,
          host: Annotated[str, typer.Option("--host", metavar="NAME", help="The address to listen at.")] = "localhost",
          port: Annotated[int, typer.Option("--port", min=1, max=65535, metavar="N", help="Its port.")] = 8000,
          threads: Threads = None, exact: Exact = None, base: Base = None, device: Device = None, dtype: DType = "auto") -> None:
    """Serve a language model, its weights packed, to programs that speak OpenAI's protocol.

    Requests are answered one by one, by the server of transformers.  For many users at a time see vLLM in the documentation.
    """
    needs("serving a model", "serve", "transformers", *SERVER)
    try:                                                         # before the model is loaded
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        fail(f"--host {host} --port {port}: {str(error.strerror).partition(' (')[0]}: give another", 2)
    check_models(model, base=base)
    with running():
        check_options(device)
        from qdsl.models import openai_server
        from qdsl.models.language import load_language_model
        from qdsl.models.processor import arithmetic_text, set_processor

        set_processor(threads, exact)
        loaded = load_language_model(model, device=device, dtype=dtype, base=base)
        typer.echo(f"{arithmetic_text(loaded.model)}\nmodel {openai_server.model_name(model)} at http://{host}:{port}/v1",
                   err=True)
        openai_server.serve(loaded, host, port)
