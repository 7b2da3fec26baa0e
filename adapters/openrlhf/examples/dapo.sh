#!/usr/bin/env bash
# DAPO with OpenRLHF over a pool: higher upper clip, token-mean loss, groups of equal rewards replaced (scores strictly inside the range are kept),
# overlong answers penalised; asynchronous, with rollouts that go on over a weight sync. Environment and further flags as in grpo.sh.
set -euo pipefail
exec "${PYTHON:-python}" -m rose_openrlhf \
  --vllm.num_engines 1 --vllm.tensor_parallel_size 1 \
  --actor.model_name_or_path "$MODEL" --actor.num_nodes 1 --actor.num_gpus_per_node "${GPUS:-8}" \
  --data.prompt_dataset "$PROMPTS" --data.input_key input --data.label_key label \
  --reward.remote_url "$REWARD" \
  --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 --algo.kl.init_coef 0 \
  --actor.eps_clip_low_high 0.2 0.28 --actor.loss_agg_mode token-mean \
  --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 \
  --reward.overlong_buffer_len 1024 --reward.overlong_penalty_factor 1 \
  --algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip \
  --train.async_enable --train.partial_rollout_enable --train.async_queue_size 1 \
  --rollout.batch_size 128 --train.batch_size 1024 --rollout.micro_batch_size 8 --train.micro_batch_size 4 \
  --data.max_len 4096 --rollout.max_new_tokens 3072 --ds.zero_stage 3 --ds.param_dtype bf16 --actor.adam.lr 1e-6 \
  "$@"
