"""The types that llama-quantize chooses, by its dry run over empty files of every architecture that gguf-py names.

    QDSL_LLAMA_CPP=FOLDER python -m tests.support.llama_mixes

records tests/data/mixes_architectures.json.  FOLDER is vendor/llama.cpp of llama-cpp-python's source, with llama-quantize in
build/bin, as `make live` builds it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from qdsl.jobs.gguf.mixes import MIXES, Model, Tensor
from tests.support import llama_cpp
from tests.support.paths import ROOT

RECORD = ROOT / "tests/data/mixes_architectures.json"
WITH_IMATRIX = ("IQ3_XXS", "IQ4_NL", "IQ4_XS", "Q4_0", "Q5_0")   # the mixes whose rules ask for one
QUESTIONS = [*((mix, False) for mix, about in MIXES.items() if about.default), *((mix, True) for mix in WITH_IMATRIX)]
WIDTH = 256
# Of two models of an architecture: layers, heads, heads of values, experts where it has any.
SIZES = ((16, 8, 2, 4), (8, 8, 4, 8))
LAYERS = {"deci": 80, "jais2": 68, "olmo": 80, "qwen2": 80}      # of the second, where a number of layers changes the rules
# Metadata that most architectures need; what else one needs its error messages say.
COMMON: dict[str, Any] = {
    "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": WIDTH, "vocab_size": 4,
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5, "attention.key_length": 64,
    "attention.value_length": 64, "rope.dimension_count": 64, "expert_feed_forward_length": WIDTH}
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek4": {"expert_gating_func": 4, "attention.compress_ratios": [0] * 80},
    "bailingmoe3": {"kda.gate_lower_bound": -1.0}, "dflash": {"target_layers": [1]}, "eagle3": {"target_layers": [1, 2, 3]},
    "glm5-next": {"attention.indexer.kpool": 2, "attention.indexer.top_k": 2, "hyper_connection.count": 4},
    "graniteswitch": {"adapters.count": 1, "adapters.token_ids_activate": [1], "adapters.token_ids_substitute": [1]},
    "qwen4exp": {"hyper_connection.count": 4}}
ABORTS = "aborts"
UNSUPPORTED = ("gptj",)                                          # gguf-py names it, llama.cpp does not read it


def roles(architecture: str) -> list[str]:
    """The names of an architecture's tensors as gguf-py lists them; BLOCK stands for the number of a layer."""
    import gguf

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return sorted({gguf.TENSOR_NAMES[tensor].replace("{bid}", "BLOCK") for tensor in gguf.MODEL_TENSORS[arch]
                   if tensor in gguf.TENSOR_NAMES})


def architectures() -> list[str]:
    import gguf

    return sorted(name for arch, name in gguf.MODEL_ARCH_NAMES.items() if arch in gguf.MODEL_TENSORS)


def model(architecture: str, names: Sequence[str], size: int) -> Model:
    layers, heads, heads_kv, experts = SIZES[size]
    layers = LAYERS.get(architecture, layers) if size else layers
    return Model(architecture, layers, heads, heads_kv, experts if any("_exps" in name for name in names) else 0)


def tensors(model: Model, names: Sequence[str]) -> list[Tensor]:
    """All tensors: norms are vectors, experts lie in stacks."""
    expanded = [name.replace("BLOCK", str(layer)) for name in names
                for layer in range(model.layers if "BLOCK" in name else 1)]
    shapes = {name: (WIDTH,) if "norm" in name else (2, 4, WIDTH) if "_exps" in name or "_b" in name else (4, WIDTH)
              for name in expanded}
    return [Tensor(f"{name}.weight", shape, "F32" if len(shape) == 1 else "F16") for name, shape in shapes.items()]


def case(architecture: str, names: Sequence[str], size: int) -> tuple[Model, list[Tensor]]:
    """A model as the rules see it, and its tensors."""
    built = model(architecture, names, size)
    return Model("clip", 0, 0, 0) if architecture == "clip" else built, tensors(built, names)


def program() -> Path | None:
    """llama-quantize as `make live` builds it; None where it is not there."""
    folder = llama_cpp.folder()
    path = folder / "build/bin/llama-quantize" if folder else None
    return path if path and path.is_file() else None


