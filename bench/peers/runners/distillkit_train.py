"""Run DistillKit's own program, on rows in a given order: python distillkit_train.py ORDER CONFIG.

Its trainer shuffles with its own random numbers, and the order must be the same for all programs.
"""

import sys

import distillkit.main
import numpy as np
import transformers


def main(order):
    rows = np.load(order).tolist()
    transformers.Trainer._get_train_sampler = lambda *_, **__: rows
    distillkit.main.main()


if __name__ == "__main__":
    main(sys.argv.pop(1))
