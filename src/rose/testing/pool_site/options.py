"""What a site is asked to run, and the configurations of its executors and of its lender. Pure but for looking at the model's folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import validators as v

from rose import checks
from rose.config import load
from rose.errors import ConfigError
from rose.pool.config import PoolConfig

_DTYPES = ("float32", "bfloat16", "float16")
_DESCRIPTION = """\
Run a real pool on this machine for tests of loops: dedicated vLLM engines, engines borrowed from executors with serving engines of their own, a
lender, and the pool's service. Prints one JSON line with the pool's address, then answers one JSON command a line: status, kill, stop,
cont, fail_fast, hang, fail_updates, lend, sums, expected. The end of the input, or SIGTERM, ends everything.
"""


@attrs.frozen(kw_only=True)
class SiteOptions:
    """One site.

    Attributes:
        model: Folder of the policy's checkpoint.
        dedicated: Engines of the pool's own.
        borrowed: Engines behind executors, each with a serving engine beside it.
        dtype: Of the policy's weights on every engine.
        max_len: Longest prompt plus answer.
        max_seqs: Requests that an engine runs at once.
        kv_bytes: KV memory of an engine.
        seed: Of the pool, and, if one is given, of the engines' samplers. Engines of one seed may draw the same answer for the same prompt; without,
            each draws by its own name.
        pool: Fields of ``PoolConfig``. Without a ``routing.cap_per_engine`` no engine is sent more turns than it runs at once.
    """

    model: Path
    dedicated: int = attrs.field(default=2, validator=checks.integer(1))
    borrowed: int = attrs.field(default=1, validator=checks.integer(0))
    dtype: str = attrs.field(default="float32", validator=checks.text("|".join(_DTYPES)))
    max_len: int = attrs.field(default=512, validator=checks.integer(8))
    max_seqs: int = attrs.field(default=16, validator=checks.integer(1))
    kv_bytes: int = attrs.field(default=64 << 20, validator=checks.integer(1 << 20))
    seed: int | None = attrs.field(default=None, validator=v.optional(checks.integer(0)))
    pool: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def pool_config(self) -> PoolConfig:
        """The pool's settings.

        Raises:
            ConfigError: One line a wrong field.
        """
        routing = self.pool.get("routing", {})
        if isinstance(routing, Mapping):
            routing = {"cap_per_engine": self.max_seqs, **routing}
        try:
            return load(PoolConfig, {**self.pool, "routing": routing})
        except ConfigError as error:
            raise ConfigError("\n".join(f"--pool: {line}" for line in str(error).splitlines())) from error

    @property
    def own_ids(self) -> tuple[str, ...]:
        """Names of the dedicated engines."""
        return tuple(f"own{i}" for i in range(self.dedicated))

    @property
    def lent_ids(self) -> tuple[str, ...]:
        """Names of the borrowed engines, which are those of their devices."""
        return tuple(f"gpu{i}" for i in range(self.borrowed))

    @property
    def engine_options(self) -> dict[str, Any]:
        """Fields of ``VllmOptions`` that all rollout engines have."""
        return {
            "max_model_len": self.max_len,
            "max_num_seqs": self.max_seqs,
            "kv_cache_bytes": self.kv_bytes,
            "dtype": self.dtype,
        } | ({} if self.seed is None else {"seed": self.seed})


def parse(arguments: Sequence[str]) -> SiteOptions:
    """Read the command line.

    Raises:
        ConfigError: An option is wrong, or there is no model in its folder.
        SystemExit: The command line is none, or asks for help.
    """
    given = vars(_parser().parse_args(arguments))
    try:
        pool = json.loads(given.pop("pool"))
    except ValueError as error:
        message = f"--pool takes a JSON object of fields of PoolConfig: {error}"
        raise ConfigError(message) from error
    if not isinstance(pool, dict):
        message = "--pool takes a JSON object of fields of PoolConfig"
        raise ConfigError(message)
    stall_s = given.pop("stall_s")
    try:
        options = SiteOptions(**given, pool=pool if stall_s is None else pool | {"stall_s": stall_s})
    except ValueError as error:
        message = f"--{str(error.args[0]).replace('_', '-')}"
        raise ConfigError(message) from error
    if not (options.model / "config.json").is_file():
        message = f"--model {options.model}: there is no config.json; name the folder of the policy's checkpoint"
        raise ConfigError(message)
    _ = options.pool_config
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rose.testing.pool_site",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    fields = attrs.fields_dict(SiteOptions)
    parser.add_argument("--model", type=_folder, required=True, metavar="DIR", help="checkpoint of the policy")
    parser.add_argument("--dtype", default=fields["dtype"].default, help=f"of its weights: {', '.join(_DTYPES)}")
    texts = {
        "dedicated": "engines of the pool's own",
        "borrowed": "engines borrowed from executors; 0 for none",
        "max_len": "longest prompt plus answer, in tokens",
        "max_seqs": "requests that an engine runs at once",
        "kv_bytes": "KV memory of an engine",
        "seed": "of the pool and of every engine; each engine has one of its own",
    }
    for name, text in texts.items():
        default = fields[name].default
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{text} (default {default})")
    parser.add_argument("--stall-s", type=float, metavar="S", help="the pool's bound for stalls (default: the pool's)")
    parser.add_argument("--pool", default="{}", metavar="JSON", help="further fields of PoolConfig")
    return parser


def _folder(text: str) -> Path:
    return Path(text).absolute()


def executor_config(options: SiteOptions, name: str, folder: Path) -> str:
    """Return the file of ``rose serve`` for one device.

    Rollouts may be slow on a machine that tests share: promises to serving, which has no users here, and bounds of silence are wide.
    """
    tables: dict[str, Mapping[str, Any]] = {
        "": {"run_dir": str(folder / name), "listen": "127.0.0.1:0", "restart": {"first_s": 0.1}},
        "device": {
            "kind": "host",
            "paths": [str(folder / f"{name}.device")],
            "ledgers": [str(folder / f"{name}.ledger")],
        },
        "serving": {
            "model": str(folder / "serving"),
            "args": [
                *("--host", "127.0.0.1", "--port", "0", "--skip-tokenizer-init", "--enforce-eager"),
                *("--kv-cache-memory-bytes", str(16 << 20), "--max-num-seqs", "4", "--block-size", "32"),
            ],
            "stale_s": 60.0,
            "admission": {"stale_after_s": 60.0, "slo": {"ttft_s": 5.0, "tpot_s": 1.0}},
            "timing": {"watchdog_s": 10.0},
        },
        "rollout": {
            "model": str(options.model),
            "engine_id": name,
            "options": options.engine_options,
            "timing": {"watchdog_s": 10.0},
        },
    }
    return _toml(tables)


def lender_config(options: SiteOptions, folder: Path) -> str:
    """Return the file of ``rose lend``."""
    tables: dict[str, Mapping[str, Any]] = {
        "": {"state": str(folder / "lender.sqlite"), "listen": "127.0.0.1:0"},
        "lending": {"stale_after_s": 1e6, "rest_s": 0.0},
    }
    return _toml(tables | {f"devices.{name}": {"ledger": str(folder / f"{name}.ledger")} for name in options.lent_ids})


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, fields in tables.items():
        lines += [f"[{name}]"] if name else []
        lines += [f"{key} = {_value(value)}" for key, value in fields.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Return a value as TOML writes it: as JSON does, but for tables."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)
