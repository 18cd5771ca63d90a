"""llama.cpp's logits today, of its library: those that are recorded, for every model type whose config is in files.

Needs the library: see tests/support/llama_library.py.  Without it nothing here is run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qdsl.models.plan import LoadError
from tests.support import gguf_cases, llama_library

plugin = pytest.importorskip("qdsl.models.transformers")
keys = pytest.importorskip("tests.models.test_gguf_keys")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("gguf"),
              pytest.mark.skipif(llama_library.folder() is None, reason="needs llama.cpp's library: see make live")]


@pytest.mark.parametrize("model_type", keys.ANSWERS)
def test_logits_are_those_of_this_library(model_type: str, tmp_path: Path) -> None:
    """All logits of every case, not only those that are recorded."""
    own = gguf_cases.tiny(model_type)
    for name in keys.ANSWERS[model_type]:
        path = gguf_cases.write_case(tmp_path / "model.gguf", own, gguf_cases.cases()[name])
        theirs = torch.from_numpy(llama_library.logits(path, gguf_cases.TOKENS))
        if keys.ANSWERS[model_type][name] is None:               # no numbers
            assert not theirs.isfinite().all()
            continue
        recorded = torch.tensor(keys.ANSWERS[model_type][name] or keys.ANSWERS[model_type]["unchanged"])
        assert float((gguf_cases.sample(theirs) - recorded).norm() / recorded.norm()) < 1e-4
        try:
            model = plugin.from_pretrained(path, dtype=torch.float32)
        except LoadError:
            continue
        with torch.no_grad():
            ours = model(torch.tensor([gguf_cases.TOKENS])).logits[0].float()
        assert float((ours - theirs).norm() / theirs.norm()) < keys.TABLED.get(model_type, keys.CLOSE), name
