"""Two ranks that hold one model in shards; the first tries to save its part as if it were whole.

Usage: shards.py FOLDER. Prints as JSON what the save said, and what lies in a snapshot of whole tensors.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard

from varvite import CheckpointManager
from varvite.errors import CheckpointError

WORLD_SIZE = 2


def rank_main(rank: int, folder: str) -> None:
    init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD_SIZE)
    model = nn.Linear(3, 4, bias=False, device="cpu")
    with torch.no_grad():
        model.weight.copy_(torch.arange(12.0).reshape(4, 3))
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (WORLD_SIZE,)))
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        with CheckpointManager(f"{folder}/run", rank=0, world_size=1) as manager:
            try:
                manager.save_sync(1, model=model)
                said = "saved"
            except CheckpointError as error:
                said = str(error)
            before = len(manager.snapshots())
            manager.save_sync(2, weights=whole)
            found = manager.load()["weights"]["weight"].tolist()
        local = list(model.weight.to_local().shape)
        print(json.dumps({"said": said, "snapshots": before, "local": local, "whole": found}), flush=True)
    destroy_process_group()


def main() -> None:
    ranks = []
    for rank in range(WORLD_SIZE):
        process = os.fork()
        if process == 0:
            try:
                rank_main(rank, sys.argv[1])
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        ranks.append(process)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks))


if __name__ == "__main__":
    main()
