#!/usr/bin/env bash
# GRPO on GSM8K with rollouts on a pool. Start the pool first: rose pool job.toml
#   POOL=http://HOST:7100 MODEL=Qwen/Qwen3-8B DATA=$HOME/data/gsm8k bash grpo.sh [further overrides]
set -euo pipefail
: "${POOL:?the address that rose pool prints}" "${MODEL:?the checkpoint that the pool started from}" "${DATA:?folder with train.parquet and test.parquet}"

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.rollout.name=rose \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rose_verl.agents.RoseAgentLoopManager \
  +actor_rollout_ref.rollout.engine_kwargs.rose.pool="$POOL" \
  trainer.n_gpus_per_node="${GPUS:-8}" trainer.nnodes="${NODES:-1}" \
  trainer.project_name=rose trainer.experiment_name=grpo \
  "$@"
