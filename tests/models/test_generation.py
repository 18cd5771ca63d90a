"""Answers of language models: text as it comes, conversations, interrupts, and the options of `qdsl generate`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from qdsl.cli import app
from qdsl.host.interrupts import first_interrupt_is_a_request
from tests.support import language_models
from tests.support.paths import ROOT

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")
TEMPLATE = "{% for message in messages %}<{{ message.role[0] }}:{{ message.content }}>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = language_models.write_plain(tmp_path_factory.mktemp("plain") / "model", "qwen3")
    return language_models.add_tokenizer(path, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose cache forgets keys and values: layers with a window."""
    path = language_models.write_plain(tmp_path_factory.mktemp("windowed") / "model", "gpt_oss")
    return language_models.add_tokenizer(path, chat_template=TEMPLATE)


def loaded(path: Path) -> Any:
    from qdsl.models.language import load_language_model

    return load_language_model(str(path), device="cpu", dtype="float32")


def run(*arguments: str | Path | int, text: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=text, catch_exceptions=False)


class ByteTokenizer:
    """A token for each byte, of which most are part of a character only."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain", "naïve café", "你好，世界", "👩🏽‍🚀 and 🇨🇭", "مرحبا", "a\ufffdb\ufffd", "", "क्षि\n"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_characters_stream_whole_and_at_once(text: str, size: int) -> None:
    from qdsl.models.generation import INCOMPLETE, _Streamer

    pieces: list[str] = []
    streamer = _Streamer(ByteTokenizer(), pieces.append)
    streamer.put(torch.tensor([[1, 2, 3]]))                            # the prompt
    data = text.encode()
    for start in range(0, len(data), size):
        streamer.put(torch.tensor(list(data[start:start + size])))
        done = data[:start + size].decode(errors="ignore")
        assert INCOMPLETE in text or "".join(pieces) in (done, "".join(pieces))
        if size == 1 and INCOMPLETE not in text:
            assert "".join(pieces) == done
    streamer.end()
    assert "".join(pieces) == text
    assert INCOMPLETE in text or all(INCOMPLETE not in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["folder", "windowed"])
def test_a_conversation_answers_as_a_whole_prompt_does(kind: str, request: pytest.FixtureRequest) -> None:
    from qdsl.models.generation import Conversation

    language = loaded(request.getfixturevalue(kind))
    kept, prompt = Conversation(language, 6), ""
    for message in ("12 squared?", "And 13?", "Why?"):
        answer = kept.answer(message)
        prompt += f"<u:{message}>"
        fresh = Conversation(language, 6).generate(language.tokenizer(prompt)["input_ids"])
        assert answer.text == fresh.text and answer.prompt == fresh.prompt == len(prompt) and fresh.reused == 0
        assert (answer.reused > 0) == (kind == "folder" and message != "12 squared?")
        prompt += f"<a:{answer.text}>"


def test_a_conversation_drops_its_oldest_messages(folder: Path) -> None:
    from qdsl.models.generation import Conversation

    conversation = Conversation(loaded(folder), 8, context=40, system="s")
    prompts = [conversation.answer(message).prompt for message in "abcdefgh"]
    assert conversation.dropped >= 2 and conversation.dropped % 2 == 0 and max(prompts) + 8 <= 40
    assert conversation._messages[0]["role"] == "user" and conversation._messages[-2]["content"] == "h"


def test_an_answer_ends_at_a_request_and_at_the_context(folder: Path) -> None:
    from qdsl.models.generation import Conversation, generate
    from qdsl.models.plan import LoadError

    language, count = loaded(folder), iter(range(100))
    assert generate(language, "12", 50, stop=lambda: next(count) >= 4).tokens == 5
    result = generate(language, "12", 50, chat=False, context=12)
    assert (result.prompt, result.tokens) == (2, 10)
    assert 0 < result.first_token_seconds <= result.seconds and result.decode_rate is not None
    for bad in ([], [1] * 12):
        with pytest.raises(LoadError, match=r"the prompt is empty|12 tokens takes a context of 13 or more, not 12"):
            Conversation(language, 5, context=12).generate(bad)


def test_the_first_interrupt_is_a_request() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), first_interrupt_is_a_request() as is_asked:
        assert not is_asked()
        signal.raise_signal(signal.SIGINT)
        assert is_asked()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_reads_messages_and_keeps_the_conversation(folder: Path) -> None:
    result = run(folder, "--chat", "-n", 4, "--threads", 1, "--system", "be brief", text="1+1?\n\n2+2?\n")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) >= 2
    assert "kept), " in result.stderr and "float32" not in result.stderr.splitlines()[0].partition(" ")[0]
    assert result.stderr.splitlines()[0].endswith("1 thread") and "first token after" in result.stderr


@pytest.mark.parametrize(("options", "setting", "phrase"), [((), None, "x exact"), (("--int8",), "1", "x rounded to 8 bits"),
                                                            (("--exact",), "0", "x exact")])
def test_the_arithmetic_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], setting: str | None,
                                phrase: str) -> None:
    monkeypatch.setenv("QDSL_CPU_INT8", "0")
    monkeypatch.delenv("QDSL_CPU_INT8")
    result = run(folder, "12", "-n", 2, "--device", "cpu", *options)
    assert result.exit_code == 0 and phrase in result.stderr.splitlines()[0] and os.environ.get("QDSL_CPU_INT8") == setting


@pytest.mark.parametrize(("arguments", "code", "message"), [
    ("{folder}", 2, "or --chat for a conversation"), ("{folder} x --chat --raw", 2, "which --raw leaves out"),
    ("{folder} x --raw --system y", 2, "--system is for the chat template"), ("{folder} --chat --json", 2, "leave out --chat"),
    ("{folder} x --top-k 5", 2, "give --temperature"), ("{folder} x --top-p 0.5", 2, "give --temperature"),
    ("{folder} x --temperature inf", 2, "--temperature is a number"), ("{folder} x --param bits=4", 2, "with --format"),
    ("{folder} 123456 --context 4 --raw", 1, "a prompt of 6 tokens takes a context of 7 or more, not 4"),
    ("{folder} 123456 --context 4", 1, "a context of 11 or more, not 4"), ("{folder} --chat --context 2", 1, "not 2"),
    ("{plain} --chat", 1, "has no chat template"), ("{plain} x --system y", 1, "a system prompt needs a chat template")])
def test_options_that_contradict_are_refused_before_a_model_is_loaded(
        folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int, message: str) -> None:
    monkeypatch.setattr("qdsl.models.language._load_plain", lambda *_: pytest.fail("the model was loaded"))
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in folder.iterdir():
        if path.name != "chat_template.jinja":
            (plain / path.name).symlink_to(path)
    result = CliRunner().invoke(app, ["generate", *arguments.format(folder=folder, plain=plain).split()], input="hello\n",
                                catch_exceptions=False)
    assert result.exit_code == code and message in result.stderr + result.stdout


@pytest.fixture
def endless(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes an answer of minutes, once it has begun to."""
    with subprocess.Popen([sys.executable, "-m", "qdsl", "generate", folder, "12", "-n", "100000", "-c", "40000"], cwd=ROOT,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.read(3)
        yield process
        process.kill()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs Unix signals")
def test_ctrl_c_ends_the_answer(endless: subprocess.Popen[str]) -> None:
    endless.send_signal(signal.SIGINT)
    assert endless.wait(60) == 0
    assert endless.stderr is not None and "per second; first token after" in endless.stderr.read()


@pytest.mark.parametrize(("ref", "name"), [("a/b/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"), ("owner/name:Q4_0", "name-Q4_0"),
                                           ("owner/name@main", "name"), (str(Path("folder") / "x"), "x")])
def test_names_of_served_models(ref: str, name: str) -> None:
    from qdsl.models.openai_server import model_name

    assert model_name(ref) == name
