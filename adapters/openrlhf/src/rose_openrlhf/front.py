"""The one engine that OpenRLHF sees: the front of the pool. It has the methods of OpenRLHF's own engine actor and runs no model.

The life of a front:

1. *[driver]* ``rose_openrlhf.engines.EngineMaker`` starts it as a Ray actor in place of vLLM engines.
2. *[front]* connects to the pool, loads the executor, and publishes the checkpoint that the training starts from as version 0.
3. *[trainer rank 0]* ``init_process_group``: the front is rank 1 of 2.
4. *[generator]* ``generate_responses`` a prompt: OpenRLHF's executors run here, unchanged, with this object as ``llm_engine``; every turn is one of the pool's.
5. *[trainer rank 0]* ``update_weight`` a tensor; the last one publishes (``rose_openrlhf.weights``).
6. Steps 4 and 5 until the actor ends with the job.

Invariants:

* A turn that begins after a sync returned runs on that sync's weights or newer ones; where no engine took them, on those of the sync before. One
  that was under way goes on; its version spans say which weights made which tokens.
* Between ``pause_generation`` and ``resume_generation`` no turn begins. Turns under way are not stopped: an engine pauses for its own activation
  only. A pause that nobody ends is over after ``hold_s``.
* One call of an executor is one trajectory, the samples of a prompt are one group.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import attrs

from rose.errors import ConfigError
from rose.types import FinishReason, TurnResult
from rose_openrlhf.answers import RequestOutput, mark, to_output
from rose_openrlhf.broadcast import BroadcastMember
from rose_openrlhf.codec import HfCodec
from rose_openrlhf.sampling import Request, read_request
from rose_openrlhf.turns import Trajectory, TurnRunner, current, twins
from rose_openrlhf.weights import WeightInlet, in_thread

_logger = logging.getLogger(__name__)


@attrs.define(kw_only=True, repr=False, eq=False)
class PoolFront:
    """Serves OpenRLHF's calls. All methods run on one event loop.

    Args:
        run: Name of this launch, the prefix of trajectories.
        runner: Runs turns at the pool.
        inlet: Takes weights.
        member: Of the broadcast group.
        executor: OpenRLHF's, from its own loader.
        load_tokenizer: Makes a tokenizer for calls that come outside an executor.
        max_model_len: ``--data.max_len``.
        hold_s: The longest pause.
    """

    run: str
    runner: TurnRunner
    inlet: WeightInlet
    member: BroadcastMember
    executor: Any
    load_tokenizer: Callable[[], Any]
    max_model_len: int
    hold_s: float
    _numbers: itertools.count[int] = attrs.field(factory=itertools.count)
    _num_unfinished: int = 0
    _is_open: asyncio.Event = attrs.field(factory=asyncio.Event)
    _tokenizer: Any = None
    _has_warned: bool = False

    def __attrs_post_init__(self) -> None:
        """Begin open."""
        self._is_open.set()
        self.runner.gate = self._wait_until_open

    # Rollouts.

    async def generate_responses(
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[Any]:
        """Run the executor ``num_samples`` times on a prompt; each gets settings of its own, since executors change them."""
        group_id = f"{self.run}/{next(self._numbers)}"
        names = {
            "prompt": prompt,
            "label": label,
            "max_length": max_length,
            "hf_tokenizer": hf_tokenizer,
            "images": images,
        }

        trajectories = [Trajectory(f"{group_id}/{number}", group_id, hf_tokenizer) for number in range(num_samples)]

        async def sample(trajectory: Trajectory) -> Any:
            current.set(trajectory)  # gather runs each sample in a context of its own
            response = await self.executor.execute(
                **names, sampling_params=copy.deepcopy(sampling_params), llm_engine=self
            )
            return mark(response, trajectory.notes())

        self._num_unfinished += num_samples
        try:
            responses = await _all_or_error([sample(trajectory) for trajectory in trajectories])
        finally:
            self._num_unfinished -= num_samples
        self._warn_of_twins(trajectories)
        return responses

    def _warn_of_twins(self, trajectories: list[Trajectory]) -> None:
        """Say once that samples are not independent: nothing else would tell, and groups of equal rewards teach nothing."""
        twin = None if self._has_warned else twins(trajectories)
        if twin is not None:
            self._has_warned = True
            _logger.warning(
                "two samples of prompt %s are the same %d tokens, which happens by chance once in e^%.0f: engines of the pool draw with one seed; "
                "leave seed out of their options in the pool's job file, or give each its own",
                *(twin.group_id, len(twin.drawn), -twin.log_prob),
            )

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None
    ) -> RequestOutput:
        """Answer one turn of an executor.

        Raises:
            ConfigError: The settings ask for what a pool does not have, or its engines take shorter contexts than the job.
            NotImplementedError: There are images.
            TurnFailedError: The pool could not answer.
        """
        if multi_modal_data:
            message = "turns of a pool are token ids; images cannot be sent (--data.max_images_per_prompt 0)"
            raise NotImplementedError(message)
        trajectory, prompt_ids = self._trajectory(), [int(token) for token in prompt_token_ids]
        codec = HfCodec(trajectory.tokenizer if trajectory.tokenizer is not None else await self._own_tokenizer())
        request = read_request(
            sampling_params, num_prompt_tokens=len(prompt_ids), max_model_len=self.max_model_len, codec=codec
        )
        result = await self.runner.run(trajectory, prompt_ids, request)
        check_room(result, request)
        return to_output(f"{trajectory.trajectory_id}#{next(self._numbers)}", prompt_ids, request, result, codec)

    def get_num_unfinished_requests(self) -> int:
        """Return how many samples are under way."""
        return self._num_unfinished

    def _trajectory(self) -> Trajectory:
        running = current.get()
        if running is not None:
            return running
        name = f"{self.run}/{next(self._numbers)}"
        return Trajectory(f"{name}/0", name)

    async def _own_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(self.load_tokenizer)
        return self._tokenizer

    # Weights.

    async def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        use_ray: bool,  # noqa: FBT001 - OpenRLHF's
    ) -> None:
        """Join the trainer's group."""
        await in_thread(
            functools.partial(
                self.member.join,
                address=master_address,
                port=master_port,
                rank=rank_offset,
                world_size=world_size,
                group_name=group_name,
                backend=backend,
                use_ray=use_ray,
            )
        )

    async def update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:  # noqa: FBT001, FBT002 - OpenRLHF's
        """Receive one tensor; ``empty_cache`` marks a sync's last one, which returns when the version is with the engines."""
        tensor = await in_thread(self.member.receive, dtype, shape)
        await self.inlet.take(name, tensor, is_last=empty_cache)

    async def update_weight_cuda_ipc(self, *_: Any, **__: Any) -> None:
        """Refuse.

        Raises:
            NotImplementedError: Always.
        """
        message = "weights by CUDA IPC need engines on the trainer's GPUs; drop --train.colocate_all"
        raise NotImplementedError(message)

    async def reset_prefix_cache(self) -> None:
        """Do nothing: an engine drops its prefix cache with each activation."""

    async def pause_generation(self) -> None:
        """Let no turn begin until ``resume_generation``."""
        self._is_open.clear()

    async def resume_generation(self) -> None:
        """Let turns begin again."""
        self._is_open.set()

    async def _wait_until_open(self) -> None:
        if self._is_open.is_set():
            return
        try:
            async with asyncio.timeout(self.hold_s):
                await self._is_open.wait()
        except TimeoutError:
            _logger.warning("generation was paused for %.0f s and never resumed; turns begin again", self.hold_s)
            self._is_open.set()

    async def sleep(self, level: int = 1) -> None:
        """Do nothing: the pool's engines are on devices of their own."""

    async def wake_up(self, tags: Any = None) -> None:
        """Do nothing, as ``sleep``."""


def check_room(result: TurnResult, request: Request) -> None:
    """Check that an answer had the room that OpenRLHF gave it, since one that the engines cut off would pass for one of full length.

    Raises:
        ConfigError: It had not.
    """
    if result.finish_reason is FinishReason.LENGTH and len(result.token_ids) < request.sampling.max_tokens:
        message = (
            f"an answer was cut off after {len(result.token_ids)} of {request.sampling.max_tokens} tokens by the context of the pool's engines: "
            "give them a max_model_len of at least --data.max_len"
        )
        raise ConfigError(message)


async def _all_or_error(samples: list[Awaitable[Any]]) -> list[Any]:
    """Return all results; the first error ends the others, and is raised as it is."""
    tasks = [asyncio.ensure_future(sample) for sample in samples]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
