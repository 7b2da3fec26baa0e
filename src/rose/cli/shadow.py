"""``rose shadow``: what could have been lent of a serving engine, from its metrics or a request trace; nothing is lent."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.text import Text

from rose.cli.parsers import add_parser
from rose.cli.signals import told_by_signals
from rose.cli.simulation_tables import plain_table
from rose.errors import ConfigError
from rose.policies.admission import Mode

if TYPE_CHECKING:
    from rose.simulation.shadow.poll import Polled
    from rose.simulation.shadow.study import ShadowConfig
    from rose.simulation.traces import Trace

_URL_STARTS = ("http://", "https://")
_MODES = {mode.value: mode for mode in Mode if mode is not Mode.CLOSED}
_ABOVE_ZERO = ("duration", "timeout", "slo_ttft_ms", "slo_tpot_ms", "kv_pool_gb")
_AT_LEAST = {"interval": 0.1, "chunk_tokens": 1, "draws": 1}
_SCRAPES = "scrapes.prom"

_DESCRIPTION = """\
Say what could have been lent of a serving engine, when, and at what risk to its SLO. The engine needs nothing of ROSE: its
/metrics (vLLM's or SGLang's) is read, or a recording of it, or a request trace; nothing else is sent.

The requests are reconstructed from the counters and simulated beside a rollout engine that always wants more; what may run
when is decided by the functions that decide on a live device.
"""

_EXAMPLES = """\
examples:
  rose shadow --metrics http://10.0.0.5:8000/metrics --duration 3600 --out shadow
  rose shadow --metrics shadow/scrapes.prom --mode quiet --slo-tpot-ms 80        the same hour again, with other settings
  rose shadow --metrics azure2023.csv.gz --duration 1800 --json | jq .advice     a request trace

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``shadow`` to the command line."""
    parser = add_parser(
        commands,
        "shadow",
        summary="what could be lent of a live engine, without lending",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    parser.add_argument(
        "--metrics",
        required=True,
        metavar="URL|FILE",
        help="an engine's /metrics, a recording of it (file or folder), or a trace",
    )
    parser.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help="read for so long (default: 600; Ctrl-C ends it early); of a trace: its beginning",
    )
    parser.add_argument(
        "--interval", type=float, default=5.0, metavar="S", help="between two readings (default: %(default)g)"
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="of one reading (default: %(default)g)")
    _add_assumptions(parser.add_argument_group("assumptions"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", metavar="DIR", help=f"folder for result.json, report.html and, of a live engine, {_SCRAPES}"
    )
    output.add_argument("--json", action="store_true", help="print one JSON document, nothing else, on standard output")
    parser.set_defaults(run=run)


def _add_assumptions(assumed: Any) -> None:
    assumed.add_argument(
        "--profile",
        metavar="GPU:MODEL",
        help="what serves; step times are fitted to the engine's own latencies (default: h100:qwen2.5-7b)",
    )
    assumed.add_argument("--rollout-profile", metavar="GPU:MODEL", help="what would roll out (default: h100:qwen3-8b)")
    assumed.add_argument(
        "--slo-ttft-ms", type=float, default=500.0, metavar="MS", help="serving's TTFT budget (default: %(default)g)"
    )
    assumed.add_argument(
        "--slo-tpot-ms", type=float, default=150.0, metavar="MS", help="serving's TPOT budget (default: %(default)g)"
    )
    assumed.add_argument(
        "--mode",
        nargs="+",
        action="extend",
        metavar="MODE",
        help=f"of {', '.join(_MODES)} (default: slo quiet); the first safe one is advised",
    )
    assumed.add_argument(
        "--kv-pool-gb", type=float, metavar="GB", help="KV memory that both share (default: from the metrics)"
    )
    assumed.add_argument(
        "--chunk-tokens", type=int, metavar="N", help="serving's max_num_batched_tokens (default: 2048)"
    )
    assumed.add_argument(
        "--draws", type=int, default=3, metavar="N", help="loads drawn from the same metrics (default: %(default)d)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments ask for; returns the exit code."""
    config = _config(arguments)
    config.profiles()  # refused before an hour is recorded
    out = _folder(arguments.out)
    with _keeping_word(arguments.metrics, out):
        result = _study(arguments, config, out)
    if out is not None:
        _write(out, result)
    if arguments.json:
        print(json.dumps(result, allow_nan=False))  # noqa: T201 - this is the command line
    else:
        _print(result, out)
    return 0


