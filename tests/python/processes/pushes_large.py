"""Pushes what a folder holds, and prints by how many bytes the memory of this process has grown for it.

Arguments: the folder, the url of the bucket, its options as JSON.
"""

import json
import resource
import sys

from varvite import CheckpointManager

UNIT_BYTES = 1024
"""Of `ru_maxrss` on Linux."""


def peak_bytes() -> int:
    """Returns the most memory that this process has had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT_BYTES


folder, url, options = sys.argv[1:]
manager = CheckpointManager(folder, remote=url, remote_options=json.loads(options), sync_every=1_000_000)
before_bytes = peak_bytes()
manager.sync_now()
print(peak_bytes() - before_bytes)
manager.close()
