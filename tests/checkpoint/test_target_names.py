"""Names of formats and storages as people write them are understood where they have one meaning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qdsl.checkpoint.detect.targets import format_target, formats, spec_of, storage_target, storages
from qdsl.core.places import UnknownSpec


@pytest.mark.parametrize(("word", "meaning"), [
    ("gptq", "int_group.gptq_v1"), ("AWQ", "int_group.awq"), ("marlin", "int_group.marlin"), ("Q4_K", "q4_k"),
    ("FP8-Block", "fp8_block"), ("pack-quantized", "int_group.pack_quantized"), ("int_group.GPTQ", "int_group.gptq_v1"),
    ("eetq", "int8_channel.eetq"), ("mlx", "mlx"), (" nf4 ", "nf4")])
def test_a_word_with_one_meaning_is_a_format(word: str, meaning: str) -> None:
    assert format_target(word) == meaning


@pytest.mark.parametrize(("word", "meaning"), [("gptq", "gptq_v1"), ("AWQ", "awq"), ("Int-Group.AWQ", "int_group.awq"),
                                               ("torchao", "torchao"), ("planar", "planar")])
def test_a_word_with_one_meaning_is_a_storage(word: str, meaning: str) -> None:
    assert storage_target(word) == meaning


def test_words_that_are_nearly_a_file_are_told_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w4.yaml").write_text("format: w4\n")
    assert spec_of("w4.yaml") == Path("w4.yaml") and spec_of("GPTQ").stem == "int_group"
    for word, message in (("w4", "did you mean the file w4.yaml?"), ("README.md", "expected a file"), ("zzz", "expected a file"),
                          ("w5.yaml", "no file 'w5.yaml'")):
        with pytest.raises(UnknownSpec, match=re.escape(message)):
            spec_of(word)


def test_every_name_is_its_own_meaning() -> None:
    assert [name for name in formats() if format_target(name.upper()) != name] == []
    assert [name for name in storages() if storage_target(name.upper()) != name] == []


@pytest.mark.parametrize(("word", "message"), [
    ("bitsandbytes", "did you mean bnb_fp4, bnb_fp4_nested, bnb_int8, nf4 or nf4_nested?"), ("q4k", "did you mean q4_k?"),
    ("modelopt", "did you mean nvfp4_modelopt, int_group.modelopt or ocp_mxfp4.modelopt?"), ("gptq_v3", "int_group.gptq_v2"),
    ("int_group.foo", "int_group has no storage 'foo': it has gptq_v2, .* and 13 more"), ("zzz", "QDSL_SPECS"),
    ("", "no format")])
def test_other_words_get_suggestions(word: str, message: str) -> None:
    with pytest.raises(UnknownSpec, match=message):
        format_target(word)


@pytest.mark.parametrize(("word", "message"), [
    ("nf4", "nf4 is a format, and --to takes a storage: bitsandbytes; `--requantize nf4`"),
    ("gptq_v3", "no storage 'gptq_v3'; did you mean gptq_v2, gptq_v1 or gptq_p?"), ("q9.gguf", "no storage"), ("", "no storage")])
def test_a_storage_that_is_none_gets_suggestions(word: str, message: str) -> None:
    with pytest.raises(UnknownSpec, match=message):
        storage_target(word)
