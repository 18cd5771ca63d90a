"""llama.cpp, of its library: what it does without each key and tensor, and of which types it reads metadata.

Needs the library: see tests/support/llama_library.py.  Without it nothing here is run.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.support import gguf_cases, llama_library

pytest.importorskip("qdsl.models.transformers")
absent = pytest.importorskip("tests.models.test_gguf_absent")
types = pytest.importorskip("tests.models.test_gguf_types")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("gguf"),
              pytest.mark.skipif(llama_library.folder() is None, reason="needs llama.cpp's library: see make live")]


@pytest.mark.parametrize("model_type", absent.answers())
def test_what_a_file_lacks(model_type: str, tmp_path: Path) -> None:
    """The answers are those of this library, and qdsl's are the same."""
    from tests.record_gguf_absent import answers

    today = answers(model_type)
    for name, recorded in absent.answers()[model_type].items():
        if recorded:
            assert today[name] == pytest.approx(recorded, rel=1e-3, abs=1e-3), name
        else:
            assert today[name] == recorded, name
        absent.check(model_type, name, tmp_path)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "llama", "qwen3_next"])
def test_other_types_are_refused(model_type: str, tmp_path: Path) -> None:
    from tests.record_gguf_keys import Llama

    own, llama = gguf_cases.tiny(model_type), Llama()
    for key, value in types.changes(types.settings(model_type), own.recorded.architecture):
        changed = dataclasses.replace(own, settings={**own.settings, key: value})
        assert llama.answer(gguf_cases.write_case(tmp_path / "model.gguf", changed, gguf_cases.Case())) is None, (key, value)
