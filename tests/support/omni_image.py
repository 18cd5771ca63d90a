"""A picture of vllm-omni on a CPU: `python -m tests.support.omni_image PIPELINE PICTURE QUANTIZATION`."""

from __future__ import annotations

import json
import sys

PROMPT, STEPS, SIZE, SEED = "a fox", 4, 64, 42


def main() -> None:
    from vllm_omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    pipeline, picture, quantization = sys.argv[1:]
    omni = Omni(model=pipeline, quantization_config=json.loads(quantization), dtype="bfloat16", enforce_eager=True)
    result, = omni.generate(PROMPT, OmniDiffusionSamplingParams(num_inference_steps=STEPS, height=SIZE, width=SIZE, seed=SEED))
    result.images[0].save(picture)


if __name__ == "__main__":
    main()
