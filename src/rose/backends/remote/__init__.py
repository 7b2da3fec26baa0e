"""Engines behind an executor's HTTP interface. Needs the extra ``http`` (aiohttp)."""

from rose.errors import BackendUnavailableError

try:
    from rose.backends.remote.engine import RemoteEngine
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "rose":
        raise
    _message = f"the remote backend needs a library that is not installed ({error}); pip install 'rose-rl[http]'"
    raise BackendUnavailableError(_message) from error

__all__ = ["RemoteEngine"]
