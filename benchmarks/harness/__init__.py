"""What the scripts of this folder share: timing, rows of figures, and the engine without its server."""
