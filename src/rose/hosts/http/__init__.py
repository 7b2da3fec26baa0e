"""HTTP services: the executor and the lender, on a small common server. Needs the extra ``http`` (aiohttp)."""

from rose.errors import BackendUnavailableError

try:
    import aiohttp  # noqa: F401 - to say so at once where it is missing
    import prometheus_client  # noqa: F401
except ModuleNotFoundError as error:
    _message = f"HTTP services need a library that is not installed ({error}); pip install 'rose-rl[http]'"
    raise BackendUnavailableError(_message) from error
