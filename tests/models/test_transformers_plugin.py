"""What a model of transformers does with packed weights, and what it refuses."""

from __future__ import annotations

import copy
import filecmp
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import qdsl
from qdsl.checkpoint.detect.guard import FIELD, SENTENCE, with_guard
from qdsl.checkpoint.files import references
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.models.plan import LoadError
from qdsl.runtime.torch.layers import QuantizedLinear
from tests.support import language_models, producer_folders, tiny_models

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
plugin = pytest.importorskip("qdsl.models.transformers")
pytestmark = pytest.mark.filterwarnings("default")
Auto = transformers.AutoModelForCausalLM
QdslConfig = plugin.QdslConfig


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 folder of a Qwen3."""
    return language_models.write_plain(tmp_path_factory.mktemp("plain") / "folder", "qwen3")


@pytest.fixture(scope="module")
def own(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with qdsl's own settings, quantized on the way and saved by transformers' method."""
    folder = tmp_path_factory.mktemp("own") / "folder"
    Auto.from_pretrained(plain, quantization_config=QdslConfig("q4_0")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 folder of another producer."""
    folder = tmp_path_factory.mktemp("fp8") / "folder"
    producer_folders.write_folder(folder, "fp8 block", "qwen3")
    return folder


def test_what_is_not_there_is_said_at_once(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would ask the hub for most of a minute, also for what cannot be one of its repositories."""
    monkeypatch.setattr(references, "getproxies", dict)
    monkeypatch.setattr(references, "_endpoint", lambda: "http://127.0.0.1:9")
    began = time.monotonic()
    for read in (plugin.from_pretrained, plugin.tokenizer, lambda ref: plugin.from_pretrained(own, base=ref)):
        for ref in ("nope", "owner/nope", tmp_path / "nope", tmp_path / "nope.gguf", r"C:\models\nope", "two words"):
            with pytest.raises(CheckpointError, match="no file or folder"):
                read(ref)
    assert time.monotonic() - began < 3


# -- quantized on the way --------------------------------------------------------------------------------------------------


def test_a_plain_folder_is_quantized_on_the_way(plain: Path, own: Path) -> None:
    """Linears but the head are packed, as `quantize_` packs them; a folder of them is guarded, and loads without settings."""
    online = Auto.from_pretrained(plain, quantization_config=QdslConfig("q4_0"))
    by_hand = Auto.from_pretrained(plain)
    qdsl.quantize_(by_hand, "q4_0", ["lm_head"])
    assert language_models.logits(online).equal(language_models.logits(by_hand))
    assert type(online.lm_head) is torch.nn.Linear and isinstance(online.model.layers[0].mlp.up_proj, QuantizedLinear)
    config = json.loads((own / "config.json").read_text())
    assert config[FIELD] == SENTENCE and config["quantization_config"]["format"] == "q4_0"
    loaded = Auto.from_pretrained(own)
    assert language_models.logits(loaded).equal(language_models.logits(online))
    assert language_models.greedy(loaded).equal(language_models.greedy(online))


def test_damaged_files_are_found_on_request(own: Path, tmp_path: Path) -> None:
    """By the checksums that `save_pretrained` wrote."""
    folder = Path(shutil.copytree(own, tmp_path / "in"))
    Auto.from_pretrained(folder, quantization_config=QdslConfig(verify=True))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged; write or download it again"):
        Auto.from_pretrained(folder, quantization_config=QdslConfig(verify=True))
    Auto.from_pretrained(folder, quantization_config=QdslConfig())


def test_options_skip_and_dictionaries(plain: Path) -> None:
    """Options reach the quantizer, `skip` keeps layers dense, and a dictionary does as a QdslConfig."""
    config = QdslConfig("int_group", storage="gptq_v2", bits=4, group=32, skip=["up_proj"])
    model = Auto.from_pretrained(plain, quantization_config=config)
    packed = model.model.layers[0].mlp.down_proj.packed
    assert (packed.storage, packed.params["group"]) == ("gptq_v2", 32)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    again = Auto.from_pretrained(plain, quantization_config=config.to_dict())
    assert language_models.logits(again).equal(language_models.logits(model))


@pytest.mark.parametrize(("config", "message"), [
    ({}, "has no packed weights: name a format"), ({"format": "q9"}, "no format 'q9'"),
    ({"format": "q4_0", "bits": 3}, "has no parameter 'bits'")])
def test_a_wrong_config_is_an_error(plain: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Auto.from_pretrained(plain, quantization_config=QdslConfig(**config))


def test_a_config_needs_a_format_for_options() -> None:
    with pytest.raises(ValueError, match="needs a format"):
        QdslConfig(storage="gguf")
    with pytest.raises(ValueError, match="give \\['lm_head'\\]"):
        QdslConfig("q4_0", skip="lm_head")


def test_a_format_that_contradicts_the_folder_is_an_error(own: Path, fp8: Path) -> None:
    for folder in (own, fp8):
        with pytest.raises(LoadError, match="'q8_0' contradicts the checkpoint"):
            Auto.from_pretrained(folder, quantization_config=QdslConfig("q8_0"))


# -- whose folder it is ----------------------------------------------------------------------------------------------------


def test_a_foreign_folder_stays_with_transformers(fp8: Path, tmp_path: Path) -> None:
    """Without a QdslConfig the library's own quantizer loads it; with one it is saved as its producer's."""
    theirs = Auto.from_pretrained(fp8)
    assert type(theirs.model.layers[0].mlp.up_proj) is torch.nn.Linear       # decoded, as it does without a GPU
    ours = Auto.from_pretrained(fp8, quantization_config=QdslConfig())
    ours.config.use_cache = False
    ours.save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8" and FIELD not in config
    assert config["use_cache"] is False and producer_folders.same_weights(fp8, tmp_path / "out")


def test_registering_twice_changes_nothing() -> None:
    before = transformers.modeling_utils.get_hf_quantizer, transformers.PreTrainedModel.save_pretrained
    plugin.register()
    assert (transformers.modeling_utils.get_hf_quantizer, transformers.PreTrainedModel.save_pretrained) == before


def test_a_plain_model_is_saved_as_before(plain: Path, tmp_path: Path) -> None:
    Auto.from_pretrained(plain).save_pretrained(tmp_path)
    assert producer_folders.same_weights(plain, tmp_path)


# -- saving ----------------------------------------------------------------------------------------------------------------


def test_a_config_that_was_changed_is_saved(own: Path, tmp_path: Path) -> None:
    """Unchanged, all files are the same bytes; changed, the config keeps its settings and its guard."""
    model = Auto.from_pretrained(own)
    model.save_pretrained(tmp_path / "same")
    assert all(filecmp.cmp(own / path.name, path, shallow=False) for path in (tmp_path / "same").iterdir())
    model.config.use_cache = False
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "changed")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (own, tmp_path / "changed"))
    assert after["use_cache"] is False and after[FIELD] == SENTENCE
    assert after["quantization_config"] == before["quantization_config"]
    assert json.loads((tmp_path / "changed" / "generation_config.json").read_text())["max_new_tokens"] == 7
    assert producer_folders.same_weights(own, tmp_path / "changed")
    with pytest.raises(ValueError, match="mapped from this folder"):
        model.save_pretrained(own)


