"""vLLM's engine on a CPU: `python -m tests.support.vllm_engine` answers jobs that come line by line, in one process.

A job is JSON: arguments of vllm.LLM.  A result is a line of JSON behind RESULT: the log probabilities of a prompt's tokens, and
the next tokens, the likeliest each time; or the error.  With `reload` packed weights are lost and loaded anew before.  Workers of
several ranks are processes, as vLLM starts them; its core runs in this one, so that vLLM is imported once for all jobs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

PROMPT = [index * 7 % 192 for index in range(40)]
MARK = "RESULT "
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")      # ranks share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def answer(reload: bool = False, **options: Any) -> dict[str, Any]:
    """What a model answers."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        engine = LLM(**{"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 128,
                        "max_num_seqs": 1, "disable_log_stats": True, **options})
        if reload:
            engine.apply_model(clear)
            engine.collective_rpc("reload_weights")
        sampling = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0, detokenize=False)
        result, = engine.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)
        engine.llm_engine.engine_core.shutdown()
    finally:
        engine = None
        gc.collect()
        cleanup_dist_env_and_memory()
    logprobs = [candidates[token].logprob for candidates, token in zip(result.prompt_logprobs[1:], PROMPT[1:], strict=True)]
    return {"logprobs": logprobs, "tokens": list(result.outputs[0].token_ids)}


def clear(model: Any) -> None:
    """Fill a model's packed tensors with zeros."""
    for name, tensor in model.named_parameters():
        if ".qdsl_" in name:
            tensor.data.zero_()


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for line in sys.stdin:
        try:
            result = answer(**json.loads(line))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
