"""``python -m rose.testing.pool_site``. Engines' processes import this module too, so that it does nothing by itself."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from rose.testing.pool_site.serve import main

    sys.exit(main(sys.argv[1:]))
