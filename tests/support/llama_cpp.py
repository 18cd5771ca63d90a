"""llama.cpp's converter and llama-perplexity: `make live` unpacks and builds them from the source of llama-cpp-python."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

# The folder with `conversion` and `gguf-py`; the folder above its name states the release.
PLACES = sorted(ROOT.glob(".venv-live/llama_cpp_python-*/vendor/llama.cpp"))

# Numbers that the converter wants in configs, or functions of these, and that transformers no longer writes.
LACKING: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0}, "gpt_neox": {"rotary_pct": 0.25},
    "minimax_m2": {"scoring_func": "sigmoid", "rotary_dim": lambda numbers: numbers["head_dim"]},
    "bamba": {"attn_rotary_emb": lambda numbers: numbers["hidden_size"] // numbers["num_attention_heads"] // 2},
    "deepseek_v3": {"scoring_func": "sigmoid"}, "glm4_moe_lite": {"scoring_func": "sigmoid"},
    "afmoe": {"route_norm": True}, "exaone_moe": {"scoring_func": "sigmoid"},
    "hunyuan_v1_moe": {"moe_intermediate_size": [160], "moe_topk": [1], "num_shared_expert": [1]},
}


def folder() -> Path | None:
    """Where the converter lies; None where it is not there."""
    variable = os.environ.get("QDSL_LLAMA_CPP")
    places = [Path(variable)] if variable else PLACES
    return next((place for place in reversed(places) if (place / "conversion").is_dir()), None)


def release() -> str:
    """The release of the source distribution, as 'llama-cpp-python 0.3.36'."""
    place = folder()
    assert place is not None
    name, _, version = place.resolve().parents[1].name.rpartition("-")
    return f"{name.replace('_', '-')} {version}"


def converter(model: Path, type: str = "ALL_F32") -> Any:
    """The converter for a folder of transformers, without its vocabulary.  type: of the file, as gguf names it."""
    place = folder()
    assert place is not None
    if str(place) not in sys.path:
        sys.path[:0] = [str(place), str(place / "gguf-py")]
        for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
            del sys.modules[name]                                # the package of another release
    import conversion
    import gguf

    logging.getLogger("hf-to-gguf").setLevel(logging.ERROR)
    logging.getLogger("gguf.gguf_writer").setLevel(logging.ERROR)
    numbers = conversion.ModelBase.load_hparams(model, False)
    kind = conversion.get_model_class(conversion.get_model_architecture(numbers, conversion.ModelType.TEXT))
    if hasattr(kind, "no_mtp"):
        kind.no_mtp = True                                       # transformers' models have no layers of that kind
    run = kind(model, gguf.LlamaFileType[type], model / "model.gguf", eager=True, model_name=numbers["model_type"])
    run = getattr(run, "impl", run)                              # a class that chooses another
    if hasattr(run, "_attn_layers") and "layer_types" in numbers:           # it knows the names before transformers 5
        run._attn_layers = [layer for layer, kind in enumerate(numbers["layer_types"]) if kind == "full_attention"]
        run._ssm_layers = [layer for layer in range(run.block_count) if layer not in run._attn_layers]
    run.hparams |= {key: value(numbers) if callable(value) else value
                    for key, value in LACKING.get(numbers["model_type"], {}).items()}
    run.set_vocab = lambda: _add_tokens(run.gguf_writer)
    return run


def _add_tokens(writer: Any) -> None:
    """What stands in the vocabulary of a file and belongs to the config."""
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def tensors(model: Path) -> tuple[str, Mapping[str, Any]]:
    """The architecture, and the tensors of the GGUF file as numpy arrays, without writing it."""
    run = converter(model)
    import gguf

    run.prepare_tensors()
    arrays = {name: info.tensor for shard in run.gguf_writer.tensors for name, info in shard.items()}
    return gguf.MODEL_ARCH_NAMES[run.model_arch], arrays


def converted(model: Path, type: str = "ALL_F32") -> Path:
    """The GGUF file of a folder of transformers; type: as `converter` takes it."""
    return written(converter(model, type))


def written(run: Any) -> Path:
    """The file that a converter writes."""
    write = run.gguf_writer.write_tensors_to_file
    run.gguf_writer.write_tensors_to_file = lambda progress: write()         # without its bar
    run.write()
    return Path(run.fname_out)


def tokenizers(place: Path) -> dict[str, Any]:
    """The converter's text, and its names of how tokenizers split text, by the hashes of the text's tokens."""
    source = (place / "conversion" / "base.py").read_text()
    (text,) = re.findall(r"chktxt = ('.*')\n", source)
    hashes = re.findall(r'if chkhsh == "([0-9a-f]{64})":\n +# ref: \S+\n +res = "([^"]+)"', source)
    return {"recorded": release(), "text": ast.literal_eval(text), "hashes": dict(hashes)}


# -- llama-perplexity -------------------------------------------------------------------------------------------------------

# Keys and values in float32, and plain attention, so that sums alone are added in another order.
EXACT = ("-ctk", "f32", "-ctv", "f32", "-fa", "off", "-t", "2")
FIGURES = {"perplexity": r"PPL(?: =|\(Q\) +:) +(\S+)", "perplexity_error": r"PPL = .*\+/- +(\S+)",
           "divergence": r"Mean +KLD: +(\S+)", "percentile": r"99\.0% +KLD: +(\S+)",
           "agreement": r"Same top p: +(\S+)"}


def perplexity_program() -> str | None:
    """llama-perplexity: of QDSL_LLAMA_PERPLEXITY, of the PATH, or as `make live` builds it; None where it is not there."""
    built = [str(path) for place in PLACES for path in place.glob("build/bin/llama-perplexity")]
    return os.environ.get("QDSL_LLAMA_PERPLEXITY") or shutil.which("llama-perplexity") or next(iter(built), None)


def perplexity(model: Path, text: Path, base: Path, *options: str) -> dict[str, float]:
    """The figures that llama-perplexity prints for a model on a text; `base` is the file of log-probabilities."""
    program = perplexity_program()
    assert program is not None
    command = [program, "-m", str(model), "-f", str(text), "-c", "512", "-b", "512", *EXACT, "--kl-divergence-base", str(base)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-2000:]
    matches = {name: re.search(pattern, output) for name, pattern in FIGURES.items()}
    return {name: float(match[1]) for name, match in matches.items() if match}


def base_tokens(base: Path, context: int = 512) -> list[list[int]]:
    """The chunks of tokens that a file of log-probabilities is about."""
    with base.open("rb") as file:
        magic, length, _, count = struct.unpack("<8sIII", file.read(20))
        assert (magic, length) == (b"_logits_", context)
        return [list(struct.unpack(f"<{context}i", file.read(4 * context))) for _ in range(count)]


def add_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer.json of so many tokens, which the converter counts for some models."""
    vocabulary = {f"token{number}": number for number in range(size)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