def _config(arguments: argparse.Namespace) -> ShadowConfig:
    """Return the checked options.

    Raises:
        ConfigError: One of them is of no use; names it.
    """
    from rose.policies.admission import Slo  # noqa: PLC0415 - beside its user
    from rose.simulation.shadow.study import ShadowConfig  # noqa: PLC0415 - loads numpy

    _check_numbers(arguments)
    names = list(dict.fromkeys(arguments.mode or ["slo", "quiet"]))
    if unknown := [name for name in names if name not in _MODES]:
        message = f"--mode: {unknown[0]!r} is no mode of lending; choose of {', '.join(_MODES)}"
        raise ConfigError(message)
    given: dict[str, Any] = {
        "profile": arguments.profile,
        "rollout_profile": arguments.rollout_profile,
        "chunk_tokens": arguments.chunk_tokens,
        "pool_bytes": None if arguments.kv_pool_gb is None else math.ceil(arguments.kv_pool_gb * 1e9),
    }
    return ShadowConfig(
        slo=Slo(ttft_s=arguments.slo_ttft_ms / 1e3, tpot_s=arguments.slo_tpot_ms / 1e3),
        modes=tuple(_MODES[name] for name in names),
        num_draws=arguments.draws,
        **{key: value for key, value in given.items() if value is not None},
    )


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse a number that is of no use, by the name of its option.

    Raises:
        ConfigError: One is not finite or too small.
    """
    for name in (*_ABOVE_ZERO, *_AT_LEAST):
        value, least = getattr(arguments, name), _AT_LEAST.get(name)
        if value is None:
            continue
        if not math.isfinite(value):
            allowed = "finite"
        elif value <= 0 and least is None:
            allowed = "above 0"
        elif least is not None and value < least:
            allowed = f"{least:g} or more"
        else:
            continue
        message = f"--{name.replace('_', '-')} {value:g} is of no use; it must be {allowed}"
        raise ConfigError(message)


@contextlib.contextmanager
def _keeping_word(where: str, out: Path | None) -> Iterator[None]:
    """Say where the readings of a live engine are when the command is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        if where.startswith(_URL_STARTS):
            if out is None:
                _note("what was read is not kept without --out")
            elif (out / _SCRAPES).is_file():
                again = f"judge it with: rose shadow --metrics {out / _SCRAPES}"
                _note(f"what was read is in {(out / _SCRAPES).resolve()}; {again}")
        raise


