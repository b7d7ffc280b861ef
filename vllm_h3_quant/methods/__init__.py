"""Linear methods: how a linear's weight is created, quantized and applied, one file a format."""
