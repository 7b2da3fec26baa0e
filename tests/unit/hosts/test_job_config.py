from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.errors import ConfigError
from rose.hosts.job import JobConfig, load_job
from rose.hosts.job.config import ExecutorPlace, executor_place

WHOLE = """
[job]
name = "lake"
seed = 3
[resources]
n_rl = 4
training = 2
rollout = 2
n_serving = 2
[model]
path = "policy"
[engines.own]
backend = "vllm"
count = 2
options = {max_num_seqs = 32}
[pool]
stall_s = 3.0
[lender]
url = "http://127.0.0.1:7077"
token_file = "FOLDER/lender.token"
[executors]
gpu0 = "http://127.0.0.1:8300"
gpu1 = {url = "http://127.0.0.1:8301", token_file = "FOLDER/lender.token"}
[transport]
listen = "127.0.0.1:7000"
token_file = "FOLDER/store.token"
[relay]
name = "memory"
host = "127.0.0.1"
port = 7001
[service]
listen = "127.0.0.1:7100"
[loop]
whatever = "is the loop's"
"""


def write(folder: Path, text: str = WHOLE) -> Path:
    (folder / "lender.token").write_text("secret")
    path = folder / "job.toml"
    path.write_text(text.replace("FOLDER", str(folder)))
    return path


def problems(folder: Path, *changes: tuple[str, str]) -> list[str]:
    text = WHOLE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_job(JobConfig, path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def test_a_whole_file_is_read(tmp_path: Path):
    config = load_job(JobConfig, write(tmp_path))
    assert (config.job.name, config.job.seed, config.resources.n_rl, config.pool.stall_s) == ("lake", 3, 4, 3.0)
    assert config.engines["own"].options == {"max_num_seqs": 32}
    assert executor_place(config.executors["gpu0"]) == ExecutorPlace(url="http://127.0.0.1:8300")
    assert executor_place(config.executors["gpu1"]).token_file == tmp_path / "lender.token"
    assert config.loop == {"whatever": "is the loop's"}


def test_the_smallest_file_borrows_nothing(tmp_path: Path):
    text = '[job]\nname = "j"\n[resources]\nn_rl = 1\ntraining = 0\nrollout = 1\n[model]\npath = "p"\n'
    text += '[engines.own]\nurl = "http://127.0.0.1:1"\n'
    config = load_job(JobConfig, write(tmp_path, text))
    assert (config.resources.n_serving, config.lender, config.transport.listen) == (0, None, "127.0.0.1:0")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("training = 2", "training = 1"), "resources: training + rollout must be n_rl, got 1 + 2 and 4"),
        (("count = 2", "count = 3"), "engines: they take 3 devices, resources.rollout reserves 2; lower count or"),
        (("count = 2", "num_devices = 3"), "engines: they take 3 devices"),
        (("n_serving = 2", "n_serving = 0"), "resources.n_serving = 0 borrows nothing; give the number of devices"),
        (('gpu0 = "', '"a+b+c" = "'), "executors.a+b+c: needs 3 devices, resources.n_serving is 2"),
        (('gpu0 = "http', 'gpu0 = "ftp'), "executors.gpu0: url must be a string like"),
        (('backend = "vllm"', ""), "engines.own: give either backend, to start the engine, or url"),
        (('backend = "vllm"', 'url = "http://h:1"'), "engines.own: count must be 1 with url, got 2"),
        (('listen = "127.0.0.1:7100"', 'listen = "0.0.0.0:7100"'), "service.listen = '0.0.0.0:7100' can be reached"),
        (('listen = "127.0.0.1:7100"', 'listen = "7100"'), "service.listen: '7100' is no place to listen"),
        (('listen = "127.0.0.1:7000"', ""), "transport: give either listen, to serve a store, or address"),
        (
            ('listen = "127.0.0.1:7000"', 'keeper = "pool"\naddress = {name = "mooncake"}'),
            "address is a store that others keep; leave",
        ),
        (('token_file = "FOLDER/store.token"', 'address = {name = "mooncake"}'), "transport: give either listen"),
        (("lender.token", "none.token"), "cannot read a token from"),
        (("[job]\n", "[job]\nnamee = 1\n"), "job.namee: unknown key; did you mean 'name'?"),
        (('name = "lake"', 'name = "a b"'), "job.name must be a string like"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(tmp_path: Path, change: tuple[str, str], said: str):
    found = problems(tmp_path, change)
    assert any(said in line.replace("job: name", "job.name") for line in found), found


def test_executors_need_a_lender_and_the_reverse(tmp_path: Path):
    lender = WHOLE[WHOLE.index("[lender]") : WHOLE.index("[executors]")]
    assert problems(tmp_path, (lender, ""))[0].startswith("executors: they need [lender] with the url")
    executors = WHOLE[WHOLE.index("[executors]") : WHOLE.index("[transport]")]
    assert problems(tmp_path, (executors, "")) == [
        "resources.n_serving = 2 needs [executors]: device = URL of its rose serve"
    ]
    engines = WHOLE[WHOLE.index("[engines.own]") : WHOLE.index("[pool]")]
    nobody = [(engines, ""), (executors, ""), ("n_serving = 2", "n_serving = 0")]
    assert problems(tmp_path, *nobody)[0].startswith("engines: there is none, and no [executors] either")


def test_an_open_store_needs_a_token_file(tmp_path: Path):
    change = ('listen = "127.0.0.1:7000"\ntoken_file = "FOLDER/store.token"', 'listen = "0.0.0.0:7000"')
    assert problems(tmp_path, change) == [
        "transport.listen = '0.0.0.0:7000' can be reached from other machines: give token_file"
    ]


def test_an_open_service_is_fine_with_tokens(tmp_path: Path):
    digest = hashlib.sha256(b"x").hexdigest()
    text = WHOLE.replace('listen = "127.0.0.1:7100"', 'listen = "0.0.0.0:7100"')
    text = text.replace("[loop]", f'[[service.tokens]]\nname = "trainer"\nsha256 = "{digest}"\n[loop]')
    assert len(load_job(JobConfig, write(tmp_path, text)).service.tokens) == 1
