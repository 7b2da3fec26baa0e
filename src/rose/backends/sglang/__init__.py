"""SGLang servers as ROSE serving engines, over HTTP: a server that runs, or one that is started here. Needs the extra ``http`` (aiohttp).

Importing this package imports neither sglang nor torch; SGLang has an environment of its own. Written for SGLang 0.5.23.
"""

from rose.errors import BackendUnavailableError

try:
    from rose.backends.sglang.engine import SglangEngine
    from rose.backends.sglang.launched import LaunchedSglang
    from rose.backends.sglang.options import SglangOptions
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "rose":
        raise
    _message = f"the sglang backend needs a library that is not installed ({error}); pip install 'rose-rl[http]'"
    raise BackendUnavailableError(_message) from error

__all__ = ["LaunchedSglang", "SglangEngine", "SglangOptions"]
