"""Holds a bucket for writing, says so, and does what lines tell it to: `save STEP`, `sync`, `close`.

Arguments: the folder, the url of the bucket, its options as JSON. Each is answered by `done`, or the error.
"""

import json
import sys

from states import state_of

from varvite import CheckpointManager
from varvite.errors import CheckpointError

folder, url, options = sys.argv[1:]
manager = CheckpointManager(folder, remote=url, remote_options=json.loads(options), sync_every=1_000_000)
print("holding", flush=True)
for line in sys.stdin:
    verb, *arguments = line.split()
    try:
        if verb == "save":
            step = int(arguments[0])
            manager.save_sync(step, state_of(step, 2_000), rng=False)
        elif verb == "sync":
            manager.sync_now()
        else:
            manager.close()
            break
    except CheckpointError as error:
        print(type(error).__name__, str(error).replace("\n", " "), flush=True)
    else:
        print("done", flush=True)
