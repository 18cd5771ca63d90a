"""vLLM's engine on a CPU, in a process of its own: `python -m tests.support.vllm_engine JOBS`, which prints a result for each.

JOBS is JSON: a list of arguments of vllm.LLM.  A result is a line of JSON behind RESULT: the log probabilities of a prompt's
tokens, and the next tokens, the likeliest each time; or the error.  With `reload` packed weights are lost and loaded anew before.
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

    engine = LLM(**{"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 128,
                    "max_num_seqs": 1, "disable_log_stats": True, **options})
    if reload:
        engine.apply_model(clear)
        engine.collective_rpc("reload_weights")
    sampling = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0, detokenize=False)
    result, = engine.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)
    logprobs = [known[token].logprob for known, token in zip(result.prompt_logprobs[1:], PROMPT[1:], strict=True)]
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"logprobs": logprobs, "tokens": list(result.outputs[0].token_ids)}


def clear(model: Any) -> None:
    """Fill a model's packed tensors with zeros."""
    for name, tensor in model.named_parameters():
        if ".qdsl_" in name:
            tensor.data.zero_()


def main() -> None:
    jobs = json.loads(sys.argv[1])
    if all(job.get("tensor_parallel_size", 1) == 1 for job in jobs):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for job in jobs:
        try:
            result = answer(**job)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
