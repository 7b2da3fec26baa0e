"""Ray actors' handles without Ray: ``handle.method.remote(...)`` runs in this process."""

import asyncio


class Here:
    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        method = getattr(self._actor, name)

        class Call:
            @staticmethod
            def remote(*args, **kwargs):
                return asyncio.ensure_future(method(*args, **kwargs))

        return Call
