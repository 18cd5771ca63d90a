"""Commands that run language models and pipelines of diffusers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdsl.cli.app import Force, Json, Params, app, fail, read_param, refuse_options, reported, without_controls

if TYPE_CHECKING:
    from qdsl.models.language import Generation, LanguageModel

Model = Annotated[str, typer.Argument(help="A folder, a repository, or a GGUF file.", show_default=False)]
Device = Annotated[str | None, typer.Option("--device", help="Such as cpu or cuda:1; by default a GPU where there is one.")]
DType = Annotated[str, typer.Option("--dtype", help="Of products, such as float32; by default that of the model.")]
MatchDense = Annotated[bool, typer.Option("--match-dense", help="Compute the same bits as the dequantized model; slow.")]
TEXT, IMAGE = "Language models", "Pipelines of diffusers"        # headings of options that are for one kind of model


@app.command()
def generate(context: typer.Context,
             model: Annotated[str, typer.Argument(help="A folder or a repository of a language model, or of a pipeline of "
                                                       "diffusers; or a GGUF file.", show_default=False)],
             prompt: Annotated[str, typer.Argument(help="What to continue, to answer or to draw.", show_default=False)],
             format: Annotated[str | None, typer.Option("--format", "-f", help="Quantize a plain model in this format.")] = None,
             param: Params = None, seed: Annotated[int, typer.Option("--seed", min=0, max=(1 << 64) - 1,
                                                              help="Of sampling, or of noise.")] = 0,
             max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to write.",
                                                         rich_help_panel=TEXT)] = 128,
             temperature: Annotated[float, typer.Option("--temperature", min=0, help="0: the most probable token.",
                                                        rich_help_panel=TEXT)] = 0.0,
             base: Annotated[str | None, typer.Option("--base", metavar="MODEL", rich_help_panel=TEXT, help="The model that "
                                                      "weights were made of, for what DF11 folders and GGUF files lack.")] = None,
             chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the chat template, where there is one.",
                                                rich_help_panel=TEXT)] = True,
             out: Annotated[Path | None, typer.Option("--out", "-o", help="The .png file to write.",
                                                      rich_help_panel=IMAGE)] = None,
             size: Annotated[str | None, typer.Option("--size", metavar="WxH", help="Of the image; by default the pipeline's.",
                                                      rich_help_panel=IMAGE)] = None,
             steps: Annotated[int | None, typer.Option("--steps", min=1, help="Of denoising; by default the pipeline's.",
                                                       rich_help_panel=IMAGE)] = None,
             guidance: Annotated[float | None, typer.Option("--guidance", help="0 for many distilled models; by default "
                                                            "the pipeline's.", rich_help_panel=IMAGE)] = None,
             transformer: Annotated[str | None, typer.Option("--transformer", metavar="MODEL", help="A file or folder with the "
                                                             "transformer.", rich_help_panel=IMAGE)] = None,
             text_encoder: Annotated[str | None, typer.Option("--text-encoder", metavar="MODEL", help="And with the encoder.",
                                                              rich_help_panel=IMAGE)] = None,
             against: Annotated[str | None, typer.Option("--against", metavar="MODEL", help="A pipeline whose image is "
                                                         "compared.", rich_help_panel=IMAGE)] = None,
             device: Device = None, dtype: DType = "auto", match_dense: MatchDense = False, force: Force = False,
             as_json: Json = False) -> None:
    """Run a model on a prompt, with its weights packed, and print how fast it was and what memory it took.

    Language models write text.  Pipelines draw an image, twice with one seed, and it is printed whether the two are the same.
    """
    from qdsl.checkpoint.files.references import has_file

    with reported():
        is_pipeline = has_file(model, "model_index.json")
    if is_pipeline:
        refuse_options(context, TEXT, f"language models, and {model} is a pipeline of diffusers")
    else:
        refuse_options(context, IMAGE, f"pipelines of diffusers, and {model} has no model_index.json")
    params = dict(map(read_param, param or ()))
    _check_formats([format] if format else ())
    if is_pipeline:
        from qdsl.cli.images import draw

        models = {name: ref for name, ref in (("transformer", transformer), ("text_encoder", text_encoder)) if ref is not None}
        options = {"prompt": prompt, "seed": seed, "steps": steps, "guidance": guidance}
        quantization = {"format": format, "params": params, "match_dense": match_dense}
        place = {"device": device, "dtype": dtype}
        draw(model, models, out, {**options, "size": size}, against, quantization, place, force, as_json)
        return
    with _running():
        from qdsl.models import language

        loaded = language.load_language_model(model, format, device, dtype, params, match_dense, base)
        write = None if as_json else lambda text: typer.echo(without_controls(text), nl=False)
        result = language.generate(loaded, prompt, max_new_tokens, temperature, seed, chat, write)
    _print_generation(loaded, result, as_json)


def _print_generation(loaded: LanguageModel, result: Generation, as_json: bool) -> None:
    """Print the figures of a generated text, or with --json the text too."""
    if as_json:
        typer.echo(json.dumps({"schema": 1, "model": loaded.name, "load_seconds": loaded.seconds, **asdict(result)}))
        return
    typer.echo()
    memory = f"{result.resident / 1e6:.0f} MB resident, {loaded.bits_per_weight:.2f} bits per weight"
    speed = f"in {result.seconds:.1f} s, {result.tokens / result.seconds:.1f} per second"
    typer.echo(f"loaded in {loaded.seconds:.1f} s, {memory}; {result.tokens} tokens after {result.prompt} {speed}", err=True)


@app.command()
def evaluate(models: Annotated[list[str], typer.Argument(help="Folders, repositories or GGUF files.", show_default=False)],
             text: Annotated[Path, typer.Option("--text", help="A file of text to score.", show_default=False)],
             against: Annotated[str | None, typer.Option("--against", help="The model that others are compared with.")] = None,
             format: Annotated[list[str] | None, typer.Option("--format", "-f", help="Also measure the model of --against in a "
                                                              "format, as 'nf4' or 'hqq bits=4 group=64'; may be repeated."),
                               ] = None,
             context: Annotated[int, typer.Option("--context", "-c", min=4, help="Tokens of a chunk.")] = 512,
             svg: Annotated[Path | None, typer.Option("--svg", help="Draw divergence over bits per weight.")] = None,
             device: Device = None, dtype: DType = "auto", match_dense: MatchDense = False, force: Force = False,
             as_json: Json = False) -> None:
    """Measure what quantizing cost: perplexity, and divergence from another model, as llama-perplexity defines them.

    The row of a model is printed as soon as it is known.
    """
    if against is None and (format or svg):
        fail("--format and --svg compare with a model: name it with --against", 2)
    _check_formats([form.split()[0] for form in format or () if form.split()])
    with _running():
        from qdsl.host.files import check_output, open_input, write_text

        if svg is not None:
            check_output(svg, text, force=force)
        with open_input(text) as file:
            content = file.read().decode()
        from qdsl.models import evaluate as measure
        from qdsl.models import language

        load = partial(language.load_language_model, device=device, dtype=dtype, match_dense=match_dense)
        base = None if against is None else measure.Base(load(against))
        chunks = [] if base is None else measure.chunks(base.language.tokenizer, content, context)
        results = []
        width = max(map(len, [*models, *(f"{against} as {form}" for form in format or ())]))
        for name, form in [*((name, None) for name in models), *((str(against), form) for form in format or ())]:
            quantized, *params = form.split() if form else (None,)
            loaded = load(name, quantized, params=dict(map(read_param, params)))
            own = chunks or measure.chunks(loaded.tokenizer, content, context)
            results.append(measure.evaluate(loaded, own, base))
            del loaded
            if not as_json:                                      # models may take hours
                typer.echo(measure.last_row(results, width))
        if svg is not None:
            write_text(svg, measure.svg(f"{text.name}: divergence from {against}", results))
    if as_json:
        typer.echo(json.dumps({"schema": 1, "text": str(text), "context": context, "against": against,
                               "models": [finite(asdict(evaluation)) for evaluation in results]}))


def finite(value: Any) -> Any:
    """A value for JSON, with None in place of infinities."""
    if isinstance(value, dict):
        return {key: finite(element) for key, element in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_formats(names: Iterable[str]) -> None:
    """Exit with code 2 for a name that is no format."""
    from qdsl.core import places

    with reported():
        for name in names:
            places.find(name)


@contextmanager
def _running() -> Iterator[None]:
    """Turn errors of models into messages; exit code 2 where the libraries that run them are not installed."""
    try:
        with reported():
            yield
    except ImportError as error:
        from qdsl.core.places import install_command

        fail(f"{error}; to run models, {install_command('models,diffusers')}", 2)
    except ValueError as error:                                  # LoadError and FormatError, too
        fail(f"{error}")
