"""``r3train verify``."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console


@click.command("verify")
@click.option("--topology", "names", multiple=True, help="Only this topology; repeatable.")
@click.option("--mutations", is_flag=True, help="Plant the bugs too; a survivor fails the run.")
@click.option("--world-size", type=int, help="Most ranks to start [default: 8, or the GPUs here].")
@click.option("--ci", is_flag=True, help="Only the topologies that continuous integration runs.")
@click.option("--bf16", is_flag=True, help="A second, looser table in bfloat16.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the result here.")
def verify_command(
    names: tuple[str, ...],
    mutations: bool,
    world_size: int | None,
    ci: bool,
    bf16: bool,
    json_file: Path | None,
) -> None:
    """Hold replay against two oracles in every topology that fits on this machine."""
    import torch

    # megatron-core is imported once prepare_device() has adapted it; --help does without torch
    from r3train.cpu.device import prepare_device

    # tiny tensors: threads cost more than they bring
    torch.set_num_threads(1)
    prepare_device()
    # as above
    from r3train.verify import verify_report
    from r3train.verify.verifier import Verification, Verifier
    from r3train.verify.mutations import planted_by
    from r3train.verify.topologies import TOPOLOGIES

    unknown = [n for n in names if n not in TOPOLOGIES]
    if unknown:
        raise click.UsageError(f"no topology {unknown[0]!r}; known: {', '.join(TOPOLOGIES)}")
    chosen = [t for t in TOPOLOGIES.values() if t.name in names or not names and (t.ci or not ci)]
    if world_size is None:
        world_size = torch.cuda.device_count() if torch.cuda.is_available() else 8
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    started = time.monotonic()

    def show(line: str) -> None:
        console.print(line, style="dim", highlight=False)

    results: list[Verification] = []
    for use_bf16 in (False, True) if bf16 else (False,):
        with tempfile.TemporaryDirectory(prefix="r3train-verify-") as scratch:
            verifier = Verifier(
                Path(scratch),
                bf16=use_bf16,
                max_world_size=world_size,
                report=show,
            )
            planted = planted_by("") if mutations and not use_bf16 else []
            results.append(verifier.verify(chosen, planted))
        verify_report.print_report(results[-1], console)
    console.print(f"{time.monotonic() - started:.0f} s")
    if json_file:
        for suffix, v in zip(("", "-bf16"), results):
            file = json_file.with_name(json_file.stem + suffix + json_file.suffix)
            file.write_text(verify_report.to_json(v), encoding="utf-8")
    sys.exit(0 if all(v.ok for v in results) else 1)
