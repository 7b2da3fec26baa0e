"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

from roll.distributed.executor.worker import Worker


class ActorWorker(Worker):
    def __init__(self, worker_config):
        raise NotImplementedError('__init__')

    def initialize(self, pipeline_config):
        raise NotImplementedError('initialize')

    def train_step(self, data):
        raise NotImplementedError('train_step')

    def compute_log_probs(self, data):
        raise NotImplementedError('compute_log_probs')

    def forward_func_log_probs(self, data, output_tensor):
        raise NotImplementedError('forward_func_log_probs')

    def get_old_log_probs_with_cache(self, data, log_probs):
        raise NotImplementedError('get_old_log_probs_with_cache')

    def loss_func(self, data, output_tensor):
        raise NotImplementedError('loss_func')

    def do_checkpoint(self, global_step, is_last_step=None):
        raise NotImplementedError('do_checkpoint')


class InferWorker(Worker):
    def __init__(self, worker_config):
        raise NotImplementedError('__init__')

    async def initialize(self, pipeline_config):
        raise NotImplementedError('initialize')

    def get_url(self):
        raise NotImplementedError('get_url')

    async def load_states(self, *args, **kwargs):
        raise NotImplementedError('load_states')

    async def offload_states(self, *args, **kwargs):
        raise NotImplementedError('offload_states')

    async def load_states_partial(self, target_dp_ranks):
        raise NotImplementedError('load_states_partial')

    async def offload_states_partial(self, target_dp_ranks):
        raise NotImplementedError('offload_states_partial')

    async def broadcast_parameter(self, *args, **kwargs):
        raise NotImplementedError('broadcast_parameter')

    async def setup_collective_group(self, *args, **kwargs):
        raise NotImplementedError('setup_collective_group')

    async def start_model_update(self, *args, **kwargs):
        raise NotImplementedError('start_model_update')

    async def update_parameter_in_bucket(self, *args, **kwargs):
        raise NotImplementedError('update_parameter_in_bucket')

    async def add_lora(self, *args, **kwargs):
        raise NotImplementedError('add_lora')

    async def generate(self, data):
        raise NotImplementedError('generate')

    async def generate_request(self, payload):
        raise NotImplementedError('generate_request')

    async def abort_requests(self, request_ids):
        raise NotImplementedError('abort_requests')

    async def process_weights_after_loading(self):
        raise NotImplementedError('process_weights_after_loading')
