"""The front as a Ray actor: what it is given, and how its parts are opened in its process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import traceback
from collections.abc import Iterator
from typing import Any

import attrs

from rose.errors import ConfigError, RoseError, TransportError
from rose.frameworks import STORE_ADVICE, HeldPool, PoolPlace, PushReport, StreamedTrainer, WeightPush, WeightsWatch
from rose.types import Turn, TurnResult
from rose_openrlhf.broadcast import BroadcastMember
from rose_openrlhf.checkpoint import initial_weights
from rose_openrlhf.flags import Options
from rose_openrlhf.front import PoolFront
from rose_openrlhf.turns import TurnLimits, TurnRunner
from rose_openrlhf.weights import WeightInlet

_logger = logging.getLogger(__name__)
_LOOK_S = 15.0
_MAX_SAID = 3


@attrs.frozen(kw_only=True)
class FrontSettings:
    """All that a front needs to know; plain data, sent to its process.

    Attributes:
        place: The pool.
        options: The launcher's flags.
        run: Name of this launch.
        model: ``--actor.model_name_or_path``.
        param_dtype: ``--ds.param_dtype``.
        max_model_len: ``--data.max_len``.
        agent_func_path: ``--train.agent_func_path``.
        remote_rm_url: ``--reward.remote_url``, split.
        device: Where the broadcast group wants tensors: ``cpu`` or ``cuda:0``.
    """

    place: PoolPlace
    options: Options
    run: str
    model: str
    param_dtype: str
    max_model_len: int
    agent_func_path: str | None
    remote_rm_url: Any
    device: str


class FrontActor(PoolFront):
    """``PoolFront`` in a process of its own. ``open`` comes before all other calls."""

    def __init__(self, settings: FrontSettings) -> None:  # the front's own parts exist after open
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-8s %(name)s: %(message)s")
        self._settings = settings
        self._newest: int | None = None
        self._pool = HeldPool(settings.place)
        self._push: WeightPush | None = None
        self._watch: WeightsWatch | None = None

    async def open(self) -> int | None:
        """Connect, load the executor, publish the checkpoint. Returns the number of the version that the engines have, if any.

        Raises:
            RoseError: The pool cannot be reached or keeps no store, or no engine can hold the weights. What was opened is closed then.
        """
        try:
            return await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> int | None:
        settings, options = self._settings, self._settings.options
        pool = await self._pool.get()
        limits = TurnLimits(deadline_s=options.turn_deadline_s, retry_s=options.retry_s)
        watch = self._watch = WeightsWatch(
            snapshot=pool.snapshot,
            launch=settings.run,
            patience_s=options.retry_s,
            pause_s=min(_LOOK_S, options.retry_s / 4),
            advice="start this job again from its last checkpoint (--ckpt.load_enable)",
        )

        async def generate(turn: Turn) -> TurnResult:
            return await watch.guard(asyncio.ensure_future(pool.generate(turn)))

        trainer = StreamedTrainer(dtype=options.weights_dtype)
        push = self._push = WeightPush(
            settings.place,
            trainer=trainer,
            run=settings.run,
            publish_timeout_s=options.publish_timeout_s,
            sync_timeout_s=options.sync_timeout_s,
            sync_retry_s=options.retry_s,
        )
        super().__init__(
            run=settings.run,
            runner=TurnRunner(generate=generate, limits=limits, version=lambda: self._newest, launch=settings.run),
            inlet=WeightInlet(copy=trainer, push=push, retry_s=options.retry_s, announce=self._note),
            member=BroadcastMember(device=settings.device),
            executor=await asyncio.to_thread(_load_executor, settings),
            load_tokenizer=lambda: _load_tokenizer(settings.model),
            max_model_len=settings.max_model_len,
            hold_s=options.hold_s,
        )
        if options.initial_weights == "publish":
            with _loading("--actor.model_name_or_path", settings.model):
                report = await self.inlet.take_all(initial_weights(settings.model, settings.param_dtype))
            check_first(report)
        return self._newest

    async def close(self) -> None:
        """Leave the pool and the store. Without it both end with the process."""
        if self._watch is not None:
            await self._watch.close()
        await self._pool.close()
        if self._push is not None:
            self._push.close()

    def _note(self, report: PushReport) -> None:
        if report.is_with_nobody:
            _logger.error(
                "no engine of the pool has %s; no turn asks for it, the next sync makes up for it", report.version
            )
        else:
            self._newest = report.version.n
        if self._watch is not None and report.sync is not None and (report.sync.activations or report.sync.unchanged):
            self._watch.note(report.version)
        _logger.info("%s", describe(report))


def describe(report: PushReport) -> str:
    """Return one line about a push."""
    if report.sync is None:
        return f"weights {report.version}: published; {report.problem or 'the engines fetch them'}"
    left_out = ", ".join(f"{engine_id} ({type(error).__name__})" for engine_id, error in report.errors.items())
    took = len(report.sync.activations) + len(report.sync.unchanged)
    return f"weights {report.version}: {took} engines have them" + (f"; not {left_out}" if left_out else "")


def check_first(report: PushReport) -> None:
    """Check that the checkpoint reached an engine, or may still.

    Raises:
        ConfigError: No engine could take it; the message has the first of the first engine's own words.
        RoseError: The pool could not sync its engines at all.
    """
    if report.error is not None:
        raise report.error
    if not report.is_with_nobody:
        return
    lasting = {engine_id: error for engine_id, error in report.errors.items() if not isinstance(error, TransportError)}
    engine_id, error = next(iter((lasting or report.errors).items()))
    if report.is_store_away:
        message = f"no engine of the pool has the weights of --actor.model_name_or_path: {STORE_ADVICE}. Engine {engine_id} says: {error}"
        raise ConfigError(message)
    said = str(error).split("; ")  # one part a tensor, of which there may be hundreds
    rest = f"; and {len(said) - _MAX_SAID} more" if len(said) > _MAX_SAID else ""
    message = (
        "no engine of the pool can hold the weights of --actor.model_name_or_path: the pool's engines must run the same model; where they hold another "
        f"dtype give --rose.weights_dtype. Engine {engine_id} says: {'; '.join(said[:_MAX_SAID])}{rest}"
    )
    raise ConfigError(message)


def _load_executor(settings: FrontSettings) -> Any:
    if settings.agent_func_path:
        engine = importlib.import_module("openrlhf.trainer.ray.vllm_engine")
        with _loading("--train.agent_func_path", settings.agent_func_path):
            return engine._load_agent_executor(settings.agent_func_path)  # noqa: SLF001 - there is no other way to load one as OpenRLHF does
    agent = importlib.import_module("openrlhf.utils.agent")
    with _loading("--reward.remote_url", settings.remote_rm_url):
        return agent.SingleTurnAgentExecutor(settings.remote_rm_url)


@contextlib.contextmanager
def _loading(flag: str, value: Any) -> Iterator[None]:
    """Have what a user's own file or checkpoint raises name the flag it came from, and the line.

    Raises:
        ConfigError: In place of whatever was raised, except ROSE's own errors.
    """
    try:
        yield
    except RoseError:
        raise
    except Exception as error:
        named = value if isinstance(value, list) else [value]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in named]
        where = f" (line {lines[-1]})" if lines else ""
        said = " ".join(str(error).split())[:500]
        message = f"{flag} {value} cannot be loaded: {type(error).__name__}: {said}{where}"
        raise ConfigError(message) from error


def _load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - heavy

    return AutoTokenizer.from_pretrained(path, trust_remote_code=True)
