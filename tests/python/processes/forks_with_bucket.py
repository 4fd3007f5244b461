"""Forks beside a manager with a bucket. The child tries everything; the parent goes on as before.

Arguments: a folder and another one, the url of the bucket, and its options as JSON.
"""

import json
import os
import sys

from states import state_of

from varvite import CheckpointManager
from varvite.errors import InvalidInputError

folder, other, url, options_text = sys.argv[1:]
options = json.loads(options_text)


def save(manager: CheckpointManager, step: int) -> None:
    manager.save_sync(step, state_of(step, 2_000), rng=False)


manager = CheckpointManager(folder, remote=url, remote_options=options)
save(manager, 1)
manager.sync_now()
pushed = manager.stats().sync
assert pushed is not None
sys.stdout.flush()
child = os.fork()
if child == 0:
    for name, call in {"sync": manager.sync_now, "save": lambda: save(manager, 3)}.items():
        try:
            call()
        except InvalidInputError as error:
            print("child", name, "refused:", "and this is a fork of it" in str(error))
    manager.close()
    with CheckpointManager(other, remote=f"{url}-of-the-child", remote_options=options) as mine:
        save(mine, 0)
        mine.sync_now()
        print("child pushes elsewhere", mine.load()["step"])
    sys.exit()  # an ordinary end, with all exit functions

_, status = os.waitpid(child, 0)
print("child ended", os.waitstatus_to_exitcode(status), flush=True)
state = manager.stats().sync
assert state is not None
print("child wrote to the parent's bucket:", state.fenced_by is not None)
save(manager, 2)
manager.sync_now()
print("parent pushed", [info.step for info in manager.snapshots()])
state = manager.stats().sync
assert state is not None
print("parent holds the place:", state.lease_epoch == pushed.lease_epoch)
manager.close()
