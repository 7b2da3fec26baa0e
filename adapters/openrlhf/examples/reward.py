"""A reward as OpenRLHF loads it (``--reward.remote_url reward.py``): the share of digits in the answer."""

import torch


def reward_func(queries, prompts, labels, **_):
    """Score each query (prompt and answer) between 0 and 1."""
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([sum(char.isdigit() for char in answer) / max(len(answer), 1) for answer in answers])
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {"answer_chars": torch.tensor([float(len(answer)) for answer in answers])},
    }
