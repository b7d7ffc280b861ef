"""What vLLM-Omni holds while it builds and loads a model: configurations, checks around the load, the load report."""
