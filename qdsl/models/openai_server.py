"""Serves a language model to programs that speak OpenAI's protocol, by the server that transformers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qdsl.models.language import LanguageModel
from qdsl.models.transformers.gguf import gguf_path


def model_name(ref: str) -> str:
    """The name that requests may give: the last part of a path or repository, without .gguf and what servers cut off a name."""
    return Path(ref).name.removesuffix(".gguf").partition("@")[0].replace(":", "-") or "model"


def serve(language: LanguageModel, host: str, port: int) -> None:
    """Answer requests until the process is interrupted; one model, one request after the other.

    Chat templates run in this process, in the sandbox of Jinja.
    """
    import uvicorn

    uvicorn.Server(uvicorn.Config(server_app(language), host=host, port=port, log_level="info")).run()


def server_app(language: LanguageModel) -> Any:
    """The application of transformers' server for one model that is loaded."""
    from transformers.cli.serving import chat_completion, completion, response, server, systemone, transcription
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerationState

    name, tokenizer = model_name(language.name), _begun_tokenizer(language)

    class OneModel(ModelManager):
        """The model and its tokenizer, whatever a request calls them; the server refuses other names."""

        def _load_model(self, *arguments: Any, **options: Any) -> Any:
            return language.model

        def _load_processor(self, *arguments: Any, **options: Any) -> Any:
            return tokenizer

        @staticmethod
        def get_gen_models(cache_dir: str | None = None) -> list[dict[str, Any]]:
            """What GET /v1/models lists."""
            return [{"id": name, "object": "model", "created": 0, "owned_by": "qdsl"}]

    manager, state = OneModel(force_model=name), GenerationState(continuous_batching=False)
    return server.build_server(
        manager, chat_completion.ChatCompletionHandler(model_manager=manager, generation_state=state, chat_template_kwargs={}),
        completion_handler=completion.CompletionHandler(model_manager=manager, generation_state=state),
        response_handler=response.ResponseHandler(model_manager=manager, generation_state=state, chat_template_kwargs={}),
        transcription_handler=transcription.TranscriptionHandler(manager, state),
        systemone_handler=systemone.SystemOneHandler(model_manager=manager, generation_state=state, chat_template_kwargs={},
                                                     decision_config=None), generation_state=state)


def _begun_tokenizer(language: LanguageModel) -> Any:
    """The tokenizer, whose template begins with the file's first token where llama.cpp adds it: the server adds none."""
    tokenizer = language.tokenizer
    adds_first = gguf_path(language.path) is not None and tokenizer.bos_token_id in tokenizer("")["input_ids"]
    if adds_first and isinstance(tokenizer.chat_template, str):
        text = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=True)
        if not text.startswith(tokenizer.bos_token):
            tokenizer.chat_template = "{{- bos_token -}}" + tokenizer.chat_template
    return tokenizer
