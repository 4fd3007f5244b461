"""Tries to open a repository for writing and prints how that went."""

import sys

from varvite import CheckpointManager
from varvite.errors import RepositoryLockedError

try:
    with CheckpointManager(sys.argv[1]) as manager:
        print("opened", [info.step for info in manager.snapshots()])
except RepositoryLockedError as error:
    print("locked by", error.holder)
