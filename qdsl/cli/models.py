"""The command that measures language models, and what commands that run models share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import normalize

import typer

from qdsl.cli.app import app, fail, json_text, needs, one_of, reported, without_controls
from qdsl.cli.options import AllowUnknown, Force, Json, read_device, read_param
from qdsl.cli.progress import progress
from qdsl.cli.words import DTYPES
from qdsl.host.progress import SAMPLES

if TYPE_CHECKING:
    from qdsl.models.language import LanguageModel

ENDS = 8                                                         # the most tokens that a tokenizer adds to a text

Model = Annotated[str, typer.Argument(help="A folder, a repository, or a GGUF file.", show_default=False)]
Device = Annotated[str | None, typer.Option("--device", callback=read_device,
                                            help="Such as cpu or cuda:1; by default a GPU where there is one.")]


def _known_dtype(name: str) -> str:
    """The name of a dtype.  Exits with code 2 for others."""
    return one_of(name, DTYPES)


DType = Annotated[str, typer.Option("--dtype", callback=_known_dtype,
                                    help="Of products, such as float32; by default that of the model.")]
MatchDense = Annotated[bool, typer.Option("--match-dense", help="Compute the same bits as the dequantized model; slow.")]


@app.command()
def evaluate(models: Annotated[list[str], typer.Argument(help="Folders, repositories or GGUF files.", show_default=False)],
             text: Annotated[Path, typer.Option("--text", help="A file of text to score.", show_default=False)],
             against: Annotated[str | None, typer.Option("--against", help="The model that others are compared with.")] = None,
             format: Annotated[list[str] | None, typer.Option("--format", "-f", help="Also measure the model of --against in a "
                                                              "format, as 'nf4' or 'hqq bits=4 group=64'; may be repeated."),
                               ] = None,
             context: Annotated[int, typer.Option("--context", "-c", min=4, help="Tokens of a chunk.")] = 512,
             svg: Annotated[Path | None, typer.Option("--svg", help="Draw divergence over bits per weight.")] = None,
             device: Device = None, dtype: DType = "auto", match_dense: MatchDense = False, allow_unknown: AllowUnknown = False,
             force: Force = False, as_json: Json = False) -> None:
    """Measure what quantizing cost: perplexity, and divergence from another model, as llama-perplexity defines them.

    The row of a model is printed as soon as it is known.
    """
    if against is None and (format or svg):
        fail("--format and --svg compare with a model: name it with --against", 2)
    format = [" ".join([format_name(name), *params]) for name, *params in map(str.split, filter(str.strip, format or ()))]
    needs("running a language model", "models", "transformers")
    check_models(*models, against)
    with running():
        from qdsl.host.files import check_output, read_utf8, write_text

        if svg is not None:
            check_output(svg, text, force=force)
        content = read_utf8(text)
        check_length(content, context, "--context")
        quantizers = [(name, dict(map(read_param, params))) for name, *params in map(str.split, format)]
        check_plain(against or "", *(name for name, _ in quantizers))
        check_options(device, *quantizers)
        from qdsl.models import evaluate as measure
        from qdsl.models import language
        from qdsl.models.calibrate import token_bytes

        chunks: list[Any] = []

        def divide(model: LanguageModel) -> None:
            if against is None or not chunks:
                chunks[:] = measure.chunks(model.tokenizer, content, context)

        def load(ref: str, form: str | None = None, params: Mapping[str, Any] | None = None) -> LanguageModel:
            return language.load_language_model(ref, form, device, language.portable_dtype(ref, dtype), params, match_dense,
                                                allow_unknown=allow_unknown, check=divide)

        base = None if against is None else measure.Base(load(against))
        results = []
        width = max(map(len, [*models, *(f"{against} as {form}" for form in format)]))
        for name, quantized, params in [*((name, None, {}) for name in models), *((str(against), *of) for of in quantizers)]:
            loaded = load(name, quantized, params)
            print_allowed(loaded)
            with progress({SAMPLES: sum(map(token_bytes, chunks))}):
                results.append(measure.evaluate(loaded, chunks, base))
            del loaded
            if not as_json:                                      # models may take hours
                typer.echo(measure.last_row(results, width))
        if svg is not None:
            write_text(svg, measure.svg(f"{text.name}: divergence from {against}", results))
    if as_json:
        typer.echo(json_text({"text": str(text), "context": context, "against": against,
                              "models": [finite(asdict(evaluation)) for evaluation in results]}))


def finite(value: Any) -> Any:
    """A value for JSON, with None in place of infinities."""
    if isinstance(value, dict):
        return {key: finite(element) for key, element in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_name(word: str) -> str:
    """The name of a format, with its storage where a word says which.  Exits with code 2 for a word that is none."""
    from qdsl.checkpoint.detect.targets import format_target

    with reported():
        return format_target(word)


def check_models(*refs: str | None, base: str | None = None) -> None:
    """Exit with code 1 for a model that is not there, or is none, before anything that takes long to import.

    base: the model of an option --base, which libraries look up by themselves.
    """
    from qdsl.checkpoint.files.components import open_models, why_no_config, why_no_model
    from qdsl.checkpoint.files.references import available, parse_reference, path_hint

    with reported():
        targets = {ref: parse_reference(ref) for ref in filter(None, refs)}
        for ref in [*(ref for ref, target in targets.items() if not isinstance(target, Path)), *([base] if base else [])]:
            available(ref)
    for ref, target in targets.items():
        if isinstance(target, Path) and not target.exists():
            fail(f"{ref}: no such folder or file{path_hint(target)}")
        if isinstance(target, Path) and (why := why_no_model(target) or ("" if base else why_no_config(target))):
            fail(f"{ref}: {why}")
        if isinstance(target, Path) and any(target.glob("*.safetensors")):
            with reported(), open_models(target):                # reads the headers
                pass


def check_options(device: str | None, *formats: tuple[str, Mapping[str, Any]]) -> None:
    """Raises LoadError for a device that this machine lacks, and FormatError for options that the quantizers of formats lack.

    Callers import the libraries that run models afterwards, which takes seconds.
    """
    from qdsl.checkpoint.detect.descriptions import program_of
    from qdsl.checkpoint.detect.targets import with_storage
    from qdsl.core.options import choose_options
    from qdsl.core.program import program_description

    for name, params in formats:
        format, options = with_storage(name, params)
        choose_options(program_description(program_of(format)), options)
    if device is not None:
        from qdsl.models.plugin import usable_device

        usable_device(device)


def check_plain(ref: str, *formats: str) -> None:
    """Exit with code 1 for a local model that is quantized already, in other formats than those that it is to have."""
    from qdsl.checkpoint.detect.layers import detected_layers
    from qdsl.checkpoint.files import components
    from qdsl.checkpoint.files.references import parse_reference

    path = parse_reference(ref)
    if not formats or not isinstance(path, Path):
        return
    if components.gguf(path) is not None:
        fail(f"{ref}: a GGUF file keeps its formats: leave out --format")
    with reported(), components.open_models(path) as models:
        own = {layer.format for folder in models.values() for layer in detected_layers(folder).layers}
    wanted = [name.partition(".")[0] for name in formats]
    if others := sorted(name for format in wanted for name in own - {format, ""}):
        fail(f"{ref}: --format {wanted[0]} contradicts its layers, which are {', '.join(dict.fromkeys(others))}: leave it out, "
             "or convert them with `qdsl convert --requantize`")


def check_length(content: str, tokens: int, option: str) -> None:
    """Exit with code 1 for a text of fewer bytes than a run has tokens: but for those at its ends, a token has a byte or more.

    Some tokenizers normalize a text first, which makes more bytes of it.
    """
    size = len(content.encode())
    if size + ENDS < tokens and all(len(normalize(form, content).encode()) + ENDS < tokens for form in ("NFKC", "NFKD")):
        fail(f"the text has {size} bytes, and a chunk takes {tokens} tokens: give more text or a smaller {option}")


def print_allowed(loaded: LanguageModel) -> None:
    """Repeat what a checkpoint says that is not computed, which --allow-unknown let pass."""
    for text in loaded.allowed:
        typer.echo(f"not computed: {without_controls(text)}", err=True)


@contextmanager
def running() -> Iterator[None]:
    """Turn errors of models into messages; exit code 2 where the libraries that run them are not installed."""
    try:
        with reported():
            yield
    except ImportError as error:
        from qdsl.core.places import install_command

        fail(f"{error}; to run models, {install_command('models,diffusers')}", 2)
    except ValueError as error:                                  # LoadError and FormatError, too
        fail(f"{error}")
