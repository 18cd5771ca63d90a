"""Records what llama.cpp does without each key and each tensor of tiny files: `python -m tests.record_gguf_absent`.

QDSL_LLAMA_LIBRARY names its library, as `make live` unpacks it.  Arguments are model types, by default all.  What llama.cpp
refuses and tests/models/test_gguf_absent.py then finds loaded belongs into `required` or `needed` of gguf_keys.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from qdsl.models.gguf_maps import model_types
from tests.record_gguf_keys import SILENT, Llama, write
from tests.support import gguf_cases
from tests.support.gguf_absent import absences, without


def answers(model_type: str) -> dict[str, list[float] | None]:
    """The recorded logits of each absence of a model type; {} where llama.cpp refuses the whole file."""
    own, llama, result = gguf_cases.tiny(model_type), Llama(), dict[str, list[float] | None]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        plain = llama.answer(gguf_cases.write_case(path, own, gguf_cases.Case()))
        for name in absences(own) if plain is not None else ():
            logits = llama.answer(gguf_cases.write_case(path, without(own, name), gguf_cases.Case()))
            is_changed = logits is not None and float(abs(logits - plain).max()) > SILENT * float(abs(plain).max())
            sampled = gguf_cases.sample(torch.from_numpy(logits)) if is_changed else ()
            result[name] = None if logits is None else [round(float(number), 5) for number in sampled]
    return result


def main(chosen: list[str]) -> None:
    """Record the answers of some model types, or of all."""
    path = gguf_cases.FOLDER / "absent.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    for name in chosen or model_types():
        content[name] = answers(name)
        print(name, flush=True)
        write("absent", {name: own for name, own in sorted(content.items()) if own})


if __name__ == "__main__":
    main(sys.argv[1:])
