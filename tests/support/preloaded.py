"""Work that every forked process would do for itself otherwise. The fork server imports this module last."""

import gc
import os
import tempfile
from pathlib import Path

from dualpipe.train.config.load import load_config
from run_files import write_files

with tempfile.TemporaryDirectory() as folder:  # the command line's parser keeps what it finds out of the settings
    load_config(str(write_files(Path(folder))), ["--train.steps", "1"])
gc.collect()
gc.freeze()  # else each process goes through all that is loaded here, and so copies its pages
os.environ.pop("PYTHONPATH", None)  # of the server alone: see ranks.py
