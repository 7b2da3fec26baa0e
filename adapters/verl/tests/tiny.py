"""A tiny policy with a tokenizer, and a task for it; made in seconds, nothing is downloaded. ``python tiny.py FOLDER`` makes them."""

import sys
from pathlib import Path

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_policy(folder, *, is_tied=True, seed=0, spread=0.1):
    """A Qwen3 of two layers in float32, random; with this ``spread`` of its weights greedy answers depend on all of them, Qwen3's own is .02."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    texts = ["what is the sum of one and two ?", "the answer is three", "user assistant system"] * 20
    texts += [str(number) for number in range(200)]
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>", pad_token="<|endoftext|>")  # noqa: S106
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=is_tied,
        initializer_range=spread,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return Path(folder)


def make_task(folder, num_train=64, num_val=4):
    """Questions as a veRL data set."""
    import pandas as pd

    def row(number):
        return {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"what is {number} plus {number + 1} ?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number + 1)},
            "extra_info": {"index": number, "split": "train"},
        }

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame([row(number) for number in range(num_train)]).to_parquet(folder / "train.parquet")
    pd.DataFrame([row(1000 + number) for number in range(num_val)]).to_parquet(folder / "val.parquet")
    return folder


if __name__ == "__main__":
    make_policy(Path(sys.argv[1]) / "policy")
    make_task(Path(sys.argv[1]) / "data")
