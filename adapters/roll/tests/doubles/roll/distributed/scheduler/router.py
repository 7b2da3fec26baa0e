"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


class EnvAffinityRouter:
    async def initialize(self):
        raise NotImplementedError('initialize')

    async def generate_request(self, payload, request_id, uid):
        raise NotImplementedError('generate_request')

    async def abort_requests(self, request_ids, uid):
        raise NotImplementedError('abort_requests')

    async def abort_all(self, request_ids):
        raise NotImplementedError('abort_all')

    def _get_least_active_dp_rank(self):
        raise NotImplementedError('_get_least_active_dp_rank')

    def _clear_src_rank_mappings(self, src_ranks):
        raise NotImplementedError('_clear_src_rank_mappings')

    async def rebalance_on_shrink(self, shrink_dp_ranks):
        raise NotImplementedError('rebalance_on_shrink')

    async def rebalance_on_shrink_impl(self, shrink_dp_ranks):
        raise NotImplementedError('rebalance_on_shrink_impl')

    async def _rebalance_on_shrink(self, shrink_dp_ranks):
        raise NotImplementedError('_rebalance_on_shrink')

    async def rebalance_on_expand(self, expand_dp_ranks):
        raise NotImplementedError('rebalance_on_expand')

    async def rebalance_on_expand_impl(self, expand_dp_ranks):
        raise NotImplementedError('rebalance_on_expand_impl')

    async def _rebalance_on_expand(self, expand_dp_ranks):
        raise NotImplementedError('_rebalance_on_expand')


class PromptAffinityRouter:
    async def initialize(self):
        raise NotImplementedError('initialize')

    def __repr__(self):
        raise NotImplementedError('__repr__')

    async def generate_request(self, payload, request_id, uid):
        raise NotImplementedError('generate_request')

    async def abort_requests(self, request_ids, uid):
        raise NotImplementedError('abort_requests')

    async def abort_all(self, request_ids):
        raise NotImplementedError('abort_all')

    async def acquire(self, credit):
        raise NotImplementedError('acquire')

    async def reacquire(self, dp_rank, credit):
        raise NotImplementedError('reacquire')

    def release(self, dp_rank, credit):
        raise NotImplementedError('release')

    def size(self):
        raise NotImplementedError('size')

    def full(self):
        raise NotImplementedError('full')


class Router:
    def __init__(self, router_manager, workers, model_path, router_args):
        raise NotImplementedError('__init__')

    async def initialize(self):
        raise NotImplementedError('initialize')

    async def generate_request(self, payload, request_id, uid):
        raise NotImplementedError('generate_request')

    async def abort_requests(self, request_ids, uid):
        raise NotImplementedError('abort_requests')

    async def abort_all(self, request_ids):
        raise NotImplementedError('abort_all')

    async def rebalance_on_shrink(self, shrink_dp_ranks):
        raise NotImplementedError('rebalance_on_shrink')

    async def rebalance_on_expand(self, expand_dp_ranks):
        raise NotImplementedError('rebalance_on_expand')


class RouterClient:
    def __init__(self, proxy, meta):
        raise NotImplementedError('__init__')

    def _preprocess_generate(self, req, request_id):
        raise NotImplementedError('_preprocess_generate')

    def _postprocess_generate(self, req, response):
        raise NotImplementedError('_postprocess_generate')

    async def generate_request(self, req, request_id, uid):
        raise NotImplementedError('generate_request')

    def generate_request_sync(self, req, request_id, uid):
        raise NotImplementedError('generate_request_sync')


class RouterManager:
    def __init__(self, actor_cluster, router_args, num_gpus_per_node):
        raise NotImplementedError('__init__')

    async def initialize(self):
        raise NotImplementedError('initialize')

    def router_meta(self):
        raise NotImplementedError('router_meta')

    @classmethod
    def create_client_sync(cls, self):
        raise NotImplementedError('create_client_sync')

    @classmethod
    async def create_client(cls, self):
        raise NotImplementedError('create_client')

    async def generate_request(self, payload, request_id, uid):
        raise NotImplementedError('generate_request')

    async def abort_requests(self, request_ids, uid):
        raise NotImplementedError('abort_requests')

    async def abort_all(self):
        raise NotImplementedError('abort_all')

    async def on_send_request(self, request_id):
        raise NotImplementedError('on_send_request')

    async def on_request_routed(self, request_id):
        raise NotImplementedError('on_request_routed')

    def suspend(self):
        raise NotImplementedError('suspend')

    def resume(self):
        raise NotImplementedError('resume')

    async def shutdown(self):
        raise NotImplementedError('shutdown')

    async def wait_complete(self):
        raise NotImplementedError('wait_complete')

    def size(self):
        raise NotImplementedError('size')

    async def shrink_workers(self, target_gpus):
        raise NotImplementedError('shrink_workers')

    async def expand_workers(self, target_gpus, skip_load=False):
        raise NotImplementedError('expand_workers')
