"""A real pool on this machine for tests of loops: vLLM engines, one or more of them borrowed, and faults on command.

Life cycle:

1. [TEST] ``PoolSite.start`` runs ``python -m rose.testing.pool_site`` of the environment that has vLLM.
2. [SITE] starts dedicated engines, executors (``rose serve``) and a lender (``rose lend``), opens the pool as a service, prints one JSON line.
3. [TEST] one JSON command a line; [SITE] one JSON answer a line, in order.
4. [TEST] closes the pipe, or ends; [SITE] ends every process that it started and removes its folder.

Invariants: importing this package, and using ``PoolSite``, takes the standard library alone; nothing outlives the site, however it ends.
"""

from rose.testing.pool_site.client import PoolSite

__all__ = ["PoolSite"]
