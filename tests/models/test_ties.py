"""Heads and embeddings: what a folder has decides, whatever its config says of tied weights, for every producer and every way."""

from __future__ import annotations

import copy
import dataclasses
import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import qdsl
from qdsl.checkpoint.files.folder import ORIGINAL
from qdsl.cli import app
from qdsl.models import gguf_vocabulary
from qdsl.models.language import load_language_model
from qdsl.runtime.torch.module import PackedModule
from tests.support import language_models, producer_folders
from tests.support.covering import ALL
from tests.support.producer_folders import KINDS, MLX, Kind

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
plugin = pytest.importorskip("qdsl.models.transformers")
pytestmark = pytest.mark.filterwarnings("default")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Which of the two weights are packed, and what the folder has for the head: none, the embedding's, or another.
ENDS = [((EMBEDDING,), "none"), ((HEAD,), "other"), ((), "other"), ((EMBEDDING, HEAD), "other"), ((HEAD,), "same"),
        ((EMBEDDING,), "other"), ((), "same")]
PRODUCERS = {**KINDS, "mlx": MLX}
CODED = ("hlane", "fix4", "df11")                                # all weights of these folders are packed
EVERY = [(kind, *ends) for kind in PRODUCERS for ends in (ENDS if kind not in CODED else [((), "none"), ((), "other")])]
COVERING = [(kind, *ENDS[place % len(ENDS)]) for place, kind in enumerate(PRODUCERS) if kind not in CODED]
CASES = EVERY if ALL else [*COVERING, *((kind, (), head) for kind, head in zip(CODED, ("other", "none", "other"), strict=True))]


def kind_with(name: str, packed: tuple[str, ...]) -> str | Kind:
    """A kind whose embedding and head, if named, are packed as its projections are."""
    own = PRODUCERS[name]
    if name in CODED:
        return name
    settings = own.settings
    if settings is not None and "config_groups" in settings and EMBEDDING in packed:
        groups = {key: {**group, "targets": [*group["targets"], "Embedding"]} for key, group in settings["config_groups"].items()}
        settings = {**settings, "config_groups": groups}
    return dataclasses.replace(own, embedded=own.stored, ends=frozenset(packed), settings=settings)


def head_of(kind: str) -> Tensor | None:
    """The weight of the head that a folder has."""
    embedding = language_models.weights("tied")[EMBEDDING]
    return {"none": None, "same": embedding, "other": language_models.weights("qwen3")[HEAD].flip(0)}[kind]


def truth(decoded: dict[str, Tensor]) -> Tensor:
    """The logits of a model that has these weights, tied only if they have no head."""
    weights = {HEAD: decoded[EMBEDDING], **decoded}
    return language_models.logits(language_models.filled("qwen3", weights, torch.float32))


def near(logits: Tensor, wanted: Tensor) -> bool:
    """Whether logits are as near as sums in another order are."""
    return bool((logits - wanted).norm() <= 1e-5 * wanted.norm())


def empty_model() -> Any:
    """A model on meta whose config ties head and embedding."""
    with accelerate.init_empty_weights():
        return transformers.Qwen3ForCausalLM(copy.deepcopy(language_models.config("tied"))).float()


