"""A stand-in of SGLang's scheduler as far as co-serving uses it: slots, cached prefixes, requests, one loop iteration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs

from rose.backends.sglang_server.agreement import Ranks
from rose.backends.sglang_server.endings import SglangCalls
from rose.backends.sglang_server.stepping import Stepping
from rose.backends.step_settings import RoseSettings, read_settings


class Allocator:
    """A pool of slots 1..n."""

    def __init__(self, num: int) -> None:
        self.free_slots = list(range(1, num + 1))

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, num: int) -> list[int] | None:
        if num > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:num], self.free_slots[num:]
        return taken

    def free(self, slots: list[int]) -> None:
        assert not set(slots) & set(self.free_slots), "a slot was freed twice"
        self.free_slots += slots


class Cache:
    """Prefixes of requests that ended."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.slots: list[int] = []

    def evictable_size(self) -> int:
        return len(self.slots)


def make_room(cache: Cache, num: int) -> None:
    missing = max(0, num - cache.allocator.available_size())
    dropped, cache.slots = cache.slots[:missing], cache.slots[missing:]
    cache.allocator.free(dropped)


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_extend(self) -> bool:
        return self.name == "extend"


@attrs.define(eq=False)
class Req:
    rid: str
    prompt: int = 8
    output: int = 0
    max_new_tokens: int = 8
    slots: list[int] = attrs.field(factory=list)
    finished_reason: Any = None
    to_finish: Any = None
    extend_end: int = 0
    extend_len: int = 0
    prefix_len: int = 0
    return_logprob: bool = False
    custom_params: dict[str, Any] | None = None
    logprob: Any = attrs.field(factory=lambda: SimpleNamespace(input_token_logprobs_val=None))
    kv: Any = attrs.field(init=False)
    time_stats: Any = attrs.field(factory=lambda: SimpleNamespace(set_completion_time=lambda: None))

    def __attrs_post_init__(self) -> None:
        self.kv = _Kv(self)

    @property
    def origin_input_ids(self) -> list[int]:
        return [5] * self.prompt

    @property
    def output_ids(self) -> list[int]:
        return [6] * self.output

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(max_new_tokens=self.max_new_tokens, custom_params=self.custom_params)

    def finished(self) -> bool:
        return self.finished_reason is not None


@attrs.define(eq=False)
class _Kv:
    req: Req

    @property
    def holds_kv(self) -> bool:
        return bool(self.req.slots)

    @property
    def kv_allocated_len(self) -> int:
        return len(self.req.slots)


class Batch:
    def __init__(self, mode: str = "decode", *reqs: Req) -> None:
        self.forward_mode = Mode(mode)
        self.reqs = list(reqs)
        self.batch_is_full = True

    def filter_batch(self) -> None:
        self.reqs = [req for req in self.reqs if not req.finished()]


class Scheduler:
    """SGLang's scheduler without a model: a step gives each request of the batch one token."""

    def __init__(self, num_slots: int = 100) -> None:
        self.token_to_kv_pool_allocator = Allocator(num_slots)
        self.tree_cache = Cache(self.token_to_kv_pool_allocator)
        self.max_total_num_tokens = num_slots
        self.page_size = 1
        self.chunked_prefill_size, self.max_prefill_tokens, self.truncation_align_size = 2048, 16384, None
        self.is_mixed_chunk = False
        self.is_generation = True
        self.running_batch = Batch()
        self.last_batch: Batch | None = None
        self.chunked_req: Any = None
        self._pending_chunked_abort_req = None
        self.waiting_queue: list[Req] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.beam_coordinator = SimpleNamespace(retire_group=lambda req: None)
        self.ipc_channels = SimpleNamespace(recv_from_tokenizer=None, recv_from_rpc=None)
        self.weight_updater = SimpleNamespace(offload_tags=set())
        self.sent: list[tuple[str, Any]] = []
        self.output_streamer = SimpleNamespace(stream_output=self._stream)
        self._engine_paused = self.gracefully_exit = False
        self.cur_batch_for_debug: Any = "a batch"
        self.num_idle = 0
        self.inbox: list[Any] = []

    def _stream(self, reqs: list[Req], _: Any) -> None:
        self.sent += [(req.rid, req.finished_reason) for req in reqs]

    @staticmethod
    def _tokenized_requests(message: Any) -> tuple[Any, ...]:
        return (message,) if isinstance(message, Req) else tuple(message) if isinstance(message, list) else ()

    def _release_aborted_request(self, req: Req) -> None:
        assert not req.slots

    def collect_inflight_reqs(self) -> set[Req]:
        return {req for batch in (self.running_batch, self.last_batch) if batch for req in batch.reqs}

    def is_fully_idle(self) -> bool:
        return not self.running_batch.reqs and not self.waiting_queue

    def on_idle(self) -> None:
        self.num_idle += 1

    def ingest_requests(self) -> None:
        messages, self.inbox = self.inbox, []
        for message in messages:
            message()

    def run(self, req: Req, num_slots: int | None = None) -> Req:
        """Have a request in the running batch, with its slots."""
        req.slots = self.token_to_kv_pool_allocator.alloc(num_slots or req.prompt) or []
        self.running_batch.reqs.append(req)
        return req


def release_kv(req: Req, cache: Cache, *, checkpoint: bool) -> None:
    """Free a request's slots; half of them stay cached with a checkpoint."""
    num_kept = len(req.slots) // 2 if checkpoint else 0
    cache.slots += req.slots[:num_kept]
    cache.allocator.free(req.slots[num_kept:])
    req.slots = []


def stepping_for(
    scheduler: Scheduler, settings: RoseSettings | None = None, inbox: list[Any] | None = None
) -> Stepping:
    """Return the stepping of a scheduler, which is the only rank."""
    arrived = [] if inbox is None else inbox

    def read() -> list[Any]:
        found = list(arrived)
        arrived.clear()
        return found

    return Stepping(
        scheduler,
        settings or read_settings({}),
        ranks=Ranks(SimpleNamespace(world_size=1, rank_in_group=0)),
        calls=SglangCalls(abort_reason=lambda message: message, release_kv=release_kv, make_room=make_room),
        read_inputs=read,
    )
