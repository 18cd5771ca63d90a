"""`python -m bench.trained FOLDER TEXT...` trains a small Llama from nothing: weights that never were quantized, rows of 512.

Blocks of 256 divide its rows, as they do not divide SmolLM2's.  The text is what the machine has: `/usr/share/vim` and the like.
Four layers, 17 million weights, a byte-level tokenizer of 4,096 tokens.  MINUTES=20 in the environment says for how long.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LENGTH = 256
BATCH = 4
RATE = 1e-3


def tokenizer(texts: Sequence[str], vocabulary: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that is trained on texts."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=["<s>", "</s>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="</s>")


def config(vocabulary: int = 4096) -> LlamaConfig:
    return LlamaConfig(vocab_size=vocabulary, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
                       num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=2048, bos_token_id=0, eos_token_id=1,
                       tie_word_embeddings=False)


def train(tokens: Tensor, minutes: float) -> LlamaForCausalLM:
    """A model after so many minutes of AdamW; the rate rises for 2 % of the time and falls by a cosine."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    start, steps = time.perf_counter(), 0
    while (share := (time.perf_counter() - start) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, share / 0.02) * (0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2)
        places = torch.randint(len(tokens) - LENGTH - 1, (BATCH,))
        rows = torch.stack([tokens[place:place + LENGTH + 1] for place in places])
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(rows[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 200 == 0:
            print(f"{steps * BATCH * LENGTH / 1e6:.2f} M tokens, {share:.0%}, loss {loss.item():.3f}", flush=True)
    return model.eval()


def main(folder: Path, files: Sequence[Path]) -> None:
    texts = [path.read_text(errors="ignore") for path in files]
    encode = tokenizer(texts)
    tokens = torch.tensor(encode("\n".join(texts), add_special_tokens=False).input_ids)
    print(f"{len(tokens) / 1e6:.2f} M tokens of text", flush=True)
    model = train(tokens, float(os.environ.get("MINUTES", "20")))
    model.save_pretrained(folder)
    encode.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
