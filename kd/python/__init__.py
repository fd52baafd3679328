"""The functions of ``import kd``: a job from Python objects, run in this process.

jobs.py       settings of a call        -> a job, the same tree as that of a YAML file
inputs.py     models and text in memory -> files below the data folder, named by their content
running.py    a job                     -> its stages, with bars, a lock and Ctrl-C
bars.py       events of the run         -> progress bars
results.py    files of the run          -> frozen records, for text, notebooks and plots
runs.py       folders of runs           -> one list
calls.py      the public functions
version.py    the version of Potstill
"""