def test_a_config_that_was_changed_before_loading_is_saved(own: Path, tmp_path: Path) -> None:
    """As keywords or as a config; another dtype alone changes no file."""
    config = transformers.AutoConfig.from_pretrained(own)
    config.rms_norm_eps = 1e-3
    for number, options in enumerate(({"rms_norm_eps": 1e-3}, {"config": config}, {"config": config})):
        model = Auto.from_pretrained(own, **options)
        model.save_pretrained(tmp_path / str(number))
        again = Auto.from_pretrained(tmp_path / str(number))
        assert again.config.rms_norm_eps == 1e-3 and language_models.logits(again).equal(language_models.logits(model))
    Auto.from_pretrained(own, dtype=torch.float32).save_pretrained(tmp_path / "same")
    assert filecmp.cmp(own / "config.json", tmp_path / "same" / "config.json", shallow=False)


def test_other_weights_of_the_folder_are_left_alone(own: Path, tmp_path: Path) -> None:
    """A variant and the original's weights may lie next to those that transformers chooses."""
    (tmp_path / "in").mkdir()
    for path in own.iterdir():
        (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    for name in ("model.fp16.safetensors", "consolidated.safetensors"):
        (tmp_path / "in" / name).write_bytes((own / "model.safetensors").read_bytes())
    expected = language_models.logits(Auto.from_pretrained(own))
    for variant in (None, "fp16"):
        assert language_models.logits(Auto.from_pretrained(tmp_path / "in", variant=variant)).equal(expected)
    Auto.from_pretrained(tmp_path / "in").save_pretrained(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("offload", [accelerate.cpu_offload, accelerate.disk_offload])
def test_offloaded_weights_run_and_are_saved(own: Path, tmp_path: Path, offload: Any) -> None:
    model = Auto.from_pretrained(own)
    logits = language_models.logits(model)
    options = {"offload_dir": tmp_path / "disk"} if offload is accelerate.disk_offload else {}
    offload(model, execution_device=torch.device("cpu"), **options)
    assert all(tensor.is_meta for tensor in model.parameters())
    assert language_models.logits(model).equal(logits)
    model.save_pretrained(tmp_path / "out")
    assert producer_folders.same_weights(own, tmp_path / "out") and all(tensor.is_meta for tensor in model.parameters())


# -- placement and dtypes --------------------------------------------------------------------------------------------------


SPLIT = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
         "model.rotary_emb": "cpu", "lm_head": "disk"}


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}, SPLIT], ids=["auto", "cpu", "one", "split"])
def test_device_maps(own: Path, device_map: Any) -> None:
    """Weights on the disk stay mapped from it, and no folder for offloading is needed."""
    asked = copy.deepcopy(device_map)
    model = Auto.from_pretrained(own, device_map=device_map)
    assert language_models.logits(model).equal(language_models.logits(Auto.from_pretrained(own)))
    assert device_map == asked


