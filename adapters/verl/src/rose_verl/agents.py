"""veRL's agent loops with a client that goes to the pool directly.

``actor_rollout_ref.rollout.agent.agent_loop_manager_class=rose_verl.agents.RoseAgentLoopManager`` puts it in; workers and agent loops are
veRL's own. This module is for the trainers in ``verl.trainer.ppo.v1``; other trainers have managers of their own, and ``RoseRouter`` serves them.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from rose_verl.board import find_board
from rose_verl.client import RoseClient


class RoseAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc] # veRL is untyped here
    """veRL's manager; its workers get a ``RoseClient``."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, RoseClient.of(llm_client, find_board()), *args, **kwargs)
