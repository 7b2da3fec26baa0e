"""Engines behind an OpenAI-compatible server that takes and gives token ids, such as vLLM's own. Needs the extra ``http`` (aiohttp)."""

from rose.errors import BackendUnavailableError

try:
    from rose.backends.openai.engine import OpenAiEngine
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "rose":
        raise
    _message = f"the openai backend needs a library that is not installed ({error}); pip install 'rose-rl[http]'"
    raise BackendUnavailableError(_message) from error

__all__ = ["OpenAiEngine"]
