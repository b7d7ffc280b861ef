"""How close a quantized clip is to the bf16 one: reading MP4s, metrics, a contact sheet, validation."""
