"""Run requests through ``Omni(...)``, one engine after another in one process, and save what comes back.

    python generate.py MODEL OUT_DIR '{"name": {"arguments": {"quantization": "h3_fp8"}, ...}, ...}'

A run has ``arguments`` (of ``Omni``), ``env`` (variables for it), ``debug`` (loggers that also print their
debug lines), ``model`` (another checkpoint than MODEL) and one of ``requests`` (how often the same request is
made), ``loras`` (for each request the path and scale of its LoRA, or null) and ``calls`` (for each the prompts
given at once and their LoRA); it leaves
``OUT_DIR/NAME.npz`` and ``OUT_DIR/NAME.json``, the load report.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

PROMPT = "a cat plays the piano"


def main(model: str, out: str, runs: str) -> None:
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams
    from vllm_omni.lora.request import LoRARequest
    from vllm_omni.lora.utils import stable_lora_int_id

    for name, run in json.loads(runs).items():
        arguments = run.get("arguments", {})
        before = copy.deepcopy(arguments)
        os.environ.update({"VLLM_H3_QUANT_REPORT": str(Path(out) / f"{name}.json"), **run.get("env", {})})
        # The engine collects garbage at each start and end, and would look at all that is imported each time.
        gc.collect()
        gc.freeze()
        print(f"## {name} starts", flush=True)
        for logger in map(logging.getLogger, run.get("debug", [])):
            logger.setLevel(logging.DEBUG)
            logger.addHandler(logging.StreamHandler(sys.stdout))
        options = {"trust_remote_code": True, "task_type": "t2va", "enforce_eager": True, **arguments}
        omni = Omni(model=run.get("model", model), **options)
        assert arguments == before, "the caller's configuration was changed"
        saved: dict[str, Any] = {}
        loras = run.get("loras", [None] * run.get("requests", 1))
        outputs = []
        for prompts, lora in run.get("calls", [([PROMPT], lora) for lora in loras]):
            sampling = OmniDiffusionSamplingParams(
                height=64,
                width=64,
                num_frames=96,
                num_inference_steps=2,
                seed=7,
                extra_args={"task": "t2va", "aspect_ratio": "1:1"},
            )
            if lora:
                path, sampling.lora_scale = lora
                sampling.lora_request = LoRARequest("adapter", stable_lora_int_id(path), path)
            outputs += omni.generate([{"prompt": prompt} for prompt in prompts], sampling)
        for index, output in enumerate(outputs):
            saved[f"video{index}"] = np.asarray(output.images[0])
            saved[f"audio{index}"] = np.asarray(output.multimodal_output["audio"])
        np.savez(Path(out) / f"{name}.npz", **saved)
        omni.close()
        for variable in run.get("env", {}):
            del os.environ[variable]


if __name__ == "__main__":
    main(*sys.argv[1:])
