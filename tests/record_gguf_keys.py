"""Records what llama.cpp's converter writes, and llama.cpp's logits of changed files: `python -m tests.record_gguf_keys`.

QDSL_LLAMA_CPP and QDSL_LLAMA_LIBRARY name the converter and the library, as `make live` unpacks them.  A case that llama.cpp
refuses is left out; one that changes no logit has none; one of which it computes no numbers is null.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from qdsl.models.gguf_maps import model_types
from tests.support import gguf_cases, llama_cpp, llama_library
from tests.support.tiny_models import tiny_model, unusual

SILENT = 1e-4                                                    # relative difference of logits that a change makes at least


def converted(model_type: str) -> dict[str, tuple[str, Any]]:
    """The metadata that the converter writes for an unusual tiny model."""
    model = tiny_model(model_type, 1, **unusual(model_type))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llama_cpp.add_tokenizer(Path(folder), model.config.vocab_size)
        run = llama_cpp.converter(Path(folder))
        run.set_gguf_parameters()
        return {key: gguf_cases_value(entry) for key, entry in run.gguf_writer.kv_data[0].items() if "general." not in key}


def gguf_cases_value(entry: Any) -> tuple[str, Any]:
    """The type and value of an entry of the package gguf, as `Value.of` takes them."""
    words = {"UINT32": "u32", "FLOAT32": "f32", "STRING": "string", "BOOL": "bool", "INT32": "i32"}
    value = entry.value.tolist() if hasattr(entry.value, "tolist") else entry.value
    if entry.type.name == "ARRAY":
        first = type(value[0])
        return {bool: "bool[]", int: "i32[]", float: "f32[]"}[first], list(value)
    return words[entry.type.name], value


def _serve(pipe: Any) -> None:
    """Answer paths with llama.cpp's logits until the pipe is closed."""
    while True:
        try:
            path = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(llama_library.logits(Path(path), gguf_cases.TOKENS))
        except ValueError:
            pipe.send(None)


class Llama:
    """llama.cpp in a process of its own, which some files end."""

    def __init__(self) -> None:
        self._process: Any = None

    def answer(self, path: Path) -> Any:
        """llama.cpp's logits of a file; None where it refuses the file, or ends the process."""
        if self._process is None or not self._process.is_alive():
            self._pipe, other = multiprocessing.Pipe()
            self._process = multiprocessing.Process(target=_serve, args=(other,), daemon=True)
            self._process.start()
            other.close()
        try:
            self._pipe.send(str(path))
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return None


def answers(model_type: str) -> dict[str, list[float] | None]:
    """The recorded logits of each case of a model type; None where they are no numbers."""
    own, result = gguf_cases.tiny(model_type), dict[str, list[float] | None]()
    plain, llama = None, Llama()
    with tempfile.TemporaryDirectory() as folder:
        for name, case in gguf_cases.cases().items():
            path = gguf_cases.write_case(Path(folder) / "model.gguf", own, case)
            logits = llama.answer(path)
            if logits is None:
                print(f"  {model_type}: {name}: refused", flush=True)
                if plain is None:
                    break
                continue
            plain = logits if plain is None else plain
            is_changed = name == "unchanged" or float(abs(logits - plain).max()) > SILENT * float(abs(plain).max())
            sampled = gguf_cases.sample(torch.from_numpy(logits)) if is_changed else ()
            result[name] = None if not abs(logits).max() < float("inf") else [round(float(number), 5) for number in sampled]
    return result


def write(name: str, content: dict[str, Any]) -> None:
    """Write a file of the folder, an entry a line."""
    gguf_cases.FOLDER.mkdir(exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    (gguf_cases.FOLDER / f"{name}.json").write_text("{" + ",\n ".join(lines) + "}\n")


def main(chosen: list[str]) -> None:
    """Record all, or the answers of some model types."""
    if not chosen:
        write("metadata", {name: converted(name) for name in model_types()})
        gguf_cases.metadata.cache_clear()
    path = gguf_cases.FOLDER / "answers.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    for name in chosen or model_types():
        content[name] = answers(name)
    write("answers", {name: own for name, own in sorted(content.items()) if own})


if __name__ == "__main__":
    main(sys.argv[1:])
