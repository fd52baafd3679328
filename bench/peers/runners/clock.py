"""Run a program and write down when each step of its optimiser ended.

    python clock.py TIMES PROGRAM [ARGUMENT ...]        a script
    python clock.py TIMES -m MODULE [ARGUMENT ...]      a module

TIMES gets a line for each step: the seconds of the clock, and those of this process's processors.
The program needs no change: torch calls a hook after each step of any optimiser.
"""

import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


def main(times: str, *command: str) -> None:
    with Path(times).open("w", buffering=1) as file:

        def note(*_: object) -> None:
            print(time.perf_counter(), time.process_time(), file=file)

        register_optimizer_step_post_hook(note)
        sys.path[0] = str(Path.cwd())
        if command[0] == "-m":
            sys.argv = list(command[1:])
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
