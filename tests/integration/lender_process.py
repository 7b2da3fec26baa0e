"""``rose lend`` with a time of day that a file shifts: ``lender_process.py OFFSET-FILE ARGUMENTS...``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

true_time = time.time
offset = Path(sys.argv[1])
time.time = lambda: true_time() + float(offset.read_text() or 0)

from rose.cli.main import main

sys.exit(main(["lend", *sys.argv[2:]]))
