"""What may be asked for, as data: keys and values, names, selectors of layers and steps."""
