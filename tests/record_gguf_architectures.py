"""Records the keys of every architecture of llama.cpp: `QDSL_LLAMA_CPP=FOLDER python -m tests.record_gguf_architectures`.

FOLDER is vendor/llama.cpp in the source distribution of llama-cpp-python, which `make live` unpacks.  What llama.cpp reads comes
from its C++ source, and what its converter writes from the calls of the package gguf in the classes of its models.  Both go into
qdsl/checkpoint/detect/gguf_keys.json.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from qdsl.checkpoint.detect.gguf_keys import TABLE, table
from tests.support.llama_cpp import folder

NAME = re.compile(r'\{\s*(LLM_(?:ARCH|KV)_\w+),\s*"([^"]+)"\s*\}')
READ = re.compile(r"\bget_(?:key|key_or_arr|arr|arr_n)\(\s*(LLM_KV_\w+)")
WINDOWS = "load_swa_pattern"                                     # a function of all models, which reads a key
FUNCTION = re.compile(r"^void llama_model_(\w+)::load_arch_hparams\(.*?^\}", re.MULTILINE | re.DOTALL)
PARENT = re.compile(r"struct llama_model_(\w+) : public llama_model_(\w+)")
CLASS = re.compile(r"case (LLM_ARCH_\w+):\s+return new llama_model_(\w+)\(")


class Source:
    """The source of llama.cpp: keys that are read, by architecture."""

    def __init__(self, place: Path) -> None:
        self.texts = {path.name: path.read_text() for path in [*place.glob("src/llama-*.cpp"), *place.glob("src/models/*")]}
        self.names = dict(NAME.findall(self.texts["llama-arch.cpp"]))

    def keys(self, text: str) -> set[str]:
        """The keys of an architecture that a text reads, without its name."""
        read = set(READ.findall(text)) | ({"LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN"} if WINDOWS in text else set())
        return {self.names[key].removeprefix("%s.") for key in read if self.names[key].startswith("%s.")}

    def read(self) -> dict[str, set[str]]:
        """What the loaders of all architectures read beside the keys that all have."""
        bodies = {own[1]: own[0] for text in self.texts.values() for own in FUNCTION.finditer(text)}
        parents = dict(PARENT.findall(self.texts["models.h"]))
        result = {}
        for constant, name in CLASS.findall(self.texts["llama-model.cpp"]):
            while name not in bodies and name in parents:
                name = parents[name]
            result[self.names[constant]] = self.keys(bodies.get(name, ""))
        return result


class Converter:
    """The classes of llama.cpp's converter: keys that they write, by architecture."""

    def __init__(self, place: Path) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        for path in place.glob("conversion/*.py"):
            self.classes |= {own.name: own for own in ast.parse(path.read_text()).body if isinstance(own, ast.ClassDef)}
        self.writer = ast.parse((place / "gguf-py/gguf/gguf_writer.py").read_text())
        self.constants = ast.parse((place / "gguf-py/gguf/constants.py").read_text())

    @cached_property
    def texts(self) -> dict[str, str]:
        """All keys of the package by the names of their constants."""
        (keys,) = (own for own in self.constants.body if isinstance(own, ast.ClassDef) and own.name == "Keys")
        return dict(_constants(keys, ""))

    @cached_property
    def methods(self) -> dict[str, set[str]]:
        """The keys that each method of the package's writer adds."""
        methods = {}
        for function in (own for own in ast.walk(self.writer) if isinstance(own, ast.FunctionDef)):
            named = re.findall(r"Keys\.((?:\w+\.)+[A-Z0-9_]+)\b", ast.unparse(function))
            texts = [self.texts.get(name, "") for name in named]
            methods[function.name] = {text.removeprefix("{arch}.") for text in texts if text.startswith("{arch}.")}
        return methods

    @cached_property
    def architectures(self) -> dict[str, str]:
        """The names of architectures by the constants of the package."""
        (table,) = (own.value for own in self.constants.body
                    if isinstance(own, ast.AnnAssign) and ast.unparse(own.target) == "MODEL_ARCH_NAMES")
        assert isinstance(table, ast.Dict)
        return {ast.unparse(key).rpartition(".")[2]: ast.literal_eval(value)
                for key, value in zip(table.keys, table.values, strict=True) if key is not None}

    def parents(self, name: str) -> Iterator[ast.ClassDef]:
        """A class and those that it inherits from, nearest first."""
        if name in self.classes:
            yield self.classes[name]
            for base in self.classes[name].bases:
                yield from self.parents(ast.unparse(base))

    def written(self) -> dict[str, set[str]]:
        """What the classes of each architecture may write, inherited methods included."""
        result: dict[str, set[str]] = {name: set() for name in self.architectures.values()}
        for name in self.classes:
            family = list(self.parents(name))
            text = "\n".join(map(ast.unparse, family))
            own = next((match[1] for parent in family
                        if (match := re.search(r"model_arch = gguf\.MODEL_ARCH\.(\w+)", ast.unparse(parent)))), None)
            others = set(re.findall(r"gguf\.MODEL_ARCH\.(\w+)", ast.unparse(self.classes[name])))
            for constant in {own, *others} - {None}:
                calls = re.findall(r"\.(add_\w+)\(", text)
                result[self.architectures[str(constant)]] |= set().union(*(self.methods.get(call, set()) for call in calls))
                keys = re.findall(r"'\{(?:\w+\.)*arch\}\.([\w.]+)'|f'\{arch\}\.([\w.]+)'", text)
                result[self.architectures[str(constant)]] |= {key for pair in keys for key in pair if key}
        return result


