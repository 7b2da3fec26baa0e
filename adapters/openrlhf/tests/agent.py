"""For tests: an agent of three turns, as a user writes one. Prompts whose label begins with "greedy" are answered greedily."""

from __future__ import annotations

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

FEEDBACK = " : 7 ?"
STOPS = list(range(150, 400))  # token ids; a random model meets one of them soon


class Environment(AgentInstanceBase):
    """Gives feedback twice, then ends."""

    def __init__(self) -> None:
        self.num_steps = 0

    async def step(self, state_dict: dict, **_: object) -> dict:
        self.num_steps += 1
        text = state_dict["action_text"]
        params = state_dict["sampling_params"]
        return {
            "rewards": torch.tensor(sum(char.isdigit() for char in text) / max(len(text), 1)),
            "scores": 1.0,
            "environment_feedback": FEEDBACK,
            "done": self.num_steps == 3,
            "sampling_params": params,
            "extra_logs": {"turns": torch.tensor([float(self.num_steps)])},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """OpenRLHF's executor with that environment."""

    def __init__(self) -> None:
        super().__init__(Environment)

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        sampling_params.stop_token_ids = STOPS
        if label.startswith("greedy"):
            sampling_params.temperature = 0.0
        return await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)
