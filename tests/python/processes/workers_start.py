"""Starts loader workers again and again while its whole process group is signalled without a pause.

Arguments: the start method, how many times, and `shielded` or not.
"""

import os
import sys

import torch

from varvite.training.stop import StopSignal

method, times, how = sys.argv[1:]


class Initialized:
    """The loader's own `worker_init_fn`."""

    def __call__(self, worker_id):
        torch.utils.data.get_worker_info().dataset.worker = worker_id


class Numbers(torch.utils.data.Dataset):
    worker = None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return 10 * index + self.worker


if __name__ == "__main__":
    os.setsid()
    with StopSignal(slurm=False, hard_timeout_seconds=None) as stop:
        loader = torch.utils.data.DataLoader(
            Numbers(), num_workers=2, multiprocessing_context=method, worker_init_fn=Initialized()
        )
        if how == "shielded":
            assert stop.shield(stop.shield(loader)) is loader
        print("running", flush=True)
        for _ in range(int(times)):
            assert [int(batch) for batch in loader] == [0, 11, 20, 31]
        print("whole", stop.check(0), flush=True)
        os._exit(0)  # the signals go on, and outside of this block they end the process
