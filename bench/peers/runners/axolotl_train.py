"""Run axolotl's own program, on rows in a given order: python axolotl_train.py ORDER CONFIG.

Its trainer shuffles with its own random numbers, and the order must be the same for all programs.
"""

import sys

import numpy as np
from axolotl.cli.train import do_cli
from axolotl.core.trainers.base import AxolotlTrainer


def main(order, config):
    rows = np.load(order).tolist()
    AxolotlTrainer._get_train_sampler = lambda *_, **__: rows
    do_cli(config=config)


if __name__ == "__main__":
    main(*sys.argv[1:])
