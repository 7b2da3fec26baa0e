"""The replica ``rose``: a front of the pool where veRL expects a server with engines.

What veRL's control calls mean, with engines that are not this job's alone:

======================================  =====================================================================================
call                                    here
======================================  =====================================================================================
``generate``                            one turn of the pool
``abort_all_requests``                  separate and fully asynchronous modes: as ``on_abort`` says, for this job's turns only. Elsewhere
                                        nothing: a synchronous client would take an aborted turn for a finished one
``resume_generation``                   turns that an abort held back begin
``sleep`` ``wake_up``                   nothing: no memory of the trainers' devices is held
``release_kv_cache``, ``resume_...``    nothing: the pool drops caches of old weights when an engine takes new ones
``clear_kv_cache``                      nothing, for the same reason
``start_profile`` ``stop_profile``      nothing: profile the engines where they run
``update_weights``, and what is around  nothing: the trainers publish, and the pool sees to its engines
======================================  =====================================================================================
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from rose.errors import ConfigError, RoseError
from rose.frameworks import PoolPlace
from rose_verl.board import MAX_CALLS, make_board
from rose_verl.say import logger
from rose_verl.settings import Settings
from rose_verl.trajectories import PrefixBook
from rose_verl.turns import run_turn

_ASK_S = 10.0


class Front:
    """The server's actor: a thin one, on no device.

    Args:
        board: The job's board.
        is_aborting: Whether veRL's aborts end turns.
    """

    def __init__(self, board: Any, *, is_aborting: bool) -> None:
        self._board, self._is_aborting = board, is_aborting
        self._prefixes = PrefixBook()

    async def generate(
        self,
        *,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        priority: int = 0,
        **media: Any,
    ) -> Any:
        """Run a turn for a client that comes through veRL's own router; the trajectory is told by its tokens.

        Raises:
            RoseError: The pool could not finish it, or it asks for what a pool has not.
        """
        del request_id, priority
        prompt_ids = [int(token) for token in prompt_ids]
        trajectory_id = self._prefixes.take(prompt_ids)
        output = await run_turn(self._board, trajectory_id, prompt_ids, sampling_params, media, is_resumed=False)
        self._prefixes.note(trajectory_id, prompt_ids + output.token_ids)
        return output

    async def abort_all_requests(self, *, reject_request: bool = False) -> dict[str, Any]:
        """End this job's turns, where aborts do that."""
        del reject_request  # the pool stays; turns that come are its affair
        if self._is_aborting:
            await self._board.abort.remote()
        return {"aborted_count": 0, "request_ids": []}

    async def resume_generation(self) -> None:
        """Let turns begin."""
        if self._is_aborting:
            await self._board.resume.remote()

    async def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Take no part in what veRL's checkpoint engines do between trainers and replicas."""
        del method, args, kwargs
        return {}

    async def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; the module says why."""

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    start_profile = stop_profile = update_weights = set_global_steps = _nothing


def make_front(board: Any, *, is_aborting: bool) -> Any:
    """Return a front's handle. Control calls get through however many turns are under way; arguments as of ``Front``."""
    return ray.remote(Front).options(num_cpus=0, max_concurrency=MAX_CALLS).remote(board, is_aborting=is_aborting)


class RoseReplica(RolloutReplica):  # type: ignore[misc] # veRL is untyped here
    """Makes a front. Raises ``ConfigError`` where it is made if the job wants what a pool cannot do, before a turn runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            message = "a pool holds the policy's weights; run reward and teacher models with vllm or sglang, not with rollout.name=rose"
            raise _told(ConfigError(message))
        try:
            self._settings = Settings.of(self.config, self.model_config)
        except RoseError as error:
            raise _told(error) from None
        self._board: Any = None

    async def launch_servers(self) -> None:
        """Make the front, after asking whether the pool is there.

        Raises:
            RoseError: It is not, or it does not let this job in.
        """
        try:
            await asyncio.to_thread(_check, self._settings.place)
        except RoseError as error:
            raise _told(error) from None
        self._board = make_board(self._settings)
        is_aborting = self._settings.options.on_abort == "abort" and self.rollout_mode is RolloutMode.STANDALONE
        address = f"rose-front-{self.replica_rank}{self.name_suffix}"
        front = make_front(self._board, is_aborting=is_aborting)
        self.servers, self._server_handle, self._server_address = [front], front, address

    async def init_standalone(self) -> None:
        """Make the front alone. It stands for the workers of a checkpoint engine, too, so no device is reserved for rollouts."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()
        self.workers = list(self.servers)

    async def init_colocated(self, resource_pool: Any) -> None:
        """Make the front alone."""
        self.rollout_mode, self.resource_pool = RolloutMode.COLOCATED, resource_pool
        await self.launch_servers()
        self.workers = list(self.servers)


def _check(place: PoolPlace) -> None:
    """Ask the pool whether it is there, and whether it knows where weights go; blocks."""
    place.check()
    place.call("GET", "/v1/store", timeout_s=_ASK_S)


def _told(error: RoseError) -> RoseError:
    """Tell the user in a line of its own: what Ray makes of an exception is long."""
    logger().error("%s", error)
    return error
