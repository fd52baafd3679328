"""Run a program on the simulated GPU.

    python -m tests.support.simulated_gpu SCRIPT [ARGUMENT ...]
    python -m tests.support.simulated_gpu -m MODULE [ARGUMENT ...]

Run the tests that are marked gpu so:

    make test-simulated-gpu

torch must not be imported before the library is loaded.
"""

from __future__ import annotations

import runpy
import sys

from tests.support.simulated_gpu.library import load_library


def main() -> None:
    """Load the device, then run the program of the command line in this process."""
    load_library()
    from tests.support.simulated_gpu.device import adapt_product, install

    install()
    adapt_product()
    words = sys.argv[1:]
    if words[:2] == ["-m", "pytest"]:
        # The product is imported already, before pytest could rewrite what its plugins assert.
        words[2:2] = ["-W", "ignore:Module already imported"]
    if words[:1] == ["-m"]:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
