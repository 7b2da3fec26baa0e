"""A turn as veRL asks for it, run to its end at this process's desk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rose_verl.desk import Desk, desk_of
from rose_verl.fields import Answer, joined, refuse_media
from rose_verl.trajectories import Trajectories

trajectories = Trajectories()
"""Of this process: agent loops of one trajectory do not move between processes."""


async def run_turn(
    board: Any,
    trajectory_id: str,
    prompt_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    media: Mapping[str, Any],
    *,
    is_resumed: bool,
) -> Any:
    """Run one turn and return veRL's ``TokenOutput``.

    Args:
        board: The job's.
        trajectory_id: The same for all turns of a trajectory.
        prompt_ids: All tokens so far.
        sampling_params: veRL's; not changed.
        media: What came beside them; refused unless it is empty.
        is_resumed: Take a turn that an abort ended up again here; otherwise its tokens go back as ``aborted``.

    Raises:
        RoseError: The pool could not finish the turn, or it asks for what a pool has not.
    """
    from verl.workers.rollout.replica import TokenOutput  # noqa: PLC0415 - heavy, and there where this runs

    refuse_media(media)
    prompt_ids = [int(token) for token in prompt_ids]
    trajectory = trajectories.get(trajectory_id, prompt_ids)
    desk = desk_of(board)
    request = (trajectory_id, trajectory.group_id)
    first = await _attempt(desk, request, prompt_ids, sampling_params)
    answer = await _resumed(desk, request, prompt_ids, sampling_params, first) if is_resumed else first
    return TokenOutput(
        token_ids=answer.token_ids,
        log_probs=answer.log_probs,
        stop_reason=answer.stop_reason,
        num_preempted=answer.num_preempted,
        extra_fields=trajectory.add(prompt_ids, answer),
    )


async def _attempt(desk: Desk, request: tuple[str, str], prompt_ids: list[int], params: Mapping[str, Any]) -> Answer:
    trajectory_id, group_id = request
    return await desk.generate(
        trajectory_id=trajectory_id, group_id=group_id, prompt_ids=prompt_ids, sampling_params=params
    )


async def _resumed(
    desk: Desk, request: tuple[str, str], prompt_ids: list[int], params: Mapping[str, Any], first: Answer
) -> Answer:
    """Go on with a turn for as long as aborts end it; all parts share the first one's limit."""
    parts, limit = [first], desk.limit(params, len(prompt_ids))
    while parts[-1].stop_reason == "aborted":
        made = [token for part in parts for token in part.token_ids]
        if len(made) >= limit:
            break
        rest = {name: value for name, value in params.items() if name != "max_new_tokens"} | {
            "max_tokens": limit - len(made)
        }
        parts.append(await _attempt(desk, request, prompt_ids + made, rest))
    return attrs.evolve(joined(parts), stop_reason="completed")
