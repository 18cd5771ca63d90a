"""`qdsl serve`: transformers' server in front of packed weights, asked by OpenAI's client over HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import gguf_models

for package in ("transformers", "fastapi", "uvicorn", "openai"):
    pytest.importorskip(package)
pytestmark = pytest.mark.filterwarnings("default")
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from qdsl.models.language import load_language_model

    folder = tmp_path_factory.mktemp("served")
    path, _ = gguf_models.written(folder, "llama", type="Q8_0", has_settings=True, has_vocabulary=True, vocab_size=288)
    loaded = load_language_model(str(path.rename(folder / "tiny.gguf")), device="cpu", dtype="float32")
    loaded.tokenizer.chat_template = TEMPLATE
    return loaded


@pytest.fixture(scope="module")
def client(language: Any) -> Iterator[Any]:
    import openai
    import uvicorn

    from qdsl.models.openai_server import server_app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(server_app(language), host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    server.should_exit = True
    thread.join()


def expected(language: Any, message: str) -> str:
    from qdsl.models.generation import generate

    return generate(language, message, 8).text


def test_answers_are_those_of_generate(language: Any, client: Any) -> None:
    """At once and streamed; another model's name is refused."""
    import openai

    assert [model.id for model in client.models.list()] == ["tiny"]
    for question in ("12 squared?", "13?"):
        asked = {"messages": [{"role": "user", "content": question}], "max_completion_tokens": 8, "temperature": 0}
        answer = client.chat.completions.create(model="tiny", **asked).choices[0].message.content
        chunks = client.chat.completions.create(model="tiny", stream=True, **asked)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert answer == streamed == expected(language, question) != ""
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="other", **asked)
