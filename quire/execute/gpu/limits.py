"""Constants that size an engine on a GPU.

Imports no PyTorch, so that plans can be made on machines without it.
"""

from __future__ import annotations

# Of a GPU's free memory this is left alone: kernels and graphs as they are loaded, the libraries'
# workspaces and NCCL's buffers, which do not grow with an engine, and what the allocator loses by
# its grain.
GPU_RESERVE_BYTES = 1536 * 1024 * 1024
# Rows from which larger steps compute no more rows per second.
FULL_STEP_TOKENS = 2048
