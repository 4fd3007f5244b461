"""Storage for `torch.distributed.checkpoint`: a repository in place of a folder of `.distcp` files.

`VarviteWriter` and `VarviteReader` are given to PyTorch's own functions. These plan and coordinate; the
adapter writes one pack for each rank and commits one snapshot, which the manager and the command line read
like any other.

Example:
    >>> import tempfile, torch
    >>> import torch.distributed as dist
    >>> import torch.distributed.checkpoint as dcp
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> folder = tempfile.mkdtemp()
    >>> state = {"model": {"weight": torch.ones(2)}, "epoch": 3}
    >>> metadata = dcp.save(state, storage_writer=VarviteWriter(folder, step=10))
    >>> fresh = {"model": {"weight": torch.zeros(2)}, "epoch": 0}
    >>> dcp.load(fresh, storage_reader=VarviteReader(folder))
    >>> fresh
    {'model': {'weight': tensor([1., 1.])}, 'epoch': 3}
    >>> dist.destroy_process_group()
"""

from __future__ import annotations

from varvite.distributed.dcp.reader import VarviteReader
from varvite.distributed.dcp.writer import VarviteWriter

__all__ = ["VarviteReader", "VarviteWriter"]
