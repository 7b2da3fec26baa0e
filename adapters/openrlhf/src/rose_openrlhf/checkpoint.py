"""The weights that the training starts from, as the trainer itself will see them: same loader, same names, same dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def initial_weights(path: str, dtype: str) -> Iterator[tuple[str, Any]]:
    """Yield a checkpoint's parameters under the names that OpenRLHF's sync gives them; each is freed once it was taken.

    Args:
        path: ``--actor.model_name_or_path``.
        dtype: ``--ds.param_dtype``.
    """
    import torch  # noqa: PLC0415 - heavy
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=kind, device_map="cpu")
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().to(kind)
        parameter.data = torch.empty(0, dtype=kind)
