"""Cached prefixes by the weights that made them.

SGLang keeps the KV of requests that ended in a prefix tree, and requests in flight keep theirs over an update, so the tree cannot
simply be emptied at one: what was computed under old weights is put into it later. Instead the tree is divided by the *generation*
of the weights that a request began under (SGLang's ``extra_key``): a request finds prefixes of its own generation only. What older
generations left is found by nobody and is evicted as the least recently used.
"""

from __future__ import annotations

_MARK = "|rose-weights="


def keyed(extra_key: str | None, generation: int) -> str | None:
    """Return a request's key for a generation of the weights.

    Args:
        extra_key: Its own key, or one that this function made for another generation.
        generation: How often the weights have changed since the engine started; 0 leaves the request's own key.
    """
    own = (extra_key or "").partition(_MARK)[0]
    return f"{own}{_MARK}{generation}" if generation else own or None
