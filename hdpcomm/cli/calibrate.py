"""``hdpcomm calibrate``: measures what a model costs on these ranks, for plan, simulate and train."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from hdpcomm.cli.output import check_writable, ranks_here
from hdpcomm.cli.train_options import TrainOptions, add_options
from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG
from hdpcomm.options import count

if TYPE_CHECKING:
    from hdpcomm.plan import Calibration
    from hdpcomm.run import RunConfig

__all__ = ["add_parser"]

_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn")
_TRAINED = ("dtype", "recompute", "offload")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure what a model costs on these ranks",
        description="Measures a model on these ranks: compute, the ring exchange inside and between hosts beside it, "
        "activations, copies to host memory, the gradients' reduction and the optimizer. plan, simulate and train take "
        "the file as --calibration. Starts the ranks on this machine; under torchrun, srun or mpirun it joins the "
        "given world.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--ranks", type=count, metavar="N", help="start N ranks here (default 2; under a launcher: its ranks)"
    )
    parser.add_argument(
        "--transport", default="auto", metavar="NAME", help="how the ranks exchange tensors (default %(default)s)"
    )
    parser.add_argument(
        "--capacity",
        type=count,
        default="4096",
        metavar="TOKENS",
        help="what a rank holds at once; measured up to there (default %(default)s)",
    )
    parser.add_argument("--vocabulary", type=count, default="256", metavar="N", help="tokens (default: bytes, 256)")
    add_options(parser, ("model", *_SIZES, *_TRAINED))
    parser.set_defaults(func=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    from hdpcomm.comm.launch import run_ranks

    check_writable(options.out)
    config = _config(options)
    rank, ranks = ranks_here(options.ranks, default=2)
    if not rank:
        LOG.info(
            f"measures links, micro-batches of up to {config.capacity:,} tokens a rank, copies and the optimizer; "
            "takes about as long as 20 of these micro-batches"
        )
    found = (
        _on_rank(config, options.transport)
        if rank is not None
        else run_ranks(_on_rank, ranks, config, options.transport)[0]
    )
    if found is None:
        return 0
    found.save(options.out)
    print("\n".join(_lines(found)))
    print(f"written to {options.out}")
    return 0


def _config(options: argparse.Namespace) -> RunConfig:
    from hdpcomm.cli.train import parameter_type
    from hdpcomm.models import LlamaConfig
    from hdpcomm.run import RunConfig, folder_model, model_path

    names = ("model", "transport", *_SIZES, *_TRAINED)
    given = TrainOptions(**{name: getattr(options, name) for name in names if name in options})
    if given.recompute == "auto":
        raise InvalidUsage("--recompute auto depends on what is measured here; give none, full or a number of layers")
    sizes = {name: getattr(given, name) for name in _SIZES}
    return RunConfig(
        model=folder_model(model_path(given.model))
        if given.model
        else LlamaConfig(vocabulary=options.vocabulary, **sizes),
        capacity=options.capacity,
        **{name: getattr(given, name) for name in _TRAINED} | {"dtype": parameter_type(given)},
    )


def _on_rank(config: RunConfig, transport: str) -> Calibration | None:
    import torch

    from hdpcomm.comm import init
    from hdpcomm.comm.topology import cores_of_rank
    from hdpcomm.run import calibrate

    with init(transport=transport) as comm:
        torch.set_num_threads(cores_of_rank(comm))
        found = calibrate(comm, config)
        return found if comm.rank == 0 else None


def _lines(found: Calibration) -> list[str]:
    cost, cluster, device = found.cost_model, found.cluster, found.cluster.hardware
    errors = sorted(abs(error) for error in found.errors())
    one = cost.seconds([found.memory.capacity])
    hosts = -(-cluster.ranks // cluster.node_ranks)
    near = f", {cluster.domain_ranks} a domain" if cluster.ranks_per_domain else ""
    lines = [
        f"ranks: {cluster.ranks}, {cluster.node_ranks} a host{near}; {found.facts['parameters']:,} parameters, "
        f"{found.facts['dtype']}, transport {found.facts['transport']}",
        f"  {found.memory.capacity:,} tokens on one rank: {one:.4g} s; a token {cost.linear + cost.piece:.3g} s, a "
        f"pair {cost.attention:.3g} s, a micro-batch {cost.fixed:.3g} s, a ring step {cost.ring_step:.3g} s",
        f"  predicted against measured, {len(errors)} kinds of micro-batches: median error "
        f"{100 * statistics.median(errors):.1f}%, worst {100 * errors[-1]:.1f}%",
    ]
    if hosts > 1:
        lines.append(
            f"  between hosts a token's KV takes {cost.kv_inter:.3g} s a ring step, a message "
            f"{cost.latency_inter:.3g} s"
            + (f"; the ranks of a host share {cluster.nics} network interface(s)" if cluster.nics else "")
        )
    if cluster.ranks_per_domain:
        kv, latency = cost.links(one_node=False, one_domain=True)
        lines.append(f"  between hosts of a domain {kv:.3g} s a token, {latency:.3g} s a message")
    lines.append(
        f"  copies {device.d2h_bandwidth / 1e9:.2f} GB/s to host memory, {device.h2d_bandwidth / 1e9:.2f} back; "
        f"gradients' reduction {found.reduction_s:.4g} s, optimizer {found.optimizer_s:.4g} s"
    )
    return lines
