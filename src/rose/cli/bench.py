"""``rose bench``: measurements on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rose.cli import bench_arguments as given
from rose.cli import bench_coserve, bench_scheduler
from rose.cli.bench_tables import bench_tables
from rose.cli.parsers import add_output, add_parser
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.bench.settings import BenchSettings

_DESCRIPTION = """\
Measure how new weights reach engines: bytes beside their entropy, speed beside a plain copy, other schemes on the same bits,
applying beside vLLM's own loader, bytes over a thin link by number of engines, and whole syncs over emulated links.

Weights have a real model's shapes; what changes comes from fp32 masters and an optimizer step, not from random flips. Where a model
does not fit, whole decoder layers are sampled and every figure is the sample's own.
"""

_TABLE = """\
a table of tensors, for --model FILE (.json or .json.gz):
  {"model": "toy",
   "config": {"heads": 8, "kv": 4, "tied": false},
   "params": [["model.embed_tokens.weight", [1024, 256], "bfloat16"],
              ["model.layers.{0..3}.self_attn.q_proj.weight", [256, 256], "bfloat16"],
              {"name": "model.norm.weight", "shape": [256], "dtype": "bfloat16"}]}
  config: heads (or num_attention_heads) always, kv (num_key_value_heads) where it differs, tied (tie_word_embeddings),
  experts (num_experts) and, for stacks of experts, hidden (hidden_size). {a..b} stands for all numbers from a to b.

"""

_EXAMPLES = """\
examples:
  rose bench transfer                                       Qwen3-8B, 1 % changed, all sections
  rose bench transfer --model Qwen3-32B --targets tp8 --json | jq .bytes_per_changed
  rose bench transfer --model my-table.json --lr 3e-6 --only bytes,codec
  rose bench transfer --link-gbps 1,2,max --out runs/transfer

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``bench`` to the command line."""
    bench = commands.add_parser(
        "bench",
        help="measure parts of ROSE on this machine",
        description="Measure parts of ROSE on this machine.",
        allow_abbrev=False,
    )
    kinds = bench.add_subparsers(metavar="WHAT", title="what", dest="what", required=True)
    parser = add_parser(
        kinds,
        "transfer",
        summary="how new weights reach engines",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + _TABLE + epilog,
    )
    _add_weights(parser.add_argument_group("weights"))
    _add_sync(parser.add_argument_group("sync"))
    parser.add_argument_group("sections").add_argument(
        "--only", metavar="SECTION,...", help="bytes, codec, peers, apply, redundancy, links, life-cycle (default: all)"
    )
    add_output(parser, files="transfer.json and, where matplotlib is installed, three figures")
    parser.set_defaults(run=run)
    bench_coserve.add_command(kinds, epilog=epilog)
    bench_scheduler.add_command(kinds, epilog=epilog)


def _add_weights(weights: argparse._ArgumentGroup) -> None:
    weights.add_argument(
        "--model",
        default="Qwen3-8B",
        metavar="NAME|FILE",
        help="a known model or a table of tensors, see below (default: Qwen3-8B)",
    )
    change = weights.add_mutually_exclusive_group()
    change.add_argument(
        "--changed", type=given.share, metavar="F", help="share of the elements that a step changes (default: 0.01)"
    )
    change.add_argument(
        "--lr", type=given.positive, metavar="X", help="learning rate of the step instead, from 1e-09 to 0.01"
    )
    weights.add_argument(
        "--sample", type=given.share, metavar="F", help="share of the decoder layers (default: about 0.8 GB of them)"
    )
    weights.add_argument("--seed", type=given.seed, default=0, metavar="N", help="of the weights (default: 0)")


def _add_sync(where: argparse._ArgumentGroup) -> None:
    where.add_argument(
        "--link-gbps",
        type=_links,
        metavar="G[,G...]",
        help="emulated links, 'max' for one without a limit (default: 1,2,max)",
    )
    where.add_argument(
        "--sources", type=given.count, default=1, metavar="N", help="trainer ranks in the section links (default: 1)"
    )
    where.add_argument(
        "--targets",
        metavar="tpK[xM],...",
        help="engines: M of K ranks each (default: one of 4 ranks, or of 2 or 1 where the model cannot be cut so)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code.

    Raises:
        ConfigError: An argument cannot be used.
        RoseError: A section failed; the others were printed and written.
    """
    from rose.bench import transfer  # noqa: PLC0415 - loads the transfer engine

    settings = _settings(arguments)
    return given.measure_and_show(
        lambda: transfer.run(settings, tell=given.tell),
        arguments,
        name="transfer",
        tables=bench_tables,
        drawings="rose.bench.plots",
    )


def _settings(arguments: argparse.Namespace) -> BenchSettings:
    from rose.bench.job import parse_targets  # noqa: PLC0415 - loads the transfer engine
    from rose.bench.settings import MAX_SOURCES, SECTIONS, BenchSettings  # noqa: PLC0415 - loads the transfer engine
    from rose.bench.weights import LR_RANGE  # noqa: PLC0415 - loads numpy

    only = SECTIONS if arguments.only is None else tuple(part.strip() for part in arguments.only.split(","))
    unknown = [part for part in only if part not in SECTIONS]
    if unknown:
        message = f"--only: there is no section {unknown[0]!r}; sections: {', '.join(SECTIONS)}"
        raise ConfigError(message)
    _check_range(arguments.lr, *LR_RANGE, option="--lr")
    _check_range(arguments.sources, 1, MAX_SOURCES, option="--sources")
    given = {
        name: value
        for name in ("changed", "link_gbps", "lr", "sample")
        if (value := getattr(arguments, name)) is not None
    }
    return BenchSettings(
        model=arguments.model,
        num_sources=arguments.sources,
        targets=() if arguments.targets is None else parse_targets(arguments.targets),
        seed=arguments.seed,
        only=only,
        **given,
    )


def _check_range(value: float | None, lowest: float, highest: float, *, option: str) -> None:
    if value is not None and not lowest <= value <= highest:
        message = f"{option} {value:g} is out of range; give one from {lowest:g} to {highest:g}"
        raise ConfigError(message)


def _links(text: str) -> tuple[float, ...]:
    return tuple(0.0 if part.strip() == "max" else given.positive(part) for part in text.split(","))
