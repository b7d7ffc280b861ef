"""The store through which the ranks of this engine met.

Why: ranks tell each other where their copies of weights lie, one by one and in whatever order each of them comes to it,
which collectives do not allow.
Symbol: ``torch.distributed.distributed_c10d._get_default_store()``, torch 2.11 to 2.13. When it moves: look for what
``init_process_group`` keeps of its rendezvous.
"""

from __future__ import annotations

import torch.distributed

from vllm_h3_quant.upstream.preflight import Symbol

SYMBOLS = (Symbol("torch", "torch.distributed.distributed_c10d", "_get_default_store"),)


def process_store() -> torch.distributed.Store | None:
    """The default group's store; None where there is one rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    store: torch.distributed.Store = torch.distributed.distributed_c10d._get_default_store()
    return store
