"""Run requests through ``Omni(...)``, one engine after another in one process, and save what comes back.

    python generate.py MODEL OUT_DIR '{"name": {"arguments": {"quantization": "h3_fp8"}, ...}, ...}'

A run has ``arguments`` (of ``Omni``), ``env`` (variables for it) and ``requests`` (how often the same
request is made) or ``loras`` (for each request the path and scale of its LoRA, or null); it leaves
``OUT_DIR/NAME.npz`` and ``OUT_DIR/NAME.json``, the load report.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def main(model: str, out: str, runs: str) -> None:
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams
    from vllm_omni.lora.request import LoRARequest
    from vllm_omni.lora.utils import stable_lora_int_id

    for name, run in json.loads(runs).items():
        arguments = run.get("arguments", {})
        before = copy.deepcopy(arguments)
        os.environ.update({"VLLM_H3_QUANT_REPORT": str(Path(out) / f"{name}.json"), **run.get("env", {})})
        print(f"## {name} starts", flush=True)
        omni = Omni(model=model, trust_remote_code=True, task_type="t2va", **{"enforce_eager": True, **arguments})
        assert arguments == before, "the caller's configuration was changed"
        saved: dict[str, Any] = {}
        for index, lora in enumerate(run.get("loras", [None] * run.get("requests", 1))):
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
            (output,) = omni.generate({"prompt": "a cat plays the piano"}, sampling)
            saved[f"video{index}"] = np.asarray(output.images[0])
            saved[f"audio{index}"] = np.asarray(output.multimodal_output["audio"])
        np.savez(Path(out) / f"{name}.npz", **saved)
        omni.close()
        for variable in run.get("env", {}):
            del os.environ[variable]


if __name__ == "__main__":
    main(*sys.argv[1:])
