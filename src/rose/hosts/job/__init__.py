"""A job file, and the pool that it describes: engines, lender, executors and where weights come from."""

from rose.hosts.job.config import JobConfig, job_problems, load_job
from rose.hosts.job.opened import OpenJob, open_job, open_pool
from rose.hosts.job.stores import offer_store, open_store

__all__ = ["JobConfig", "OpenJob", "job_problems", "load_job", "offer_store", "open_job", "open_pool", "open_store"]
