"""veRL's client of its servers, at a pool: what agent loops call ``server_manager``.

The base classes ask a router for a server at each turn and send the turn to it under a name that nobody else knows. Here a turn goes from the
agent loop's process straight to the engine that the pool names, under the trajectory's own name; the answer says which step made which
token, in synchronous and asynchronous trainers alike.
"""

from __future__ import annotations

from typing import Any

from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient

from rose_verl.turns import run_turn


class RoseClient(LLMServerClient):  # type: ignore[misc] # veRL is untyped here
    """A client that goes to the pool directly.

    Args:
        board: The job's board.
        config: veRL's whole configuration.
        load_balancer_handle: The router, for those who ask it for other things than turns.
    """

    def __init__(self, *, board: Any, config: Any, load_balancer_handle: Any = None) -> None:
        super().__init__(config=config, load_balancer_handle=load_balancer_handle)
        self._board = board

    @classmethod
    def of(cls, client: Any, board: Any) -> RoseClient:
        """Return the client to use in place of a stock one."""
        return cls(board=board, config=client.config, load_balancer_handle=client._load_balancer)  # noqa: SLF001 - veRL has no other

    @rollout_trace_op  # type: ignore[misc]
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        priority: int = 0,
        **media: Any,
    ) -> Any:
        """Run one turn of the trajectory ``request_id``; arguments and result as of the base class.

        Raises:
            RoseError: The pool could not finish it within ``turn_timeout_s``, or it asks for what a pool has not.
        """
        del priority  # the pool orders turns by trajectories
        return await run_turn(self._board, str(request_id), prompt_ids, sampling_params, media, is_resumed=True)
