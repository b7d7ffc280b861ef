"""vLLM's 8-bit CUTLASS product, as the operator that its extension registers.

Why: ``vllm._custom_ops.cutlass_scaled_mm`` allocates the result and looks at shapes and dtypes at each call, and sends
sizes that are no multiple of 16 to a Triton kernel; this package has padded them by then and picks its kernel itself.
Symbol: ``torch.ops._C.cutlass_scaled_mm(out, a, b, scale_a, scale_b, bias)``, vLLM 0.30.0, registered by
``current_platform.import_kernels()`` where the wheel was built for CUDA. When it moves: a table of products goes on to
the next backend; look at what ``vllm._custom_ops.cutlass_scaled_mm`` calls.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform


def cutlass_scaled_mm() -> Any | None:
    """The operator; None where the extension is not there or lacks it."""
    current_platform.import_kernels()
    return getattr(torch.ops._C, "cutlass_scaled_mm", None)
