"""8-bit attention in place of the engine's: which layers and calls it serves, and the implementation."""
