"""Components of the pipeline, by the names that the engine gives them."""

from __future__ import annotations

TRANSFORMER = "transformer"
TEXT_ENCODER = "text_encoder"
