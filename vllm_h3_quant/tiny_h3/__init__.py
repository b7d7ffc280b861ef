"""A MiniMax-H3 checkpoint small enough for a CPU: real layout, random weights, stand-in VAEs.

``write_tiny_h3`` writes the native repository layout that vLLM-Omni 0.30 reads::

    ROOT/model_index.json, ROOT/transformer/config.json   what the engine inspects before it loads
    ROOT/FL2VA/{transformer,text_encoder,tokenizer,processor,video_vae,audio_vae}
"""

from vllm_h3_quant.tiny_h3.spec import TinyH3
from vllm_h3_quant.tiny_h3.writer import write_tiny_h3

__all__ = ["TinyH3", "write_tiny_h3"]
