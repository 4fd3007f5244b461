"""Iterates over a data loader with forked workers while a save runs, and saves again."""

import sys

import torch

from varvite import CheckpointManager

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(
        range(64), batch_size=8, num_workers=2, multiprocessing_context="fork"
    )
    with CheckpointManager(sys.argv[1]) as manager:
        manager.save(1, {"w": torch.ones(10_000_000)})
        print("samples", sum(len(batch) for batch in loader))
        manager.save(2, {"w": torch.ones(10_000_000)})
        print("snapshots", [info.step for info in manager.snapshots()])
