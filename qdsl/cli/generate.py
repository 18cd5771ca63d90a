"""The command that runs a language model, or a pipeline of diffusers, on a prompt, or chats."""

from __future__ import annotations

import gc
import math
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdsl.cli.app import app, fail, json_text, needs, reported, without_controls
from qdsl.cli.models import (
    Device,
    DType,
    MatchDense,
    check_models,
    check_options,
    check_plain,
    format_name,
    print_allowed,
    running,
)
from qdsl.cli.options import AllowUnknown, Force, Json, Params, headed, read_param, refuse_options

if TYPE_CHECKING:
    from qdsl.models.generation import Conversation, Generation
    from qdsl.models.language import LanguageModel

TEXT, IMAGE = "Language models", "Pipelines of diffusers"        # headings of options that are for one kind of model
ASK = "> "
MOST_THREADS = 4 * (os.cpu_count() or 1)                         # more only wait for one another, until none can be started
_text, _image = (partial(headed, heading) for heading in (TEXT, IMAGE))

AnyModel = Annotated[str, typer.Argument(help="A folder or a repository of a language model, or of a pipeline of diffusers; or a "
                                              "GGUF file.", show_default=False)]
Prompt = Annotated[str | None, typer.Argument(help="What to continue, to answer or to draw; of a chat its first message.",
                                              show_default=False)]