def test_the_dtype_of_plain_numbers(own: Path) -> None:
    """float32 products of the same codes; settings without a dtype take none from stored codes."""
    model = Auto.from_pretrained(own, dtype=torch.float32)
    assert model.dtype == torch.float32 and model.model.layers[0].mlp.up_proj.compute_dtype == torch.float32
    assert language_models.logits(model).dtype == torch.float32


def test_a_config_without_a_dtype(fp8: Path, tmp_path: Path) -> None:
    """Codes of 8 bits are no dtype for plain numbers."""
    (tmp_path / "in").mkdir()
    for path in fp8.iterdir():
        (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    config = json.loads((fp8 / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    model = Auto.from_pretrained(tmp_path / "in", quantization_config=QdslConfig())
    assert model.dtype == torch.bfloat16 and model.lm_head.weight.dtype == torch.bfloat16


def test_tensor_parallelism_is_refused(own: Path) -> None:
    with pytest.raises(ValueError, match="shards plain weights alone"):
        Auto.from_pretrained(own, tp_plan="auto")


# -- what a model does -----------------------------------------------------------------------------------------------------


def test_compiled_whole(own: Path) -> None:
    model = Auto.from_pretrained(own)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert compiled(language_models.IDS).logits.equal(model(language_models.IDS).logits)


@pytest.mark.parametrize(("kind", "model"), [("hlane", "tied"), ("df11", "qwen3"), ("fp8 block", "qwen3")])
def test_dequantized(kind: str, model: str, tmp_path: Path) -> None:
    """Plain layers with the decoded weights, which transformers saves and loads without qdsl's part in it."""
    decoded = producer_folders.write_folder(tmp_path / "in", kind, model)
    packed = plugin.from_pretrained(tmp_path / "in", dtype=torch.float32)
    counts = [packed.num_parameters(exclude_embeddings=exclude) for exclude in (False, True)]
    dense = packed.dequantize()
    assert counts == [dense.num_parameters(exclude_embeddings=exclude) for exclude in (False, True)]
    assert not any(isinstance(module, QuantizedLinear) for module in dense.modules())
    assert (dense.lm_head.weight is dense.model.embed_tokens.weight) == (model == "tied")
    reference = language_models.logits(language_models.filled(model, decoded, torch.float32))
    assert language_models.logits(dense).equal(reference)
    dense.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert language_models.logits(Auto.from_pretrained(tmp_path / "out")).equal(reference)


def test_embeddings_are_resized_where_they_are_dense(own: Path, tmp_path: Path) -> None:
    """Packed ones are refused with the way to make them dense."""
    model = Auto.from_pretrained(own)
    model.resize_token_embeddings(200, mean_resizing=False)
    assert model(language_models.IDS).logits.shape[-1] == 200
    producer_folders.write_folder(tmp_path / "in", "hlane", "tied")
    with pytest.raises(ValueError, match="QdslConfig\\(skip="):
        Auto.from_pretrained(tmp_path / "in").resize_token_embeddings(200)
    dense = Auto.from_pretrained(tmp_path / "in", quantization_config=QdslConfig(skip=["embed_tokens", "lm_head"]))
    dense.resize_token_embeddings(200, mean_resizing=False)
    assert dense(language_models.IDS).logits.shape[-1] == 200 and dense.lm_head.weight is dense.model.embed_tokens.weight


def test_copies(own: Path) -> None:
    model = Auto.from_pretrained(own)
    assert language_models.logits(copy.deepcopy(model)).equal(language_models.logits(model))


def test_a_trainer_trains_adapters(fp8: Path, tmp_path: Path) -> None:
    """transformers' Trainer takes a packed model with adapters, with checkpointed activations, and refuses one without."""
    peft = pytest.importorskip("peft")
    arguments = transformers.TrainingArguments(tmp_path / "out", max_steps=4, learning_rate=1e-2, logging_steps=1, report_to=[],
                                               use_cpu=True, gradient_checkpointing=True, disable_tqdm=True)
    base = Auto.from_pretrained(fp8, quantization_config=QdslConfig(), dtype=torch.float32)
    with pytest.raises(ValueError, match="attach trainable adapters"):
        transformers.Trainer(base, arguments)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    data = [{"input_ids": row, "labels": row} for row in language_models.IDS for _ in range(4)]
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    unloaded = model.unload().state_dict()
    assert all(unloaded[name].view(torch.uint8).equal(tensor.view(torch.uint8)) for name, tensor in before.items())


# -- other classes of a checkpoint -----------------------------------------------------------------------------------------


def test_the_base_model_of_a_checkpoint(own: Path, tmp_path: Path) -> None:
    """AutoModel calls weights without 'model.'; it is saved with the checkpoint's names, and loads again."""
    base = transformers.AutoModel.from_pretrained(own)
    causal = Auto.from_pretrained(own)
    hidden = causal.model(language_models.IDS).last_hidden_state
    assert base(language_models.IDS).last_hidden_state.equal(hidden)
    base.save_pretrained(tmp_path / "base")
    again = transformers.AutoModel.from_pretrained(tmp_path / "base")
    assert again(language_models.IDS).last_hidden_state.equal(hidden)


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    """Mamba-2's limit of time steps is infinite, which transformers 5 writes as an object and older releases as Infinity."""
    tiny_models.tiny_model("mamba2").save_pretrained(tmp_path / "plain")
    stored = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert stored["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    model = Auto.from_pretrained(tmp_path / "plain", quantization_config=QdslConfig("int8_channel"), dtype=torch.float32)
    wanted = model(torch.arange(12).view(1, 12)).logits
    model.save_pretrained(tmp_path / "object")
    config = json.loads((tmp_path / "object" / "config.json").read_text())
    shutil.copytree(tmp_path / "object", tmp_path / "number")
    (tmp_path / "number" / "config.json").write_text(json.dumps({**config, "time_step_limit": [0.0, float("inf")]}))
    for name in ("object", "number"):
        loaded = Auto.from_pretrained(tmp_path / name, dtype=torch.float32)
        assert loaded.config.time_step_limit[1] == float("inf")
        assert loaded(torch.arange(12).view(1, 12)).logits.equal(wanted)
        loaded.save_pretrained(tmp_path / f"{name} again")
        assert filecmp.cmp(tmp_path / name / "config.json", tmp_path / f"{name} again" / "config.json", shallow=False)


def test_a_model_without_an_embedding(tmp_path: Path) -> None:
    """CLIP names neither an input embedding nor a head."""
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
              "patch_size": 14}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    transformers.CLIPModel(config).save_pretrained(tmp_path / "plain")
    packed = transformers.CLIPModel.from_pretrained(tmp_path / "plain", quantization_config=QdslConfig("q8_0"))
    packed.save_pretrained(tmp_path / "packed")
    again = transformers.CLIPModel.from_pretrained(tmp_path / "packed")
    inputs = {"input_ids": torch.arange(1, 9)[None], "pixel_values": torch.ones(1, 3, 28, 28)}
    assert again(**inputs).logits_per_image.equal(packed(**inputs).logits_per_image)


def test_a_layer_that_multiplies_by_its_weight_stays_dense(tmp_path: Path) -> None:
    """As dt_proj of Mamba does."""
    config = transformers.MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, state_size=8, time_step_rank=32)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    model = transformers.MambaForCausalLM.from_pretrained(tmp_path, quantization_config=QdslConfig("q8_0"))
    assert type(model.backbone.layers[0].mixer.dt_proj) is torch.nn.Linear
    assert isinstance(model.backbone.layers[0].mixer.in_proj, QuantizedLinear)
    assert model(torch.arange(1, 9)[None]).logits.isfinite().all()


def test_no_matrix_is_left_random(own: Path, tmp_path: Path) -> None:
    """A head that no file holds is an error, unless the caller names it."""
    classifier = transformers.AutoModelForSequenceClassification
    with pytest.raises(LoadError, match=r"1 parameters of the model are not in the checkpoint: score\.weight"):
        classifier.from_pretrained(own)
    model = classifier.from_pretrained(own, quantization_config=QdslConfig(skip=["score"]))
    assert model.score.weight.float().std() > 0


def test_a_layer_that_is_missing_is_an_error(fp8: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_bytes((fp8 / "config.json").read_bytes())
    with Folder(fp8) as folder:
        tensors = {name: folder.tensor(name) for name in folder.names() if "layers.0.mlp.up_proj" not in name}
        write(tmp_path / "in" / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(LoadError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        Auto.from_pretrained(tmp_path / "in", quantization_config=QdslConfig())


def test_the_text_model_of_a_composite_checkpoint(tmp_path: Path) -> None:
    """Gemma3ForCausalLM reads `text_config`, whose guard is taken off too; without the names of its weights it is refused."""
    text = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 32, "pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
              "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    torch.manual_seed(0)
    gemma = transformers.Gemma3ForConditionalGeneration
    gemma(config).bfloat16().save_pretrained(tmp_path / "plain")
    packed = gemma.from_pretrained(tmp_path / "plain", quantization_config=QdslConfig("q4_0"))
    packed.save_pretrained(tmp_path / "packed")
    guarded_config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert guarded_config == with_guard(guarded_config) and guarded_config["text_config"][FIELD] == SENTENCE
    again = gemma.from_pretrained(tmp_path / "packed")
    ids = torch.arange(1, 9)[None]
    expected = packed(ids).logits
    assert again(ids).logits.equal(expected)
    with pytest.raises(LoadError, match="embed_tokens"):         # transformers itself would start from random weights
        transformers.Gemma3ForCausalLM.from_pretrained(tmp_path / "packed")
    text_only = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path / "packed", key_mapping={r"^language_model\.": ""})
    assert text_only(ids).logits.equal(expected)
    again.save_pretrained(tmp_path / "again")
    assert producer_folders.same_weights(tmp_path / "packed", tmp_path / "again")


# -- the library -----------------------------------------------------------------------------------------------------------


def test_a_release_without_a_part_of_the_contract_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing fails with a sentence when a method is gone or takes other parameters."""
    from qdsl.models.transformers import contract

    contract.check()
    monkeypatch.delattr(transformers.PreTrainedModel, "mark_tied_weights_as_initialized")
    with pytest.raises(ImportError, match=r"transformers \d+\.\d+\.\d+ has no PreTrainedModel\.mark_tied"):
        contract.check()
    monkeypatch.undo()
    monkeypatch.setattr(transformers.quantizers.HfQuantizer, "update_weight_conversions", lambda self, model: None)
    with pytest.raises(ImportError, match="update_weight_conversions without weight_conversions"):
        contract.check()


def test_a_release_that_loads_in_another_way_is_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that is there and no longer called ends in an error, not in weights that were never placed."""
    monkeypatch.setattr(transformers.PreTrainedModel, "_finalize_model_loading", staticmethod(lambda model, config, info: info))
    with pytest.raises(RuntimeError, match="loads weights in another way"):
        Auto.from_pretrained(own)