def _constants(group: ast.ClassDef, start: str) -> Iterator[tuple[str, str]]:
    """The texts of a class and of those in it, by their names."""
    for own in group.body:
        if isinstance(own, ast.ClassDef):
            yield from _constants(own, f"{start}{own.name}.")
        elif isinstance(own, ast.Assign) and isinstance(own.value, ast.Constant):
            yield start + ast.unparse(own.targets[0]), own.value.value


def recorded() -> dict[str, Any]:
    """The parts of the table that come from llama.cpp's source alone: `written`, and `others`, architectures without a map."""
    place = folder()
    assert place is not None
    source, converter = Source(place), Converter(place)
    body = re.search(r"void llama_model_base::load_hparams.*?^\}", source.texts["llama-model.cpp"], re.MULTILINE | re.DOTALL)
    assert body is not None
    common, read = source.keys(body[0]), source.read()
    written = {name: keys for name, keys in converter.written().items() if name in read}
    usual = {key for key in set().union(*written.values()) if sum(key in keys for keys in written.values()) > len(written) / 2}
    written["clip"] |= {text.removeprefix("clip.") for text in converter.texts.values() if text.startswith("clip.")}
    plain = {name: {re.sub(r"\{\w+\}", "*", key) for key in read[name] | keys} for name, keys in written.items()}
    return {"written": sorted(usual - common),
            "others": {name: sorted(keys - common - usual) for name, keys in sorted(plain.items())
                       if name not in table()["architectures"]}}


def read_by_all() -> dict[str, list[str]]:
    """What llama.cpp reads beside `common`, by architecture with a map: as `architectures` of the table has it."""
    place = folder()
    assert place is not None
    common, read = set(table()["common"]), Source(place).read()
    return {name: sorted(read[name] - common) for name in table()["architectures"]}


def main() -> None:
    """Write the parts into the table."""
    text = re.sub(r',\n "written":.*', "\n}\n", TABLE.read_text(), flags=re.DOTALL)
    own = recorded()
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(keys)}" for name, keys in own["others"].items())
    parts = f',\n "written": {json.dumps(own["written"])},\n "others": {{\n{rows}\n }}\n}}\n'
    TABLE.write_text(text.removesuffix("\n}\n") + parts)


if __name__ == "__main__":
    main()