Format = Annotated[str | None, typer.Option("--format", "-f", help="Quantize a plain model in this format.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=(1 << 64) - 1, help="Of sampling, or of noise.")]
Chat = Annotated[bool, _text("--chat", help="Answer message after message, and keep the conversation.")]
Raw = Annotated[bool, _text("--raw", help="Continue the prompt as it is, without the chat template.")]
System = Annotated[str | None, _text("--system", metavar="PROMPT", help="The system prompt of a chat template.")]
MaxNewTokens = Annotated[int, _text("--max-new-tokens", "-n", min=1, help="Most tokens of an answer.")]
Context = Annotated[int | None, _text("--context", "-c", min=2, help="Most tokens of prompt and answer together; by default as "
                                                                     "many as the model takes.")]
Temperature = Annotated[float, _text("--temperature", min=0, help="0: the most probable token.")]
TopK = Annotated[int | None, _text("--top-k", min=1, metavar="N", help="Sample among the N most probable tokens.")]
TopP = Annotated[float | None, _text("--top-p", min=0, max=1, help="Sample among the most probable tokens of this probability.")]
Threads = Annotated[int | None, _text("--threads", "-t", min=1, max=MOST_THREADS,
                                      help="Of a CPU; by default as many as torch chooses.")]
Exact = Annotated[bool | None, _text("--exact/--int8", help="Products on a CPU with x as it is, or rounded to 8 bits where an "
                                                           "answer is written; exact by default.", show_default=False)]
Base = Annotated[str | None, _text("--base", metavar="MODEL", help="The model that weights were made of, for what DF11 folders "
                                                                   "and GGUF files lack.")]
Out = Annotated[Path | None, _image("--out", "-o", help="The .png file to write.")]
Size = Annotated[str | None, _image("--size", metavar="WxH", help="Of the image; by default the pipeline's.")]
Steps = Annotated[int | None, _image("--steps", min=1, help="Of denoising; by default the pipeline's.")]
Guidance = Annotated[float | None, _image("--guidance", help="0 for many distilled models; by default the pipeline's.")]
Transformer = Annotated[str | None, _image("--transformer", metavar="MODEL", help="A file or folder with the transformer.")]
TextEncoder = Annotated[str | None, _image("--text-encoder", metavar="MODEL", help="And with the encoder.")]
Against = Annotated[str | None, _image("--against", metavar="MODEL", help="A pipeline whose image is compared.")]


@app.command()
def generate(typer_context: typer.Context, model: AnyModel, prompt: Prompt = None, format: Format = None, param: Params = None,
             seed: Seed = 0, chat: Chat = False, raw: Raw = False, system: System = None, max_new_tokens: MaxNewTokens = 128,
             context: Context = None, temperature: Temperature = 0.0, top_k: TopK = None, top_p: TopP = None,
             threads: Threads = None, exact: Exact = None, base: Base = None, out: Out = None, size: Size = None,
             steps: Steps = None, guidance: Guidance = None, transformer: Transformer = None, text_encoder: TextEncoder = None,
             against: Against = None, device: Device = None, dtype: DType = "auto", match_dense: MatchDense = False,
             allow_unknown: AllowUnknown = False, force: Force = False, as_json: Json = False) -> None:
    """Run a model on a prompt, with its weights packed, and print how fast it was and what memory it took.

    Language models write text: Ctrl-C ends an answer, and a second one the program.  Pipelines draw an image, twice with one
    seed, and it is printed whether the two are the same.
    """
    from qdsl.checkpoint.files.references import has_file

    with reported():
        is_pipeline = has_file(model, "model_index.json")
    if prompt is not None and "/" not in model and os.path.exists(prompt) and not os.path.exists(model):  # a prompt may be long
        fail(f"{model}: no such folder or file; the model comes before the prompt: `qdsl generate {shlex.quote(prompt)} ...`", 2)
    if is_pipeline:
        refuse_options(typer_context, TEXT, f"language models, and {model} is a pipeline of diffusers")
    else:
        refuse_options(typer_context, IMAGE, f"pipelines of diffusers, and {model} has no model_index.json")
    params = dict(map(read_param, param or ()))
    if params and format is None:
        fail("--param is of a format: name it with --format", 2)
    format = format_name(format) if format else None
    check_models(model, against, base=base)
    if prompt is None and not chat:
        fail("give a prompt" if is_pipeline else "give a prompt, or --chat for a conversation", 2)
    if is_pipeline:
        from qdsl.cli.images import draw

        models = {name: ref for name, ref in (("transformer", transformer), ("text_encoder", text_encoder)) if ref is not None}
        options = {"prompt": prompt, "seed": seed, "steps": steps, "guidance": guidance}
        quantization = {"format": format, "params": params, "match_dense": match_dense, "allow_unknown": allow_unknown}
        place = {"device": device, "dtype": dtype}
        draw(model, models, out, {**options, "size": size}, against, quantization, place, force, as_json)
        return
    _check_options(chat, raw, system, as_json, temperature, top_k, top_p)
    needs("running a language model", "models", "transformers")
    with running():
        check_plain(model, *([format] if format else []))
        check_options(device, *([(format, params)] if format else []))
        from qdsl.models import language
        from qdsl.models.generation import Sampling, check_conversation, check_prompt
        from qdsl.models.processor import set_processor

        set_processor(threads, exact)
        gc.freeze()                                              # collections need not visit what was imported: 0.25 s
        check: Callable[[LanguageModel], None] | None = None
        if chat:
            check = partial(check_conversation, first=prompt, system=system, context=context)
        elif context is not None or system is not None or not prompt:
            check = partial(check_prompt, prompt=str(prompt), chat=not raw, system=system, context=context)
        loaded = language.load_language_model(model, format, device, dtype, params, match_dense, base, allow_unknown, check)
        print_allowed(loaded)
        settings = {"max_new_tokens": max_new_tokens, "context": context, "system": system,
                    "sampling": Sampling(temperature, top_k, top_p, seed)}
        if chat:
            _converse(loaded, prompt, settings)
        else:
            _answer(loaded, str(prompt), not raw, settings, as_json)


def _check_options(chat: bool, raw: bool, system: str | None, as_json: bool, temperature: float, top_k: int | None,
                   top_p: float | None) -> None:
    """Exit with code 2 for options that contradict each other."""
    advice = "samples: give --temperature above 0, such as 0.7"
    for is_wrong, message in ((chat and raw, "--chat needs the chat template, which --raw leaves out"),
                              (raw and system is not None, "--system is for the chat template, which --raw leaves out"),
                              (chat and as_json, "--json prints one answer: leave out --chat"),
                              (math.isinf(temperature), "--temperature is a number such as 0.7"),
                              (temperature == 0 and top_k is not None, f"--top-k {advice}"),
                              (temperature == 0 and top_p is not None, f"--top-p {advice}")):
        if is_wrong:
            fail(message, 2)


def _answer(loaded: LanguageModel, prompt: str, chat: bool, settings: dict[str, Any], as_json: bool) -> None:
    """Write one answer, and its figures."""
    from qdsl.host.interrupts import first_interrupt_is_a_request
    from qdsl.models.generation import generate as generate_text

    if not as_json:
        typer.echo(_setting(loaded), err=True)
    with first_interrupt_is_a_request() as is_stopped:
        result = generate_text(loaded, prompt, chat=chat, write=None if as_json else _write, stop=is_stopped, **settings)
    if as_json:
        typer.echo(json_text({"model": loaded.name, "load_seconds": loaded.seconds, **asdict(result),
                              "prompt_tokens_per_second": result.prompt_rate, "tokens_per_second": result.decode_rate}))
        return
    typer.echo()
    typer.echo(f"{_speed(result)}\n{_memory(loaded, result)}", err=True)


def _converse(loaded: LanguageModel, first: str | None, settings: dict[str, Any]) -> None:
    """Answer messages of standard input until it ends, or until Ctrl-C in place of a message."""
    from qdsl.models.generation import Conversation

    conversation, result = Conversation(loaded, **settings), None
    typer.echo(f"{_setting(loaded)}\nCtrl-C ends an answer, Ctrl-D the conversation", err=True)
    while (message := first if first is not None else _message()) is not None:
        first = None
        if message.strip():
            result = _reply(conversation, message)
    if result is not None:
        typer.echo(f"{_speed(result)}\n{_memory(loaded, result)}", err=True)


def _reply(conversation: Conversation, message: str) -> Generation:
    from qdsl.host.interrupts import first_interrupt_is_a_request

    dropped = conversation.dropped
    with first_interrupt_is_a_request() as is_stopped:
        result = conversation.answer(message, _write, is_stopped)
    typer.echo()
    if conversation.dropped > dropped:
        typer.echo("the oldest messages no longer fit the context, and the model did not see them", err=True)
    return result


def _message() -> str | None:
    """The next message; None at the end of standard input, and at Ctrl-C."""
    try:
        if not sys.stdin.isatty():
            return next(iter(sys.stdin), None)
        return input(ASK)
    except (EOFError, KeyboardInterrupt):
        typer.echo()
        return None


def _write(text: str) -> None:
    typer.echo(without_controls(text), nl=False)
    sys.stdout.flush()


def _setting(loaded: LanguageModel) -> str:
    """One line: the dtype and arithmetic of products, and the threads."""
    from qdsl.models.processor import arithmetic_text

    return arithmetic_text(loaded.model)


def _speed(result: Generation) -> str:
    """The speeds of reading and of writing."""
    reused = f" ({result.reused} kept)" if result.reused else ""
    rate = "" if result.decode_rate is None else f", {result.decode_rate:.1f} per second"
    return (f"prompt: {result.prompt} tokens{reused}, {result.prompt_rate:.1f} per second; first token after "
            f"{result.first_token_seconds:.2f} s\nanswer: {result.tokens} tokens{rate}")


def _memory(loaded: LanguageModel, result: Generation) -> str:
    return (f"loaded in {loaded.seconds:.1f} s, {result.resident / 1e6:.0f} MB resident, {loaded.bits_per_weight:.2f} bits per "
            "weight")
