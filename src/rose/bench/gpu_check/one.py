"""Runs one part, in a process of its own: an error that a GPU does not recover from costs that part alone.

``python -m rose.bench.gpu_check.one PART DEVICE FILE COPY_GB_S [quick]``: the outcome goes to the file.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from rose.bench.gpu_check.outcome import FAILED, NOT_RUN, PASSED, Outcome
from rose.bench.gpu_check.part import Bench, Part
from rose.bench.gpu_check.parts import bench_on, parts


def outcome_of(part: Part, bench: Bench) -> Outcome:
    """Run a part, whatever becomes of it."""
    begun = time.monotonic()
    try:
        if reason := part.problem(bench):
            return Outcome(name=part.name, shows=part.shows, status=NOT_RUN, reason=reason)
        figures, status, reason = part.run(bench), PASSED, ""
    except Exception as error:  # noqa: BLE001 - the process's root: the record says what it met
        traceback.print_exc()
        figures, status, reason = (), FAILED, f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - begun, 2)
    return Outcome(name=part.name, shows=part.shows, status=status, reason=reason, seconds=seconds, figures=figures)


def main(arguments: Sequence[str]) -> None:
    """Run the part that is named and write its outcome."""
    name, device, path, copy_gb_s, *rest = arguments
    bench = bench_on(device, is_quick="quick" in rest)
    bench.copy_gb_s = float(copy_gb_s)
    (part,) = (one for one in parts() if one.name == name)
    outcome = outcome_of(part, bench)
    Path(path).write_text(json.dumps(outcome.to_json()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
