"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

from roll.pipeline.rlvr.actor_worker import ActorWorker


class ActorPGWorker(ActorWorker):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError('__init__')

    def _get_or_cache_config(self, key, default_value):
        raise NotImplementedError('_get_or_cache_config')

    def loss_func(self, data, output_tensor):
        raise NotImplementedError('loss_func')

    def _compute_ppo_loss(self, ratio, advantages, final_response_mask, batch_num_tokens, global_valid_samples):
        raise NotImplementedError('_compute_ppo_loss')

    def _compute_vanilla_pg_loss(self, ratio, log_probs, advantages):
        raise NotImplementedError('_compute_vanilla_pg_loss')

    def _compute_tis_loss(self, ratio, log_probs, old_log_probs, advantages, data):
        raise NotImplementedError('_compute_tis_loss')

    def _compute_topr_loss(self, ratio, log_probs, old_log_probs, advantages, data):
        raise NotImplementedError('_compute_topr_loss')

    def _compute_cispo_loss(self, ratio, log_probs, advantages):
        raise NotImplementedError('_compute_cispo_loss')

    def _compute_kimi15_loss(self, ratio, log_probs, old_log_probs, advantages):
        raise NotImplementedError('_compute_kimi15_loss')

    def _get_pg_metrics(self, data, batch_num_tokens, global_valid_samples):
        raise NotImplementedError('_get_pg_metrics')
