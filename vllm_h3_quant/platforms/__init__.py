"""The CPU reference platform. Nothing here is imported where an accelerator works."""
