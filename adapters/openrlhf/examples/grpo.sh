#!/usr/bin/env bash
# GRPO with OpenRLHF over a pool. MODEL, PROMPTS, REWARD and ROSE_POOL come from the environment; further flags are appended and win.
set -euo pipefail
exec "${PYTHON:-python}" -m rose_openrlhf \
  --vllm.num_engines 1 --vllm.tensor_parallel_size 1 \
  --actor.model_name_or_path "$MODEL" --actor.num_nodes 1 --actor.num_gpus_per_node "${GPUS:-8}" \
  --data.prompt_dataset "$PROMPTS" --data.input_key input --data.label_key label \
  --reward.remote_url "$REWARD" \
  --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 \
  --ref.num_nodes 1 --ref.num_gpus_per_node "${GPUS:-8}" --train.colocate_actor_ref \
  --algo.kl.init_coef 0.001 --algo.kl.use_loss --algo.kl.estimator k3 \
  --actor.eps_clip_low_high 0.2 0.2 --actor.loss_agg_mode seq-mean-token-mean \
  --algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip \
  --rollout.batch_size 128 --train.batch_size 1024 --rollout.micro_batch_size 8 --train.micro_batch_size 4 \
  --data.max_len 4096 --rollout.max_new_tokens 3072 --ds.zero_stage 3 --ds.param_dtype bf16 --actor.adam.lr 1e-6 \
  "$@"
