"""Forks right after `save`; the child steps the same optimizer, and neither waits for the other."""

import os
import sys

import torch

from varvite import CheckpointManager

torch.set_num_threads(1)  # OpenMP does not survive a fork
torch.manual_seed(0)
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def step() -> None:
    model(torch.ones(1, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


step()
stepped = whole = 0
with CheckpointManager(sys.argv[1], staging=sys.argv[2]) as manager:
    for number in range(20):
        expected = model.weight.detach().clone()
        manager.save(number, model=model, optimizer=optimizer)
        process = os.fork()
        if process == 0:
            step()
            os._exit(0)
        step()
        stepped += os.waitpid(process, 0)[1] == 0
        whole += torch.equal(manager.load(number)["model"]["weight"], expected)
print("child stepped", stepped)
print("whole", whole)
