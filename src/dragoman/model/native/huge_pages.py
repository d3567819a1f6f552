"""Memory for weights that are read over and over: in pages of 2 MiB where the system has them.

In pages of 4 KiB the weights of a small model already have more addresses than a processor keeps translated, and a
decoding step of one row, which reads them all, spends a good part of its time looking them up.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def in_huge_pages(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of CPU tensors, each laid out in the order of its elements, one after the other in one block of memory."""
    sizes = [-(-tensor.numel() * tensor.element_size() // 64) * 64 for tensor in tensors]  # whole cache lines
    huge = 1 << 21
    block = mmap.mmap(-1, max(sum(sizes), 1) + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(block, dtype=torch.uint8)
    at = -buffer.data_ptr() % huge
    copies = []
    for tensor, size in zip(tensors, sizes, strict=True):
        n = tensor.numel() * tensor.element_size()
        copies.append(buffer[at : at + n].view(tensor.dtype).view(tensor.shape).copy_(tensor))
        at += size
    return copies
