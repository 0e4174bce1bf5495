"""A process that has loaded all that a first conversion loads, from which the processes of tests are forked.

    echo '[["train", ["/some/folder"]]]' | python -c "import warm; warm.serve()"

Reads jobs as JSON, a list of [function of tiny.py, arguments] per line; forks one process for each and answers with
their exit codes. There is no backward pass before the fork: autograd would not survive it.
"""

import json
import os
import sys
import traceback
from typing import Any

import tiny
import torch


def serve() -> None:
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # what a killed process has written stays: only a loss of power would tell the difference
    tiny.trainer()
    for line in sys.stdin:
        children = [_forked(*job) for job in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def _forked(name: str, arguments: list[Any]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        getattr(tiny, name)(*arguments)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
