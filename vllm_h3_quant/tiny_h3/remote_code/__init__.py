"""Sources copied into a tiny checkpoint; the engine imports the copies, so they need only torch and safetensors."""