def written(path: Path, model: Model, tensors: Sequence[Tensor], metadata: Mapping[str, Any], scale: float = 0) -> None:
    """A GGUF file of normally distributed numbers of a scale, or of zeros."""
    import gguf

    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, model.architecture)
    for name, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            add = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(name, value)
    for tensor in tensors:
        numbers = scale * draw.standard_normal(tensor.shape)
        writer.add_tensor(tensor.name, numbers.astype(np.float32 if tensor.type == "F32" else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dry_run(path: Path, mix: str, imatrix: Path | None = None) -> dict[str, str]:
    """The type of every tensor, by name, that llama-quantize chooses."""
    options = ["--imatrix", str(imatrix)] if imatrix else []
    command = [str(program()), "--dry-run", *options, str(path), mix]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    output = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(output[-3000:])
    lines = re.findall(r"^\[ *\d+/ *\d+\] (\S+) +- \[.*?\], type = +(\w+), size = .*?(?:\((\w+)\))?$", output, re.MULTILINE)
    return {name: (new or old).upper() for name, old, new in lines}


def imatrix(path: Path) -> Path:
    """Write an importance matrix of a tensor that no model has."""
    import gguf

    writer = gguf.GGUFWriter(path, "")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["none"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 1)
    for leaf in ("in_sum2", "counts"):
        writer.add_tensor(f"x.{leaf}", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sheet(types: Mapping[str, str], default: str) -> str:
    """Types as a text: the tensors that do not get the default, by type, as role:first-last,layer.

    Those that stay in F16 are listed for Q8_0 alone: no mix changes them.
    """
    layers: dict[str, dict[str, list[int]]] = {}
    for name, type in types.items():
        block = re.fullmatch(r"blk\.(\d+)\.(.*)\.weight", name)
        if type not in (default, "F32") and (type != "F16" or default == "Q8_0"):
            role = block[2] if block else "/" + name.removesuffix(".weight")
            layers.setdefault(type, {}).setdefault(role, []).append(int(block[1]) if block else 0)
    return "; ".join(f"{type} " + " ".join(f"{role}:{_ranges(sorted(places))}" if role[0] != "/" else role[1:]
                                           for role, places in sorted(roles.items())) for type, roles in sorted(layers.items()))


def _ranges(places: Sequence[int]) -> str:
    starts = [place for place in places if place - 1 not in places]
    ends = [place for place in places if place + 1 not in places]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def prepared(folder: Path, architecture: str, names: Sequence[str], size: int, scale: float = 0) -> Path:
    """A file that llama-quantize reads: metadata that it misses is added until it does.  scale: of its numbers."""
    built = model(architecture, names, size)
    path = folder / f"{architecture}.{size}.gguf"
    layers = built.layers - (architecture == "graniteswitch")    # it counts one of its own
    counts = {"block_count": layers, "attention.head_count": built.heads, "attention.head_count_kv": built.heads_kv}
    experts = {"expert_count": built.experts, "expert_used_count": 2} if built.experts else {}
    special = {"hrm.layers_per_stack": layers // 2} if architecture == "hrm_text" else SPECIAL.get(architecture, {})
    metadata = {f"{architecture}.{key}": value for key, value in (counts | experts | COMMON | special).items()}
    for _ in range(40):
        written(path, built, tensors(built, names), metadata, scale)
        try:
            dry_run(path, "Q8_0")
            return path
        except RuntimeError as error:
            missing = re.search(r"(array )?key not found in model: (\S+)", str(error))
            wrong = re.search(r"key (\S+) has wrong type \S+ but expected type (\w+)", str(error))
            if not (missing or wrong):
                raise
            if missing:
                metadata[missing[2]] = [True] * built.layers if missing[1] else 1
            elif wrong:
                metadata[wrong[1]] = {"f32": 1.0, "bool": True, "i32": [16] * 4, "arr": [1] * layers}[wrong[2]]
    raise AssertionError(f"{architecture}: its metadata has no end")


def answer(path: Path, mix: str, imatrix: Path | None) -> str:
    """What a model's tensors get; ABORTS where the program does, which reads no counts of heads for clip."""
    try:
        return sheet(dry_run(path, mix, imatrix), str(MIXES[mix].default))
    except RuntimeError as error:
        if "fatal error" in str(error):
            return ABORTS
        raise


def record(folder: Path, importance: Path, architecture: str, names: Sequence[str], size: int) -> list[str]:
    """What a model's tensors get of every question.  importance: the file of an importance matrix."""
    path = prepared(folder, architecture, names, size)
    try:
        return [answer(path, mix, importance if with_imatrix else None) for mix, with_imatrix in QUESTIONS]
    finally:
        path.unlink()


def main() -> None:
    """Record all architectures: their names once, and each answer once."""
    place = llama_cpp.folder()
    assert place is not None and program() is not None, "QDSL_LLAMA_CPP names no folder with build/bin/llama-quantize"
    sys.path.insert(0, str(place / "gguf-py"))
    texts: dict[str, int] = {}
    models = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        wanted = [(name, roles(name), size) for name in architectures() if name not in UNSUPPORTED for size in range(len(SIZES))]
        importance = imatrix(Path(folder, "imatrix.gguf"))
        answers = pool.map(lambda case: record(Path(folder), importance, *case), wanted)
        for (name, names, _), answer in zip(wanted, answers, strict=True):
            row = models.setdefault(name, {"tensors": " ".join(names), "answers": []})
            row["answers"].append([texts.setdefault(text, len(texts)) for text in answer])
    data = {"recorded": llama_cpp.release(), "questions": [mix + "+imatrix" * with_imatrix for mix, with_imatrix in QUESTIONS],
            "texts": list(texts), "architectures": models}
    RECORD.write_text(re.sub(r"(?<=\d),\n +(?=\d)", ",", json.dumps(data, indent=0)) + "\n")


if __name__ == "__main__":
    main()
