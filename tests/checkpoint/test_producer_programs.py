"""Layers in checkpoints that producers write or load, each setting of theirs changed: qdsl computes what their programs compute.

tests/data/programs has the answers of their programs; tests/support/producer_programs.py records them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

import qdsl
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.models.load import LoadError
from qdsl.runtime import FormatError
from tests.support.formats import same_bits
from tests.support.paths import ROOT
from tests.support.producer_answers import LAYER, SIZE, Answer, recorded, x

# Relative errors of results where programs round x, or products and weights to halves: by the longest start of a label.
ROUNDED = {"": 1e-5, "bitsandbytes 4": 5e-3, "bitsandbytes 8": 1e-2, "bitnet": 1e-2, "torchao Int8Dynamic": 2e-2, "gptq": 1e-3,
           "awq": 1e-3, "auto-round": 1e-3, "modelopt": 3e-2, "modelopt class = INT4": 1e-5,
           "modelopt packed": 1e-6, "quark": 3e-2,
           "quark scheme = mxfp4": 7e-2, "quark scheme = nvfp4": 7e-2,
           "quark scheme = mxfp4_weight_only": 1e-5, "compressed-tensors": 2e-3, "quanto activations": 4e-2}
# Of what programs write, that which qdsl does not read: part of the label -> part of the sentence.
REFUSED = {
    "hqq nbits = 6": "says bits = 6", "hqq nbits = 5": "says bits = 5", "hqq view_as_float = True": "has dtype float32",
    "hqq channel_wise = False": "has shape [64, 128]", "weight_dtype = torch.float8_e5m2": "has dtype float8_e5m2",
    "bitnet linear_class = autobitlinear": "whose bias is scaled", "quantization_mode = online": "quantization_mode is 'online'",
    "mixed_bits": "mixed_bits is {",
    "gptq v1 rotation": "rotation is 'hadamard'", "gptq v1 mock_quantization": "mock_quantization is True",
    "quark scheme = amdfp4_g32": "scale_format = e5m3, but",
    "quark scheme = amdfp4_global": "global_quant_config.weight = a list of 2; the tensors fit ocp_mxfp4",
    "quark scheme = amdfp4": "has shape [128, 8]", "quark scheme = int4": "in a way that is not known"}


@cache
def answers(producer: str) -> list[Answer]:
    return [answer for answer in recorded() if answer.producer == producer and answer.y is not None]


RUN = sorted({answer.producer for answer in recorded() if answer.y is not None})


def label(answer: Answer) -> str:
    return f"{answer.producer} {answer.key} = {answer.value}"


def computed(path: Path, answer: Answer) -> torch.Tensor:
    """What qdsl computes with the layer.  Raises the error of a refusal."""
    path.mkdir()
    write(path / "model.safetensors", answer.tensors)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": answer.settings}))
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE, bias=f"{LAYER}.bias" in answer.tensors))
    qdsl.load_weights_(model, path, {LAYER: "0"})
    with torch.no_grad():
        y: torch.Tensor = model.float()(x() * answer.scale)
    return y


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def is_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(tensor, other[name]) for name, tensor in one.items())


def may_contradict(answer: Answer, base: Answer) -> bool:
    """Whether only a setting that qdsl uses differs, so that it can contradict the tensors."""
    own = producers().of(answer.settings.get("quant_method"))
    leaf = answer.key.rpartition(".")[2]
    return bool(answer.key) and is_same(answer.tensors, base.tensors) and leaf not in (*own.inert, *own.coarser)


@pytest.mark.parametrize("producer", RUN)
def test_a_layer_is_what_its_producers_program_computes(producer: str, tmp_path: Path) -> None:
    """Or is refused: as REFUSED says, or since a setting contradicts the tensors."""
    every, wrong = answers(producer), []
    for number, answer in enumerate(every):
        reason = next((own for name, own in REFUSED.items() if name in label(answer)), None)
        try:
            y = computed(tmp_path / str(number), answer)
        except (CheckpointError, FormatError, LoadError) as error:
            is_known = reason is not None and reason in str(error)
            if not is_known and not (may_contradict(answer, every[0]) and "correct what is wrong" in str(error)):
                wrong.append(f"{label(answer)}: {error}")
            continue
        assert answer.y is not None
        limit = ROUNDED[max((name for name in ROUNDED if label(answer).startswith(name)), key=len)]
        if not (error := difference(y, answer.y)) <= limit:
            wrong.append(f"{label(answer)}: {error:.1e}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("producer", RUN)
def test_what_is_inert_changes_no_number_of_the_program(producer: str) -> None:
    base = answers(producer)[0]
    for answer in answers(producer):
        own = producers().of(answer.settings.get("quant_method"))
        if {answer.key, answer.key.rpartition(".")[2]} & {*own.inert} and is_same(answer.tensors, base.tensors):
            assert answer.y is not None and base.y is not None and difference(answer.y, base.y) < 1e-6, label(answer)


def test_every_method_of_transformers_has_answers_or_a_reason() -> None:
    """Its program ran, or needs a GPU, or qdsl refuses the method by its name."""
    auto = pytest.importorskip("transformers.quantizers.auto")
    methods = {name.partition("_4bit")[0].partition("_8bit")[0] for name in auto.AUTO_QUANTIZATION_CONFIG_MAPPING}
    ran = {str(answer.settings.get("quant_method")) for producer in RUN for answer in answers(producer)}
    not_run = yaml.safe_load((ROOT / "tests" / "data" / "programs" / "not_run.yaml").read_text())
    unread = {method for own in producers().every for method in own.unread}
    assert methods - ran - not_run.keys() - unread - {OWN} == set() and not_run.keys() & ran == set()
