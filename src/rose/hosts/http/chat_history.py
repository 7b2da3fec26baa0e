"""The exact tokens of each chat, so that what was sampled is never encoded again. Sync, without I/O.

Invariants:

* A trajectory's tokens only grow: a prompt, an answer as it was sampled, what the new messages add, the next answer, and so on.
* ``mask`` is 1 for sampled tokens and 0 for all others; ``logprobs`` has one value for each 1, where log-probs were asked for.
* A request that does not go on exactly where the last answer ended is refused, unless it repeats the last one.
* At most one answer of a trajectory is being made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rose.errors import RequestRefusedError, RoseError
from rose.hosts.http.tokenizers import Message, Tokenizer
from rose.types import FinishReason, TurnResult, VersionSpan

Key = tuple[str, str]


class HistoryError(RoseError, ValueError):
    """A chat does not go on where its trajectory is."""


@attrs.define(eq=False)
class Trajectory:
    """One chat: its messages, as clients see them, and its tokens."""

    messages: list[dict[str, Any]] = attrs.field(factory=list)
    token_ids: list[int] = attrs.field(factory=list)
    mask: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    versions: list[VersionSpan] = attrs.field(factory=list)
    num_asked: int = 0
    last: tuple[list[int], TurnResult, str] | None = None
    is_busy: bool = False


@attrs.frozen(kw_only=True)
class Step:
    """What is to be done for a request: generate from ``prompt_ids``, or give the answer that its first sending got."""

    trajectory: Trajectory
    messages: list[dict[str, Any]]
    prompt_ids: list[int]
    repeated: tuple[list[int], TurnResult, str] | None = None


class Histories:
    """The chats of a service, the least recently used go.

    Args:
        tokenizer: For what is new in a chat.
        max_trajectories: How many chats are kept.
    """

    def __init__(self, tokenizer: Tokenizer, max_trajectories: int) -> None:
        self._tokenizer = tokenizer
        self._max = max_trajectories
        self._known: OrderedDict[Key, Trajectory] = OrderedDict()

    def get(self, key: Key) -> Trajectory | None:
        """Return a chat."""
        return self._known.get(key)

    def forget(self, key: Key) -> bool:
        """Drop a chat; returns whether it was known."""
        return self._known.pop(key, None) is not None

    def begin(self, key: Key, messages: Sequence[Message], *, has_examples: bool = False) -> Step:
        """Take a request of a chat: the next answer is being made from now on, until ``finish`` or ``give_up``.

        Args:
            key: Whose chat.
            messages: All of it, as the client has it.
            has_examples: Answers of the assistant in a chat that is not known are examples.

        Raises:
            HistoryError: It does not go on where the chat is, or an answer is being made already.
            RequestRefusedError: A message is none.
        """
        given = [normal(message) for message in messages]
        known = self._known.get(key)
        if known is not None and known.is_busy:
            message = f"trajectory {key[1]!r} is being answered already; send one request of a trajectory at a time"
            raise HistoryError(message)
        if known is None or known.last is None:
            return self._first(key, given, has_examples=has_examples)
        self._known.move_to_end(key)
        if given == known.messages[: known.num_asked]:
            return Step(trajectory=known, messages=given, prompt_ids=known.last[0], repeated=known.last)
        num_known = len(known.messages)
        _check_same(key[1], known.messages, given)
        new = given[num_known:]
        if not new:
            message = f"trajectory {key[1]!r}: the chat has no new message after the last answer"
            raise HistoryError(message)
        prompt_ids = [*known.token_ids, *self._between(known, new)]  # may raise, so before the chat is taken
        known.is_busy = True
        return Step(trajectory=known, messages=given, prompt_ids=prompt_ids)

    def finish(self, step: Step, result: TurnResult, text: str) -> None:
        """Note the answer to a request."""
        known = step.trajectory
        known.is_busy = False
        num_added = len(step.prompt_ids) - len(known.token_ids)
        shift = len(step.prompt_ids)
        known.mask += [0] * num_added + [1] * len(result.token_ids)
        known.token_ids = [*step.prompt_ids, *result.token_ids]
        known.logprobs += result.logprobs
        known.versions += [
            attrs.evolve(span, start=span.start + shift, end=span.end + shift) for span in result.versions
        ]
        known.num_asked = len(step.messages)
        known.messages = [*step.messages, {"role": "assistant", "content": text}]
        known.last = (step.prompt_ids, result, text)

    def give_up(self, step: Step) -> None:
        """Note that a request got no answer: the chat is where it was."""
        step.trajectory.is_busy = False

    def _first(self, key: Key, given: list[dict[str, Any]], *, has_examples: bool) -> Step:
        if not has_examples and any(message.get("role") == "assistant" for message in given):
            message = (
                f"trajectory {key[1]!r} is not known (any more), so its answers would be encoded anew, perhaps as other tokens; "
                'begin a new one, or set metadata {"has_examples": "true"} if they are examples'
            )
            raise HistoryError(message)
        prompt_ids = list(self._tokenizer.begin(given))
        known = self._known[key] = Trajectory(is_busy=True)
        if len(self._known) > self._max:
            self._known.popitem(last=False)
        return Step(trajectory=known, messages=given, prompt_ids=prompt_ids)

    def _between(self, known: Trajectory, new: list[dict[str, Any]]) -> list[int]:
        """Return what new messages add; the end of the answer only once, where it was sampled."""
        added = list(self._tokenizer.go_on(new))
        has_end = known.last is not None and known.last[1].finish_reason is FinishReason.STOP
        return added[1:] if has_end and added[:1] == known.token_ids[-1:] else added


def normal(message: Any) -> dict[str, Any]:
    """Return a message without what is empty, its text in one piece.

    Raises:
        RequestRefusedError: It is none, or has parts that are no text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        text = f"a message is an object with role and content, not {message!r:.80}"
        raise RequestRefusedError(text)
    plain = {name: value for name, value in message.items() if value is not None and value != []}
    parts = plain.get("content", "")
    if not isinstance(parts, str):
        if not isinstance(parts, list) or any(not isinstance(p, Mapping) or p.get("type") != "text" for p in parts):
            text = f"the content of a message is a text or a list of text parts, not {parts!r:.80}"
            raise RequestRefusedError(text)
        plain["content"] = "".join(str(part.get("text", "")) for part in parts)
    return plain


def _check_same(trajectory_id: str, known: list[dict[str, Any]], given: list[dict[str, Any]]) -> None:
    for place, (here, there) in enumerate(zip(known, given, strict=False)):
        if here != there:
            message = (
                f"trajectory {trajectory_id!r}: message {place} is {there!r:.120}, but the pool has {here!r:.120}; "
                "send the chat as it was answered, or begin a new trajectory"
            )
            raise HistoryError(message)
    if len(given) < len(known):
        message = f"trajectory {trajectory_id!r} has {len(known)} messages by now, {len(given)} were sent; begin a new trajectory to branch"
        raise HistoryError(message)