def _folder(out: str | None) -> Path | None:
    if out is None:
        return None
    path = Path(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"--out {path}: {error.strerror or error}; choose another folder"
        raise ConfigError(message) from error
    return path


def _study(arguments: argparse.Namespace, config: ShadowConfig, out: Path | None) -> dict[str, Any]:
    """Read what is named and study it."""
    from rose.simulation.shadow.exposition import looks_like_scrapes, read_recording  # noqa: PLC0415 - see _config
    from rose.simulation.shadow.series import engine_series, is_wanted  # noqa: PLC0415
    from rose.simulation.shadow.study import shadow_engines, shadow_trace  # noqa: PLC0415
    from rose.simulation.text_files import read_lines  # noqa: PLC0415

    where = arguments.metrics
    scheme, is_url, _ = where.partition("://")
    if is_url and not where.startswith(_URL_STARTS):
        message = f"--metrics {where}: the URL scheme {scheme!r} is not read; give http:// or https://, or a file"
        raise ConfigError(message)
    if where.startswith(_URL_STARTS):
        polled = _poll(arguments, out)
        scrapes, notes = polled.scrapes, polled.notes
    else:
        path = Path(where)
        if not path.is_dir():
            with contextlib.closing(read_lines(path, "metrics", expected="metrics text or a request trace")) as lines:
                first = next((line for line in lines if line.strip()), "")
            if not looks_like_scrapes(first):
                return shadow_trace(_trace(path, first), config, where, arguments.duration)
        scrapes, notes = read_recording(path, is_wanted), []
    return shadow_engines(engine_series(scrapes, where, notes), config, where)


def _trace(path: Path, first: str) -> Trace:
    """Read a request trace.

    Raises:
        ConfigError: It is none, nor metrics text, or cannot be used.
    """
    from rose.simulation.traces import read_trace  # noqa: PLC0415 - see _config

    try:
        return read_trace(path)
    except ConfigError as error:
        if "unknown format" not in str(error):
            raise
        message = (
            f"--metrics {path}: neither Prometheus text nor a known trace format was recognised, its first line is "
            f"{first.strip()[:60]!r}; give an engine's /metrics, a recording of it, or a trace that rose simulate reads"
        )
        raise ConfigError(message) from error


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        message = f"--out: cannot write {path}: {error.strerror or error}; choose another folder"
        raise ConfigError(message) from error


def _poll(arguments: argparse.Namespace, out: Path | None) -> Polled:
    """Record a live engine, to ``scrapes.prom`` too where there is a folder."""
    from rose.simulation.shadow.exposition import mark, wanted_lines  # noqa: PLC0415 - see _config
    from rose.simulation.shadow.poll import Polling, poll  # noqa: PLC0415
    from rose.simulation.shadow.series import is_wanted  # noqa: PLC0415

    settings = {"interval_s": arguments.interval, "timeout_s": arguments.timeout}
    if arguments.duration is not None:
        settings["duration_s"] = arguments.duration
    polling = Polling(url=arguments.metrics, **settings)
    _note(f"reading {polling.url} every {polling.interval_s:g} s for {polling.duration_s:g} s; Ctrl-C ends it early")
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(told_by_signals())
        file = None if out is None else stack.enter_context(_opened(out / _SCRAPES))

        def keep(at_s: float, text: str) -> None:
            if file is not None:
                file.write(mark(at_s) + wanted_lines(text, is_wanted))
                file.flush()

        return poll(polling, stop, keep)


def _write(out: Path, result: Mapping[str, Any]) -> None:
    from rose.simulation.shadow.report import write_report  # noqa: PLC0415 - see _config

    path = out / "result.json"
    try:
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
        raise ConfigError(message) from error
    if not write_report(out / "report.html", result):
        _note("report.html has no figures: they need matplotlib; install it with: pip install 'rose-rl[demo]'")


def _print(result: Mapping[str, Any], out: Path | None) -> None:
    from rose.simulation.shadow.report import (  # noqa: PLC0415 - see _config
        LENT_HEADS,
        SERVING_HEADS,
        lent_rows,
        serving_rows,
    )

    console = Console(highlight=False)
    for engine in result["engines"]:
        console.print(
            Text(f"{engine['name']}: {engine['requests']:,} requests in {engine['duration_s']:,.0f} s", style="bold")
        )
        console.print(plain_table(LENT_HEADS, lent_rows(engine)))
        console.print()
        console.print(plain_table(SERVING_HEADS, serving_rows(engine)))
        for note in engine["notes"]:
            console.print(Text(f"  {note}", style="dim"), soft_wrap=True)
        console.print()
    for sentence in result["advice"]:
        console.print(Text(sentence), soft_wrap=True)
    if out is not None:
        console.print(Text(f"\nreport in {(out / 'report.html').resolve()}"), soft_wrap=True)


def _note(text: str) -> None:
    print(f"rose: {text}", file=sys.stderr)  # noqa: T201 - this is the command line
