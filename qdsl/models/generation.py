"""Generates text with a language model: one answer to a prompt, or a conversation that keeps what it has computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from qdsl.host.system import resident_bytes
from qdsl.models.chat_template import render
from qdsl.models.language import CLEAR, LanguageModel, named_errors
from qdsl.models.plan import LoadError
from qdsl.models.transformers.gguf import gguf_path

INCOMPLETE = "\ufffd"                                            # what a tokenizer decodes part of a character to
Write = Callable[[str], Any]
Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.  temperature: 0 takes the most probable one; then the others have no effect."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """As `generate` of transformers takes them; what is not set is as the model's own settings have it."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        own = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {"do_sample": True, **{key: value for key, value in own.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class Generation:
    """Generated text.

    prompt, tokens: how many tokens the prompt has, and how many were written.  reused: of the prompt, how many were computed for
    an earlier answer.  seconds: in all.  first_token_seconds: from the start to the first written token.  resident: bytes of
    memory.
    """

    text: str
    prompt: int
    tokens: int
    seconds: float
    resident: int
    first_token_seconds: float = 0.0
    reused: int = 0

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompt per second, until the first written token."""
        return (self.prompt - self.reused) / max(self.first_token_seconds, 1e-9)

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first; None where there is one only."""
        return (self.tokens - 1) / max(self.seconds - self.first_token_seconds, 1e-9) if self.tokens > 1 else None


def generate(language: LanguageModel, prompt: str, max_new_tokens: int = 128, sampling: Sampling | None = None, chat: bool = True,
             write: Write | None = None, system: str | None = None, context: int | None = None,
             stop: Stop | None = None) -> Generation:
    """Continue a prompt, or answer it where the tokenizer has a chat template and `chat` is set.

    write: is given the text as it comes.  system: the system prompt of a chat.  context: the most tokens of prompt and answer, by
    default as many as the model takes.  stop: is asked after each token whether to end the answer.
    Raises LoadError for a system prompt without a template, and for a prompt that the context does not hold.
    """
    conversation = Conversation(language, max_new_tokens, sampling, system, context)
    if chat and conversation.has_template:
        return conversation.answer(prompt, write, stop)
    with named_errors(f"{language.path}: transformers does not generate with it", *CLEAR):
        return conversation.generate(_tokens(language, prompt, chat, system), write, stop)


def check_prompt(language: LanguageModel, prompt: str, chat: bool = True, system: str | None = None,
                 context: int | None = None) -> None:
    """Raises LoadError for a prompt that `generate` refuses by the model's tokenizer alone."""
    _check_length(language, _tokens(language, prompt, chat, system), context)


def check_conversation(language: LanguageModel, first: str | None, system: str | None = None, context: int | None = None) -> None:
    """Raises LoadError where the tokenizer alone tells that a model has no chats, or that a first message is too long."""
    if not language.tokenizer.chat_template:
        raise LoadError(f"{language.path}: has no chat template")
    if context is not None:
        check_prompt(language, first or "", True, system, context)


def _tokens(language: LanguageModel, prompt: str, chat: bool, system: str | None) -> list[int]:
    """The tokens of a prompt, by the chat template where there is one and `chat` is set."""
    if chat and language.tokenizer.chat_template:
        return _chat_tokens(language, [{"role": "user", "content": prompt}], system)
    if system is not None:
        raise LoadError(f"{language.path}: a system prompt needs a chat template" + (", and it has none" if chat else ""))
    tokens: list[int] = language.tokenizer(prompt)["input_ids"]
    return tokens


def _chat_tokens(language: LanguageModel, messages: list[dict[str, str]], system: str | None) -> list[int]:
    """The tokens of a conversation, by the chat template."""
    tokenizer, path = language.tokenizer, language.path
    first = [] if system is None else [{"role": "system", "content": system}]
    text = render(tokenizer.get_chat_template(), [*first, *messages], tokenizer.special_tokens_map, path)
    ends = tokenizer("")["input_ids"] if gguf_path(path) is not None else []
    # llama.cpp adds the file's first and last tokens to a chat, too, in place of those that the template has
    if ends[:1] == [tokenizer.bos_token_id]:
        text = text.removeprefix(tokenizer.bos_token)
    if ends[-1:] == [tokenizer.eos_token_id]:
        text = text.removesuffix(tokenizer.eos_token)
    tokens: list[int] = tokenizer(text, add_special_tokens=bool(ends))["input_ids"]
    return tokens


def _check_length(language: LanguageModel, prompt: list[int], limit: int | None) -> None:
    """Raises LoadError for a prompt of no tokens, and for one that a context of `limit` tokens does not hold."""
    if not prompt:
        raise LoadError(f"{language.path}: the prompt is empty")
    if limit is not None and len(prompt) >= limit:
        raise LoadError(f"{language.path}: a prompt of {len(prompt)} tokens takes a context of {len(prompt) + 1} or more, not "
                        f"{limit}")


