"""Build the C kernels of ``rose.transfer`` into the package: for wheels and editable installs, or by ``python hatch_build.py``.

Without a C compiler (``CC``, else ``cc``), or where it fails, there is a warning and a pure wheel; ROSE then runs on numpy.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin import interface  # type: ignore[import-not-found,unused-ignore]

    BuildHookInterface = interface.BuildHookInterface
except ImportError:  # built in place by hand, without the build system
    BuildHookInterface = object

KERNELS = Path("src/rose/transfer/kernels")
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fwrapv", "-fvisibility=default")


def build_kernels(root: Path) -> Path | None:
    """Compile the kernels beside their source; return the library, or ``None`` after a warning when that fails."""
    library = root / KERNELS / f"kernels-{sys.platform}-{platform.machine().lower()}.so"
    # Compiled aside and then moved: a process that has the old one open keeps it whole.
    fresh = library.with_suffix(f".{os.getpid()}.tmp")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = [*compiler, *FLAGS, str(root / KERNELS / "kernels.c"), "-o", str(fresh)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        fresh.replace(library)
    except (OSError, subprocess.CalledProcessError) as error:
        library.unlink(missing_ok=True)
        fresh.unlink(missing_ok=True)
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        sys.stderr.write(f"warning: the C kernels were not built, ROSE will use numpy ({detail})\n")
        return None
    return library


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg,misc,valid-type,unused-ignore]
    """Put the library into the wheel and tag that for the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before files are collected."""
        del version  # an editable install finds the library in the tree
        library = build_kernels(Path(self.root))
        if library is None:
            return
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
        build_data["artifacts"].append(str(library.relative_to(self.root)))


if __name__ == "__main__":
    built = build_kernels(Path(__file__).parent)
    sys.stdout.write(f"{built}\n")
    sys.exit(built is None)