@pytest.mark.parametrize(("kind", "packed", "head"), CASES)
def test_logits_are_those_of_the_files(kind: str, packed: tuple[str, ...], head: str, tmp_path: Path) -> None:
    """Loaded by either function, dequantized, saved packed or plain, and tied again: by a config that ties all of them."""
    folder = tmp_path / "in"
    decoded = producer_folders.write_folder(folder, kind_with(kind, packed), "tied", head_of(head))
    wanted = truth(decoded)
    model = plugin.from_pretrained(folder, dtype=torch.float32)
    assert near(language_models.logits(model), wanted)
    model.tie_weights()                                          # which resizing and adapters call
    assert near(language_models.logits(model), wanted)
    assert model.config.tie_word_embeddings == (head == "none" or (head == "same" and not packed))
    model.save_pretrained(tmp_path / "again")
    assert producer_folders.same_weights(folder, tmp_path / "again")
    dense = model.dequantize()
    assert near(language_models.logits(dense), wanted)
    dense.save_pretrained(tmp_path / "dense")
    assert near(language_models.logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")), wanted)
    assert head != "other" or not json.loads((tmp_path / "dense" / "config.json").read_text())["tie_word_embeddings"]
    filled = empty_model()
    qdsl.load_weights_(filled, folder)
    assert near(language_models.logits(filled.eval()), wanted)
    filled.tie_weights()
    assert near(language_models.logits(filled), wanted)


@pytest.mark.parametrize("head", ["none", "other"])
def test_a_converted_folder_keeps_its_head(head: str, tmp_path: Path) -> None:
    """Whatever its layers become; the text generator loads it, too."""
    packed = (HEAD,) if head == "other" else (EMBEDDING,)
    decoded = producer_folders.write_folder(tmp_path / "in", kind_with("gptq int8", packed), "tied", head_of(head))
    options = ["--to", "gptq_v2", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, ["convert", str(tmp_path / "in"), *options]).exit_code == 0
    model = load_language_model(str(tmp_path / "out"), dtype="float32").model
    assert near(language_models.logits(model), truth(decoded))
    assert isinstance(model.lm_head, PackedModule) and model.config.tie_word_embeddings == (head == "none")


@pytest.mark.parametrize(("packed", "head"), ENDS)
@pytest.mark.parametrize("command", [["convert", "--to", "gptq_v2", "--out"], ["dequantize", "-o"]], ids=lambda own: own[0])
def test_the_config_of_a_new_folder_says_what_its_files_hold(command: list[str], packed: tuple[str, ...], head: str,
                                                              tmp_path: Path) -> None:
    """Every loader then gets the logits of the files, also one that believes the config."""
    decoded = producer_folders.write_folder(tmp_path / "in", kind_with("gptq int8", packed), "tied", head_of(head))
    done = CliRunner().invoke(app, [command[0], str(tmp_path / "in"), *command[1:], str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] == (head == "none" or (head == "same" and not packed))
    if command[0] == "dequantize":
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        assert (language_models.logits(model) - (wanted := truth(decoded))).norm() <= 1e-2 * wanted.norm()


def of_transformers(path: Path) -> Tensor:
    """The logits that transformers alone computes with a plain folder, believing its config."""
    return language_models.logits(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


@pytest.mark.parametrize(("head", "format"), [("none", "hlane"), ("same", "fix4"), ("other", "hlane"), ("other", "fix4"),
                                              ("other", "df11")])
def test_compressed_folders_say_what_their_files_hold(head: str, format: str, tmp_path: Path) -> None:
    """Restored byte for byte where the original files are known; else the config is right, too."""
    own = head_of(head)
    weights = {**language_models.weights("tied"), **({} if own is None else {HEAD: own})}
    producer_folders.write_files(tmp_path / "in", weights, {"config.json": language_models.config_json("tied")}, "tied")
    wanted = truth({name: tensor.float() for name, tensor in weights.items()})
    done = CliRunner().invoke(app, ["compress", str(tmp_path / "in"), "-f", format, "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == (head != "other")
    assert near(language_models.logits(plugin.from_pretrained(tmp_path / "out", dtype=torch.float32)), wanted)
    done = CliRunner().invoke(app, ["decompress", str(tmp_path / "out"), "-o", str(tmp_path / "back")])
    assert done.exit_code == 0 and filecmp.cmp(tmp_path / "in" / "config.json", tmp_path / "back" / "config.json", shallow=False)
    (tmp_path / "out" / ORIGINAL).unlink()
    done = CliRunner().invoke(app, ["decompress", str(tmp_path / "out"), "--like", str(tmp_path / "in"), "-o",
                                    str(tmp_path / "like")])
    assert done.exit_code == 0, done.output
    assert near(of_transformers(tmp_path / "like"), wanted)


@pytest.mark.parametrize(("head", "parts"), [("none", 1), ("same", 1), ("other", 1), ("other", 2)])
def test_quantized_folders_say_what_their_files_hold(head: str, parts: int, tmp_path: Path) -> None:
    """Made of plain ones, at once or in parts."""
    own = head_of(head)
    weights = {**language_models.weights("tied"), **({} if own is None else {HEAD: own})}
    producer_folders.write_files(tmp_path / "in", weights, {"config.json": language_models.config_json("tied")}, "tied")
    for part in range(1, parts + 1):
        more = ["--shard", f"{part}/{parts}"] if parts > 1 else []
        done = CliRunner().invoke(app, ["quantize", str(tmp_path / "in"), "--format", "int8_channel", *more, "-o",
                                        str(tmp_path / "out")])
        assert done.exit_code == 0, done.output
    if parts > 1:
        done = CliRunner().invoke(app, ["merge-index", str(tmp_path / "out")])
        assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == (head != "other")


@pytest.mark.parametrize("head", ["none", "other", "same"])
def test_a_config_that_says_nothing(head: str, tmp_path: Path) -> None:
    """Of ties, which some classes of transformers then take for granted: it says so where the head has a weight of its own."""
    producer_folders.write_folder(tmp_path / "in", kind_with("gptq int8", ()), "tied", head_of(head))
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    del config["tie_word_embeddings"]
    for name, place in (("top", config), ("nested", {"model_type": "toy", "text_config": config})):
        own = {**place, "quantization_config": config["quantization_config"]}
        (tmp_path / "in" / "config.json").write_text(json.dumps(own))
        more = ["--allow-unknown"] if head == "none" else []     # Qwen3's class has a head of its own then, which is missing
        done = CliRunner().invoke(app, ["dequantize", str(tmp_path / "in"), *more, "-o", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        new = json.loads((tmp_path / name / "config.json").read_text())
        for part in (new, new.get("text_config", new)):
            assert part.get("tie_word_embeddings") is (False if head == "other" else None)


@pytest.mark.parametrize("head", ["none", "other"])
def test_a_gguf_file_has_the_head_of_its_folder(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written from a folder whose config ties it, and loaded again."""
    monkeypatch.setattr(gguf_vocabulary, "pre_tokenizer", lambda tokenizer, folder: "tiny")
    own = head_of(head)
    weights = {**language_models.weights("tied"), **({} if own is None else {HEAD: own})}
    producer_folders.write_files(tmp_path / "in", weights, {"config.json": language_models.config_json("tied")}, "tied")
    language_models.add_byte_tokenizer(tmp_path / "in", ["a few words of text"])
    done = CliRunner().invoke(app, ["quantize", str(tmp_path / "in"), "-t", "BF16", "-o", str(tmp_path / "out.gguf")])
    assert done.exit_code == 0, done.output
    model = plugin.from_pretrained(tmp_path / "out.gguf", dtype=torch.float32)
    wanted = truth({name: tensor.float() for name, tensor in weights.items()})
    assert near(language_models.logits(model), wanted)
