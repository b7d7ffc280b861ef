"""The fused DiT block: between two linears an activation is written as codes, and read once."""
