"""What scripts share that fork a child for each line they read: a line is a case, the answer an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def serve(live: Callable[[dict[str, Any]], int]) -> None:
    """Says that it is ready, and has a fork live each case; a child ends with what `live` returns."""
    print("ready", flush=True)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            # Whatever goes wrong, a child must not go on to read the parent's next line.
            try:
                os._exit(live(json.loads(line)))
            finally:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
