"""Reads the events that answer one ``/generate``. No I/O.

Invariants:

* A stream is over when an event has a finish reason, when one of the client's own stop ids came, or when the server tells an error; an end of
  the connection is none of these.
* Every token is handed out once. SGLang counts the tokens of a request (``completion_tokens``), and the count decides what of an event is
  new: an abort of a request that waits repeats the last token and all log-probs, a server that is not incremental repeats everything.
* What is wrong with an event is raised after the tokens of the events before it have been handed out, and nothing is filled in.
* Each token has the weight version that made it. SGLang labels an event as it passes the front end, and tells for certain (``weight_versions``)
  with the last event only; where the two differ the stream ends with an error, for wrong versions were handed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rose.backends.answers import AnswerReader, are_ids, own_ending
from rose.backends.sglang.answers import of_code, told_in_stream
from rose.backends.sglang.facts import read_label
from rose.types import EngineRequest, FinishReason, TokenChunk, WeightVersion


@attrs.define
class _Run:
    """Tokens up to ``end``, from the run before on, came under one label."""

    label: str | None
    end: int


class EventReader(AnswerReader):
    """Reads the events of one request.

    Args:
        request: What was asked for.
        labels: Versions of weight labels that are not of the form ``run:n``.
        own_stops: Token ids that end the stream here; the server does not know of them.
        is_incremental: Whether events carry what is new; otherwise everything so far.

    Attributes:
        num_events: Events with the request's own state so far; from the first on the server's scheduler has it.
        is_cut: It ended here, and the server goes on.
    """

    def __init__(
        self,
        request: EngineRequest,
        *,
        labels: Mapping[str, WeightVersion] | None = None,
        own_stops: frozenset[int] = frozenset(),
        is_incremental: bool = True,
    ) -> None:
        super().__init__(request)
        self.num_events = 0
        self.is_cut = False
        self._labels = labels or {}
        self._own_stops = own_stops
        self._is_incremental = is_incremental
        self._runs: list[_Run] = []
        self._chunks: list[TokenChunk] = []

    def feed(self, data: bytes) -> list[TokenChunk]:
        """Read what came next; returns its tokens, a chunk a weight version, without a finish reason."""
        self._read(data)
        chunks, self._chunks = self._chunks, []
        return chunks

    def _take(self, event: Mapping[str, Any]) -> None:
        if self.is_cut:
            return
        if "error" in event:
            raise told_in_stream(event["error"])
        if "meta_info" not in event:
            self._fail(f"an event has no meta_info: {str(event)[:200]}")
        meta = event["meta_info"]
        try:
            ids, num_told = event["output_ids"], meta["completion_tokens"]
            finish, label = meta["finish_reason"], meta["weight_version"]
            kind = None if finish is None else finish["type"]
        except (AttributeError, KeyError, TypeError) as error:
            self._fail(f"an event has a malformed field ({error!r})", error)
        if self.finish_reason is not None:
            self._fail("there was more after the finish reason")
        self.num_events += 1
        first, num_new = self._new_of(ids, num_told)
        new = tuple(ids[first : first + num_new])
        logprobs = self._checked_logprobs(meta.get("output_token_logprobs"), new, first)
        stop = next((place for place, token in enumerate(new) if token in self._own_stops), None)
        if stop is not None:
            new, logprobs = new[: stop + 1], logprobs[: stop + 1]
            self.is_cut = True
        spans = self._spans(meta.get("weight_versions"), num_told)
        self._hand_out(new, logprobs, spans or [(label, self.num_tokens + len(new))])
        if spans and not self.is_cut:
            self._compare(spans)
        if self.is_cut:
            self.finish_reason = FinishReason.STOP
        elif kind is not None:
            self.finish_reason = self._reason(kind, finish)

    def _new_of(self, ids: Any, num_told: Any) -> tuple[int, int]:
        """Return where in an event's ids the new ones begin, and how many they are."""
        if type(num_told) is not int or not are_ids(ids):
            self._fail(f"an event has malformed token ids: {str(ids)[:60]}, counted {num_told!r}")
        num_new = num_told - self.num_tokens
        self._check_count(num_told)
        num_there = len(ids) if self._is_incremental else len(ids) - self.num_tokens
        if not 0 <= num_new <= num_there:
            self._fail(
                f"tokens were lost: the server counts {num_told}, {self.num_tokens} came before and {num_there} now"
            )
        return (0 if self._is_incremental else self.num_tokens), num_new

    def _checked_logprobs(self, found: Any, new: Sequence[int], first: int) -> tuple[float, ...]:
        """Return one log-prob for each new token, where they were asked for."""
        if not self._has_logprobs or not new:
            return ()
        try:
            rows = found[first : first + len(new)]
            values = [value for value, _, *_ in rows]
            is_theirs = [token for _, token, *_ in rows] == list(new)
        except (TypeError, ValueError) as error:
            self._fail(f"{len(new)} tokens came without one log-prob each ({error!r})", error)
        if not is_theirs:
            self._fail(f"{len(new)} tokens came without one log-prob each: there are {len(rows)}, or of other tokens")
        self._check_logprobs(values)
        return tuple(values)

    def _spans(self, told: Any, num_told: int) -> list[tuple[str | None, int]]:
        """Return the labels with the number of tokens up to the end of each; nothing where the server does not tell."""
        if not told:
            return []
        spans: dict[int, str | None] = {}
        try:
            for span in told:
                if span["end"] > span["start"]:
                    if spans and span["version"] == next(reversed(spans.values())):
                        spans.popitem()
                    spans[int(span["end"])] = span["version"]
        except (KeyError, TypeError, ValueError) as error:
            self._fail(f"malformed weight_versions ({error!r})", error)
        if spans and next(reversed(spans)) != num_told:
            self._fail(f"weight_versions end at token {next(reversed(spans))} of {num_told}")
        return [(label, end) for end, label in spans.items()]

    def _hand_out(self, new: Sequence[int], logprobs: Sequence[float], spans: Sequence[tuple[str | None, int]]) -> None:
        begin, end = self.num_tokens, self.num_tokens + len(new)
        at = begin
        for label, span_end in spans:
            until = min(span_end, end)
            if until <= at:
                continue
            version = read_label(label, self._labels)
            part = slice(at - begin, until - begin)
            self._chunks.append(TokenChunk(token_ids=tuple(new[part]), logprobs=tuple(logprobs[part]), version=version))
            self._note(label, until)
            at = until
        self.num_tokens = end

    def _note(self, label: str | None, end: int) -> None:
        if self._runs and self._runs[-1].label == label:
            self._runs[-1].end = end
        else:
            self._runs.append(_Run(label, end))

    def _compare(self, spans: Sequence[tuple[str | None, int]]) -> None:
        """Check what was handed out against what the server says at the end."""
        handed = [(run.label, run.end) for run in self._runs]
        if handed != list(spans):
            self._fail(
                f"tokens were handed out under the weight labels {handed}, and the server says now {list(spans)}"
            )

    def _reason(self, kind: object, finish: Mapping[str, Any]) -> FinishReason:
        message, code = str(finish.get("message") or ""), finish.get("status_code")
        found = self._finish_reason(kind)
        if found is not FinishReason.ABORTED:
            return found
        own = own_ending(message, "the request")
        if own is None and code is not None:
            raise of_code(code, f"SGLang ended the request: {message} (status {code})")
        return own or found
