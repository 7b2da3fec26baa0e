"""The sum over experts that torch computes from plain weights, beside the same sum written down token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from rose.backends.vllm.plain_weights import _mixture

NUM_TOKENS, HIDDEN, WIDTH, EXPERTS = 7, 6, 4, 5


def call(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a step: two experts a token, expert 3 chosen by none."""
    chosen = torch.tensor([[0, 1], [4, 0], [2, 4], [1, 2], [0, 4], [4, 1], [2, 0]], dtype=torch.int32)
    return {
        "topk_ids": chosen,
        "topk_weights": torch.rand(chosen.shape, generator=torch.Generator().manual_seed(1)),
        "expert_map": None,
        "activation": SimpleNamespace(value="silu"),
        "apply_router_weight_on_input": False,
    } | changes


def draw(*shape: int, seed: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, W13, W2 = (
    draw(NUM_TOKENS, HIDDEN, seed=2),
    draw(EXPERTS, 2 * WIDTH, HIDDEN, seed=3),
    draw(EXPERTS, HIDDEN, WIDTH, seed=4),
)


def expected(arguments: dict[str, Any], experts: range, b13: Any = None, b2: Any = None) -> Any:
    """Return the sum over those experts; gate rows come before up rows."""
    activation = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[arguments["activation"].value]
    total = torch.zeros_like(X)
    for token in range(NUM_TOKENS):
        for expert, share in zip(arguments["topk_ids"][token].tolist(), arguments["topk_weights"][token], strict=True):
            if expert in experts:
                both = W13[expert] @ X[token] + (0 if b13 is None else b13[expert])
                out = W2[expert] @ (activation(both[:WIDTH]) * both[WIDTH:]) + (0 if b2 is None else b2[expert])
                total[token] += out * (1 if arguments["apply_router_weight_on_input"] else share)
    return total


@pytest.mark.parametrize(
    "changes", [{}, {"activation": SimpleNamespace(value="gelu")}, {"apply_router_weight_on_input": True}]
)
def test_each_token_gets_its_experts(changes: dict[str, Any]) -> None:
    arguments = call(**changes)
    found = _mixture(X, (W13, W2), (None, None), arguments)
    torch.testing.assert_close(found.double(), expected(arguments, range(EXPERTS)), rtol=1e-5, atol=1e-5)


def test_biases_are_added() -> None:
    b13, b2 = draw(EXPERTS, 2 * WIDTH, seed=5), draw(EXPERTS, HIDDEN, seed=6)
    found = _mixture(X, (W13, W2), (b13, b2), call())
    torch.testing.assert_close(found.double(), expected(call(), range(EXPERTS), b13, b2), rtol=1e-5, atol=1e-5)


def test_ranks_that_hold_some_experts_add_up() -> None:
    """Expert parallelism: each rank has the weights of its experts alone, and a map of where."""
    first, second = range(2), range(2, EXPERTS)
    maps = (torch.tensor([0, 1, -1, -1, -1]), torch.tensor([-1, -1, 0, 1, 2]))
    for experts, local_of in zip((first, second), maps, strict=True):
        held = slice(experts.start, experts.stop)
        found = _mixture(X, (W13[held], W2[held]), (None, None), call(expert_map=local_of))
        torch.testing.assert_close(found.double(), expected(call(), experts), rtol=1e-5, atol=1e-5)


def test_ranks_that_hold_a_part_of_each_expert_add_up() -> None:
    """Tensor parallelism: half the rows of gate and of up, and the columns of down that go with them."""
    total = torch.zeros_like(X)
    for rows in (slice(0, 2), slice(2, 4)):
        gate, up = W13[:, :WIDTH][:, rows], W13[:, WIDTH:][:, rows]
        total += _mixture(X, (torch.cat((gate, up), dim=1), W2[:, :, rows]), (None, None), call())
    torch.testing.assert_close(total, expected(call(), range(EXPERTS)), rtol=1e-5, atol=1e-5)
