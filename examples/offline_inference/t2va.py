"""Generate one clip with sound from a text, without a server.

    python examples/offline_inference/t2va.py --model /models/MiniMax-H3 --quantization h3_fp8 --out clip.mp4
    python examples/offline_inference/t2va.py --model /models/MiniMax-H3 \
        --quantization-config '{"transformer": {"method": "h3_fp8"}, "text_encoder": null}'

Leave both quantization options out for the checkpoint's own precision.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from vllm_h3_quant.fidelity.clip import Clip, write_clip

FPS = 24
SAMPLE_RATE = 32000


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {value!r}")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a MiniMax-H3 checkpoint")
    quantization = parser.add_mutually_exclusive_group()
    quantization.add_argument("--quantization", help="h3_fp8 or h3_int8, for every component")
    quantization.add_argument("--quantization-config", type=json_object, help="JSON, for one method or by component")
    parser.add_argument("--out", type=Path, default=Path("t2va.mp4"))
    parser.add_argument("--prompt", default="A street musician plays the accordion while pigeons land around her.")
    parser.add_argument("--width", type=int, default=1344)
    parser.add_argument("--height", type=int, default=768)
    parser.add_argument("--aspect-ratio", default="16:9", help="21:9, 16:9, 4:3, 1:1, 3:4 or 9:16")
    parser.add_argument("--num-frames", type=int, default=124, help=f"at {FPS} fps; rounded up to 17 n + 5")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--enforce-eager", action="store_true", help="do not compile")
    options = parser.parse_args()
    if not (options.model / "model_index.json").is_file():
        parser.error(f"--model {options.model} has no model_index.json; give the folder that holds FL2VA/")
    return options


def generate(options: argparse.Namespace) -> Clip:
    # The engine's import takes seconds, and --help must not.
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    omni = Omni(
        model=str(options.model),
        trust_remote_code=True,
        task_type="t2va",
        enforce_eager=options.enforce_eager,
        quantization_config=options.quantization or options.quantization_config,
    )
    sampling = OmniDiffusionSamplingParams(
        width=options.width,
        height=options.height,
        num_frames=options.num_frames,
        num_inference_steps=options.steps,
        seed=options.seed,
        extra_args={"task": "t2va", "aspect_ratio": options.aspect_ratio},
    )
    try:
        (output,) = omni.generate({"prompt": options.prompt}, sampling)
    finally:
        omni.close()
    (frames,) = output.images
    (audio,) = output.multimodal_output["audio"]
    return Clip(np.asarray(frames), FPS, np.asarray(audio, dtype=np.float32), SAMPLE_RATE)


def main() -> None:
    options = parse_arguments()
    clip = generate(options)
    write_clip(options.out, clip)
    print(f"{options.out}: {len(clip.frames)} frames, {clip.video_seconds:.2f} s")


if __name__ == "__main__":
    main()
