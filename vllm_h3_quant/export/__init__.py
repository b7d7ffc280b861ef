"""Writes a quantized model directory: what to write, weight by weight, and how to go on after an interruption."""