@dataclass(eq=False)
class Conversation:
    """A chat with a model.  It keeps the messages, and of the last prompt and answer the keys and values that were computed.

    dropped: how many of the oldest messages did not fit the context, so far.
    """

    language: LanguageModel
    max_new_tokens: int = 128
    sampling: Sampling | None = None
    system: str | None = None
    context: int | None = None
    dropped: int = 0
    _messages: list[dict[str, str]] = field(default_factory=list)
    _cache: Any = None
    _cached: list[int] = field(default_factory=list)             # the tokens of the cache

    def __post_init__(self) -> None:
        torch.manual_seed((self.sampling or Sampling()).seed)
        config = self.language.model.config
        own = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.limit = min(limit for limit in (self.context, own, 1 << 31) if limit)

    @property
    def has_template(self) -> bool:
        return bool(self.language.tokenizer.chat_template)

    def answer(self, message: str, write: Write | None = None, stop: Stop | None = None) -> Generation:
        """The model's answer to the next message.  Raises LoadError where the message alone does not fit the context."""
        if not self.has_template:
            raise LoadError(f"{self.language.path}: has no chat template")
        self._messages.append({"role": "user", "content": message})
        with named_errors(f"{self.language.path}: transformers does not generate with it", *CLEAR):
            result = self.generate(self._prompt(), write, stop)
        self._messages.append({"role": "assistant", "content": result.text})
        return result

    def _prompt(self) -> list[int]:
        """The tokens of the conversation; of one that is too long without its oldest messages."""
        tokens = _chat_tokens(self.language, self._messages, self.system)
        while len(self._messages) > 1 and len(tokens) + min(self.max_new_tokens, self.limit // 2) > self.limit:
            del self._messages[:2]                               # a message and its answer
            self.dropped += 2
            tokens = _chat_tokens(self.language, self._messages, self.system)
        return tokens

    def generate(self, prompt: list[int], write: Write | None = None, stop: Stop | None = None) -> Generation:
        """Continue a prompt of tokens.  Raises LoadError for one that the context does not hold."""
        _check_length(self.language, prompt, self.limit)
        model = self.language.model
        reused = self._keep_common(prompt)
        began = time.perf_counter()
        streamer = _Streamer(self.language.tokenizer, write)
        ids = torch.tensor([prompt], device=model.device, dtype=torch.int64)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer, past_key_values=self._cache,
                             max_new_tokens=min(self.max_new_tokens, self.limit - len(prompt)), return_dict_in_generate=True,
                             stopping_criteria=transformers.StoppingCriteriaList([_Stopping(stop)] if stop else []),
                             **(self.sampling or Sampling()).options())
        seconds = time.perf_counter() - began
        tokens = out.sequences[0].tolist()
        self._remember(getattr(out, "past_key_values", None), tokens)
        text = self.language.tokenizer.decode(tokens[len(prompt):], skip_special_tokens=True)
        return Generation(text, len(prompt), len(tokens) - len(prompt), seconds, resident_bytes(),
                          (streamer.first or time.perf_counter()) - began, reused)

    def _keep_common(self, prompt: list[int]) -> int:
        """Cut the cache to what it has in common with a prompt, but the last token, and return how many tokens that is."""
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._cached, prompt[:-1], strict=False)))
        if common == 0:
            self._cache = None
        elif common < len(self._cached):
            self._cache.crop(common - len(self._cached))
        return common

    def _remember(self, cache: Any, tokens: list[int]) -> None:
        """Keep the cache for the next prompt, if it has all tokens and can be cut."""
        layers = getattr(cache, "layers", [])
        is_plain = bool(layers) and all(type(layer).__name__ == "DynamicLayer" for layer in layers)
        self._cache = cache if is_plain else None
        self._cached = tokens[:cache.get_seq_length()] if is_plain else []


class _Streamer(BaseStreamer):
    """Passes on the text of tokens as they come, but no part of a character.  first: when the first token was there."""

    def __init__(self, tokenizer: Any, write: Write | None) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._is_prompt = True
        self._tokens: list[int] = []
        self._shown = self._done = 0                             # tokens before the last text, and up to its end
        self.first: float | None = None

    def put(self, value: Any) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        if self.first is None:
            self.first = time.perf_counter()
        self._tokens += value.flatten().tolist()
        self._pass_on(is_last=False)

    def end(self) -> None:
        self._pass_on(is_last=True)

    def _pass_on(self, is_last: bool) -> None:
        """Decode the new tokens behind those of the last text: some tokenizers leave out a space at the start of a text."""
        if self._write is None:
            return
        before, text = (self._tokenizer.decode(tokens, skip_special_tokens=True)
                        for tokens in (self._tokens[self._shown:self._done], self._tokens[self._shown:]))
        if len(text) > len(before) and (is_last or not text.endswith(INCOMPLETE)):
            self._write(text[len(before):])
            self._shown, self._done = self._done, len(self._tokens)


class _Stopping(transformers.StoppingCriteria):
    """Ends generation where `stop` says so."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._stop(), device=input_ids.device, dtype=torch.bool)
