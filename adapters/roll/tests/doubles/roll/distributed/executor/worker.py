"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


class RankInfo:
    world_size = 1
    tp_size = 1
    dp_size = 1
    pp_size = 1
    cp_size = 1
    rank = 0
    tp_rank = 0
    dp_rank = 0
    pp_rank = 0
    cp_rank = 0
    @property
    def is_pipeline_last_stage(self):
        raise NotImplementedError('is_pipeline_last_stage')


class Worker:
    def __init__(self, worker_config):
        raise NotImplementedError('__init__')

    def __repr__(self):
        raise NotImplementedError('__repr__')

    @property
    def logger(self):
        raise NotImplementedError('logger')

    @staticmethod
    def get_node_ip():
        raise NotImplementedError('get_node_ip')

    @staticmethod
    def get_free_port():
        raise NotImplementedError('get_free_port')

    @staticmethod
    def is_port_available(port):
        raise NotImplementedError('is_port_available')

    def get_master_addr_and_port(self):
        raise NotImplementedError('get_master_addr_and_port')

    @staticmethod
    def get_visible_gpus():
        raise NotImplementedError('get_visible_gpus')

    def get_devices_info(self):
        raise NotImplementedError('get_devices_info')

    def get_rank_info(self):
        raise NotImplementedError('get_rank_info')

    def initialize(self, pipeline_config, *args, **kwargs):
        raise NotImplementedError('initialize')

    def load_states(self, *args, **kwargs):
        raise NotImplementedError('load_states')

    def process_weights_after_loading(self):
        raise NotImplementedError('process_weights_after_loading')

    def offload_states(self, *args, **kwargs):
        raise NotImplementedError('offload_states')

    def broadcast_parameter(self, *args, **kwargs):
        raise NotImplementedError('broadcast_parameter')

    def setup_model_update(self, *args, **kwargs):
        raise NotImplementedError('setup_model_update')

    def setup_collective_group(self, *args, **kwargs):
        raise NotImplementedError('setup_collective_group')

    def start_model_update(self, *args, **kwargs):
        raise NotImplementedError('start_model_update')

    def update_parameter_in_bucket(self, *args, **kwargs):
        raise NotImplementedError('update_parameter_in_bucket')

    def add_lora(self, *args, **kwargs):
        raise NotImplementedError('add_lora')

    def get_metrics(self, metric_names=None):
        raise NotImplementedError('get_metrics')
