"""Prompts."""


class TokensPrompt(dict):  # type: ignore[type-arg] # as vLLM's: keys are prompt_token_ids and multi_modal_data
    """A prompt of token ids."""
