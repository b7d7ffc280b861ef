"""Pure functions on tensors. They know nothing of models, layers or configurations.

A module holds one operation: a dispatcher, the plain PyTorch version under the same name plus
``_reference`` (also what runs without a GPU), and the Triton kernel. All versions of a quantization
give the same bytes; products of the same codes differ by the order of their sums.
"""
