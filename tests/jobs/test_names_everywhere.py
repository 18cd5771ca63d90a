"""Every entry that takes a name of a format, storage, type or producer understands the same words, or suggests some.

Options of commands are those of the app: a new one is tried without a line here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qdsl
from qdsl import kv_cache
from qdsl.models.diffusers import QdslConfig as DiffusersConfig
from qdsl.models.engine import EngineConfig
from qdsl.models.transformers import QdslConfig
from tests.jobs.test_exit_codes import COMMANDS, call, parameters
from tests.support import folders
from tests.support.jobs import command
from tests.support.quantize_command import drawn

# By the word of an option: what means something in other letters or as a producer's word, and what is nearly a name.
UNDERSTOOD = {"SPEC": ("GPTQ", "Q4-K", "awq"), "FORMAT": ("GPTQ", "Q4-K"), "FORMAT[.STORAGE]": ("GPTQ", "Int-Group.AWQ"),
              "STORAGE": ("GPTQ", "Awq"), "MIX": ("q4_k_m", "Q4_K_M"), "TYPE": ("q8_0",), "PATTERN=TYPE": ("x=q8_0",),
              "DTYPE": ("BF16", "Float32"), "f32|bf16|f16": ("BF16", "bfloat16"), "hlane|fix4|fix3|df11": ("HLANE",),
              "bf16|f16": ("BF16", "float16"), "linear|dequantize": ("Linear",), "PRODUCER": ("GPTQ",)}
NEARLY = {"SPEC": "q4kk", "FORMAT": "gptq_v9", "FORMAT[.STORAGE]": "gptq_v9", "STORAGE": "awqq", "MIX": "Q4_K_X", "TYPE": "q8_9",
          "PATTERN=TYPE": "x=q8_9", "DTYPE": "float33", "f32|bf16|f16": "bf17",
          "hlane|fix4|fix3|df11": "hlan", "bf16|f16": "bf17",
          "linear|dequantize": "liner", "PRODUCER": "gptqq"}
SUGGESTS = re.compile(r"did you mean|expected one of|it has [\w, ]+ and \w+|[Mm]ixes and types are")
# A word that is understood, and fails as what it needs is not there; commands that would compile or build are not tried.
UNKNOWN = re.compile(r"no (format|storage|spec|type|mix|producer) '|expected one of|unknown")
LONG = {"analyze", "build", "test"}
RUN, NOWHERE = {"generate", "serve"}, "./nowhere"                # names are read before a model is looked for


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders.folder(Path("model"), {"up.weight": drawn(64, 128)}, config={"model_type": "llama"})
    Path("text.txt").write_text("words")


def options(words: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """A command, its option or '' for its argument, and the word for its values."""
    for name in COMMANDS:
        for parameter in parameters(name):
            if parameter.metavar in words and name != "infer":
                yield name, parameter.opts[0] if parameter.param_type_name == "option" else "", parameter.metavar


def line(name: str, option: str, value: str) -> list[str]:
    """A command with a value of an option."""
    if not option:
        return [*call(name)[:-1], value] if name in ("explain", "analyze") else [name, value]
    if name == "quantize":
        gguf = option in ("--type", "--tensor-type", "--output-tensor-type", "--token-embedding-type")
        target = [] if option in ("--type", "--format") else ["--type", "Q8_0"] if gguf else ["--format", "int_group"]
        return [name, "model", "--out", "out.gguf" if gguf else "out", *target, option, value]
    if name == "convert":
        return [name, "model", "--out", "out", *([] if option in ("--to", "--requantize") else ["--to", "awq"]), option, value]
    if name == "evaluate":
        return [name, NOWHERE, "--text", "text.txt", "--against", NOWHERE, option, value]
    return [*call(name, option, SPEC="int_group", **({"MODEL": NOWHERE} if name in RUN else {})), option, value]


@pytest.mark.parametrize(("name", "option", "word"), list(options(NEARLY)))
def test_a_word_that_is_nearly_a_name_gets_a_suggestion(name: str, option: str, word: str) -> None:
    result = command(*line(name, option, NEARLY[word]))
    assert result.exit_code == 2 and SUGGESTS.search(result.output + result.stderr), (result.output, result.stderr)


@pytest.mark.parametrize(("name", "option", "word"), [entry for entry in options(UNDERSTOOD) if entry[0] not in LONG])
def test_other_letters_and_producers_words_are_understood(name: str, option: str, word: str) -> None:
    """Whatever else is missing: nobody says that there is no such name."""
    for value in UNDERSTOOD[word]:
        result = command(*line(name, option, value))
        assert not UNKNOWN.search(result.stderr), result.stderr


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 64, bias=False)


def filled(word: str) -> Any:
    model = Mlp()
    qdsl.load_weights_(model, "model", format=word)
    return model.up


def replaced(word: str) -> Any:
    model = Mlp()
    qdsl.quantize_(model, word)
    return model.up


ENTRIES: dict[str, Callable[[str], Any]] = {
    "load": qdsl.load, "load_weights_": filled, "quantize_": replaced, "QdslConfig": QdslConfig, "diffusers": DiffusersConfig,
    "calibrate": lambda word: qdsl.calibrate(Mlp(), [torch.zeros(1, 4, dtype=torch.int64)], word),
    "engine": lambda word: EngineConfig({"quant_method": "qdsl", "format": word}), "kv_cache": kv_cache.CacheFormat}


@pytest.mark.parametrize("entry", [name for name in ENTRIES if name != "calibrate"])
def test_python_takes_the_same_words(entry: str) -> None:
    for word, format, storage in (("GPTQ", "int_group", "gptq_v1"), ("Int-Group", "int_group", None), ("NF4", "nf4", None)):
        result = ENTRIES[entry](word)
        packed = getattr(result, "packed", None)
        own = result.FORMAT.name if entry == "load" else packed.format.name if packed is not None else \
            getattr(result.format, "name", result.format)
        assert own == format
        if entry != "load" and storage:
            options = getattr(result, "options", {})
            assert storage in (getattr(result, "storage", None), options.get("storage"), getattr(packed, "storage", None))


@pytest.mark.parametrize("entry", ENTRIES)
def test_python_suggests_the_same(entry: str) -> None:
    for word, near in (("gptq_v9", "int_group.gptq_v2"), ("bitsandbytes", "nf4"), ("q4kk", "q4_k")):
        with pytest.raises(ValueError, match=f"no format '{word}'; did you mean .*{near}"):
            ENTRIES[entry](word)
