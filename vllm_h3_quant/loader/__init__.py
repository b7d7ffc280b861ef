"""What a checkpoint is, whether it can be loaded, and its weights in the order in which the model keeps them."""
