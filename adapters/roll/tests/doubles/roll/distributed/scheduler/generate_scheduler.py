"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


class DynamicSamplingScheduler:
    def __init__(self, pipeline_config, actor_cluster, reward_clusters, dataset, collect_fn_cls, collect_fn_kwargs, state=None, is_val=False, get_data_item_kwargs=None):
        raise NotImplementedError('__init__')

    async def initialize(self):
        raise NotImplementedError('initialize')

    def next_request_id(self):
        raise NotImplementedError('next_request_id')

    def gc(self):
        raise NotImplementedError('gc')

    async def pause_sampling(self):
        raise NotImplementedError('pause_sampling')

    async def shutdown(self):
        raise NotImplementedError('shutdown')

    async def get_batch_opt_level_0(self, data, batch_size):
        raise NotImplementedError('get_batch_opt_level_0')

    async def get_batch(self, data, global_step, batch_size):
        raise NotImplementedError('get_batch')

    async def _get_batch_impl(self, data, global_step, batch_size):
        raise NotImplementedError('_get_batch_impl')

    def collect_items_as_batch(self, finished_items):
        raise NotImplementedError('collect_items_as_batch')

    async def sending_request(self):
        raise NotImplementedError('sending_request')

    def get_next_data_item_by_dataloader(self, batch_size=1, use_collect_fn=False, num_workers=8):
        raise NotImplementedError('get_next_data_item_by_dataloader')

    def get_next_dataset_item(self):
        raise NotImplementedError('get_next_dataset_item')

    def get_scheduler_state(self):
        raise NotImplementedError('get_scheduler_state')


class RolloutContext:
    @staticmethod
    async def process_new_prompt(scheduler, prompt_id):
        raise NotImplementedError('process_new_prompt')

    def __init__(self, scheduler, prompt_id, meta_info):
        raise NotImplementedError('__init__')

    def get_request_data(self, meta_info):
        raise NotImplementedError('get_request_data')

    async def do_generate_and_reward(self, max_concurrency):
        raise NotImplementedError('do_generate_and_reward')

    async def generate(self, req, domain):
        raise NotImplementedError('generate')

    async def compute_rewards(self, req, domain):
        raise NotImplementedError('compute_rewards')

    async def abort_running_requests(self):
        raise NotImplementedError('abort_running_requests')
