"""Distances between tensors, for tests and benchmarks."""

from __future__ import annotations

import torch


def relative_l2(values: torch.Tensor, reference: torch.Tensor) -> float:
    """``||v - r||_2 / ||r||_2``, accumulated in fp64.

    Raises:
        ValueError: the shapes differ, there is nothing to compare, or the reference is all zeros.
    """
    if values.shape != reference.shape or not values.numel():
        raise ValueError(f"values {tuple(values.shape)} cannot be compared with {tuple(reference.shape)}")
    wanted = reference.double()
    norm = float(wanted.norm())
    if norm == 0:
        raise ValueError("relative L2 has no meaning against a reference of zeros")
    return float((values.double() - wanted).norm()) / norm
