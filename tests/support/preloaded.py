"""Work that every forked process would do for itself otherwise. The fork server imports this module last."""

import gc
import os

from dualpipe.train import metrics
from pictures import write_stand_in

metrics._draw_loss = write_stand_in
gc.collect()
gc.freeze()  # else each process goes through all that is loaded here, and so copies its pages
os.environ.pop("PYTHONPATH", None)  # of the server alone: see ranks.py
