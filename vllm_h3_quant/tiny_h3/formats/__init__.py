"""The tiny MiniMax-H3 in the formats in which its transformer is published.

``write_format`` takes a root that ``write_tiny_h3`` wrote and writes one whose ``FL2VA/transformer`` holds the same
weights in another format; ``stored_values`` gives the numbers that such a file stands for.
"""

from vllm_h3_quant.tiny_h3.formats.writer import FORMATS, stored_values, write_format

__all__ = ["FORMATS", "stored_values", "write_format"]
