#!/usr/bin/env bash
# DAPO with rollouts on a pool, trainers and rollouts apart: groups with equal rewards are dropped and others started, clip-higher, token-level loss,
# long answers shaped down. Start the pool first: rose pool job.toml
#   POOL=http://HOST:7100 MODEL=Qwen/Qwen2.5-7B DATA=$HOME/data/dapo-math bash dapo.sh [further overrides]
set -euo pipefail
: "${POOL:?the address that rose pool prints}" "${MODEL:?the checkpoint that the pool started from}" "${DATA:?folder with train.parquet and test.parquet}"
export VERL_LOGGING_LEVEL="${VERL_LOGGING_LEVEL:-WARN}" # veRL 0.9.1 trips over one of its own messages otherwise

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
  algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  data.train_batch_size=512 data.gen_batch_size=1 data.max_prompt_length=2048 data.max_response_length=8192 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=512 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  reward.reward_manager.name=dapo +reward.reward_kwargs.max_resp_len=8192 \
  +reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=2048 \
  +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 +reward.reward_kwargs.overlong_buffer_cfg.log=False \
  actor_rollout_ref.rollout.name=rose \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rose_verl.agents.RoseAgentLoopManager \
  +actor_rollout_ref.rollout.engine_kwargs.rose.pool="$POOL" \
  trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=1 \
  actor_rollout_ref.hybrid_engine=False \
  actor_rollout_ref.rollout.checkpoint_engine.backend=rose \
  actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1 \
  trainer.n_gpus_per_node="${GPUS:-8}" trainer.nnodes="${NODES:-1}" \
  trainer.project_name=rose trainer.experiment_name=dapo \
  "$@"
