"""Has planned and other calls of a worker come at random.

Python imports it at its start where PYTHONPATH names this folder.
"""

import os
import sys
from pathlib import Path

if os.environ.get("DMLC_ROLE") == "worker":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import alternation

    alternation.alternate(f"worker {os.environ.get('DMLC_WORKER_ID', os.getpid())}", setattr)
