"""A byte-level Qwen2 tokenizer without merges (one token a byte), and the processor beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL_TOKEN_IDS = {token: len(_BYTES) + index for index, token in enumerate(_SPECIAL_TOKENS)}
VOCAB_SIZE = 320  # 256 bytes and the special tokens, padded to a multiple of 64

_IMAGE_PROCESSING: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "size": {"longest_edge": 16777216, "shortest_edge": 1024},
    "processor_class": "Qwen3VLProcessor",
}


def write_tokenizer(folder: Path) -> None:
    """Write the files of a ``Qwen2TokenizerFast`` whose ids 0 to 255 are bytes and 256 onwards special."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {byte: index for index, byte in enumerate(_BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 4096,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_prefix_space": False,
        "additional_special_tokens": list(_SPECIAL_TOKENS[1:]),
        "errors": "replace",
        "split_special_tokens": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def write_processor(folder: Path) -> None:
    """Write a ``Qwen3VLProcessor``: the tokenizer and the image and video preprocessing of Qwen3-VL."""
    write_tokenizer(folder)
    image = _IMAGE_PROCESSING | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    video = _IMAGE_PROCESSING | {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "fps": 2,
        "min_frames": 4,
        "max_frames": 768,
    }
    template = {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=1))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=1))
    (folder / "chat_template.json").write_text(json.dumps(template))
