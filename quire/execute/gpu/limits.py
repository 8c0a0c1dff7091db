"""Constants that size an engine on a GPU.

Imports no PyTorch, so that plans can be made on machines without it.
"""

from __future__ import annotations

# Of a GPU's free memory this is left alone: kernels and graphs as they are loaded, the libraries'
# workspaces, which do not grow with an engine, and what the allocator loses by its grain.
GPU_RESERVE_BYTES = 1536 * 1024 * 1024
# What NCCL takes of each GPU for a group that gathers columns, by its source (src/init.cc,
# src/transport/p2p.cc) and as its users have counted it on eight H100. Gathers and broadcasts go
# around rings. For each channel of a ring a rank has buffers of three protocols for what it
# receives (512, 4,800 and 4,096 KiB) and a head for what it sends; memory is mapped in units of
# 2 MiB: 10 and 2 MiB. Up to 32 channels are counted; there are fewer by PCIe. What multicast by
# NVLink switches would take is spared (process_group.py).
NCCL_CHANNEL_BYTES = (10 + 2) * 1024 * 1024
NCCL_CHANNELS = 32
NCCL_BYTES = NCCL_CHANNELS * NCCL_CHANNEL_BYTES
# Rows from which larger steps compute no more rows per second.
FULL_STEP_TOKENS = 2048
