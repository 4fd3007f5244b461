"""Several ranks: decisions that all take alike, and talk between them in the background.

Ranks, groups and launchers are PyTorch's own. Nothing here is imported, and no group is made, until a
program with `torch.distributed` asks for it.
"""
