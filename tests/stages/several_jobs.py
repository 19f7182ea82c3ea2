"""Run several jobs, one after another, in this rank: ``several_jobs.py JOB.json ...``."""

import sys
from pathlib import Path

from stages.__main__ import main

for path in sys.argv[1:]:
    main(Path(path))
