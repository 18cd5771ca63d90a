"""GGUF language models without one of their keys or tensors compute what llama.cpp does then, or are refused with its name.

See tests/support/gguf_absent.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from qdsl.checkpoint.detect.gguf_keys import table
from qdsl.models.gguf_maps import FOLDER, GgufMap
from qdsl.models.plan import LoadError
from tests.support import gguf_cases
from tests.support.covering import ALL
from tests.support.gguf_absent import answers, refused, without

plugin = pytest.importorskip("qdsl.models.transformers")
keys = pytest.importorskip("tests.models.test_gguf_keys")
pytestmark = pytest.mark.filterwarnings("default")

STEP = 37                                                        # between absences that `make test` takes; `make live` takes all
# Tensors that models do without if llama.cpp does.  Others may be refused, as gates, which llama.cpp leaves out.
OPTIONAL = re.compile(r"\.bias|exp_probs_b|^output\.weight")
EVERYTHING = [(model_type, name) for model_type, own in answers().items() for name in own]


@pytest.mark.parametrize("model_type", answers())
def test_the_table_has_what_llama_cpp_needs(model_type: str) -> None:
    """Not more than that.  What models load without, of this, is what `test_a_file_without_it` looks for."""
    rows = {*table()["required"].get(model_type, ()), *table()["needed"].get(model_type, ())}
    assert rows - refused(model_type) == set()


@pytest.mark.parametrize(("model_type", "name"), EVERYTHING if ALL else EVERYTHING[::STEP])
def test_a_file_without_it(model_type: str, name: str, tmp_path: Path) -> None:
    check(model_type, name, tmp_path)


def check(model_type: str, name: str, folder: Path) -> None:
    """Logits are llama.cpp's, or the file is refused with the name of what is missing."""
    recorded = answers()[model_type][name]
    key = name.removeprefix(f"{GgufMap.read(FOLDER / f'{model_type}.json').architecture}.")
    path = gguf_cases.write_case(folder / "model.gguf", without(gguf_cases.tiny(model_type), name), gguf_cases.Case())
    try:
        model = plugin.from_pretrained(path, dtype=torch.float32)
    except LoadError as error:
        assert recorded is None or (key == name and not OPTIONAL.search(name)), error
        if key == name or key in table()["required"].get(model_type, ()):        # others give matrices another size
            assert re.search(re.escape(name.removesuffix(".weight")).replace(r"\{block\}", r"\d+"), str(error)), error
        return
    assert recorded is not None, "llama.cpp refuses it"
    expected = torch.tensor(recorded or keys.ANSWERS[model_type]["unchanged"])
    with torch.no_grad():
        logits = gguf_cases.sample(model(torch.tensor([gguf_cases.TOKENS])).logits[0].float())
    assert float((logits - expected).norm() / expected.norm()) < keys.TABLED.get(model_type, keys.CLOSE)
