"""Ends without closing while a save may still copy."""

import sys

import torch

from varvite import CheckpointManager

manager = CheckpointManager(sys.argv[1], staging=sys.argv[2])
manager.save(0, {"t": torch.arange(1 << 22)})
