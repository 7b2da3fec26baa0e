"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


class WorkerConfig:
    name = None
    worker_cls = None
    pg_variant = None
    model_args = None
    training_args = None
    data_args = None
    generating_args = None
    strategy_args = None
    world_size = None
    device_mapping = None
    num_gpus_per_worker = 1
    model_update_frequency = 1
    infer_batch_size = 16
    backend_timeout = 30
    system_envs = None
    topr_positive_weight = 1.0
    topr_negative_weight = 1.0
    max_concurrency = 1
    use_dynamic_batching_in_train = False
    max_tokens_per_microbatch_in_train = 0
    sequence_length_round_in_train = 4
    use_dynamic_batching_in_infer = False
    max_tokens_per_microbatch_in_infer = None
    sequence_length_round_in_infer = 4
    offload_nccl = False
    use_sequence_packing = False
    sequence_packing_args = None
    logits_in_fp32 = False
    router_replay = None
    apply_loss_scale = True
    mtp_training_mode = 'disabled'
    opd_kl_coef = None
    tag_included = None
    def __post_init__(self):
        raise NotImplementedError('__post_init__')


class StrategyArguments:
    strategy_name = 'fsdp2_train'
    strategy_config = None
    def __post_init__(self):
        raise NotImplementedError('__post_init__')
