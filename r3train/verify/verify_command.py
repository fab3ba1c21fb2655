"""``r3train verify``."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console

from r3train.config.options import usage_errors


@click.command("verify")
@click.option("--topology", "names", multiple=True, help="Only this topology; repeatable.")
@click.option("--mutations", is_flag=True, help="Plant the bugs too; a survivor fails the run.")
@click.option("--world-size", type=int, help="Most ranks to start [default: 8, or the GPUs here].")
@click.option("--ci", is_flag=True, help="Only the topologies that continuous integration runs.")
@click.option("--bf16", is_flag=True, help="A second, looser table in bfloat16.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the result here.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write a page here.")
@click.option(
    "--from",
    "run_dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A run directory: train a rollout that it dumped in every topology that fits its model.",
)
@click.option("--rollout", "rollout_id", type=int, help="Rollout of --from [default: the first].")
@click.option("--write-docs", is_flag=True, help="Regenerate docs/internals/verification.md.")
def verify_command(
    names: tuple[str, ...],
    mutations: bool,
    world_size: int | None,
    ci: bool,
    bf16: bool,
    json_file: Path | None,
    html_file: Path | None,
    run_dir: Path | None,
    rollout_id: int | None,
    write_docs: bool,
) -> None:
    """Hold replay against two oracles in every topology that fits on this machine.

    With --from a rollout of your own is trained in each topology, and held against world size 1.
    """
    if run_dir is not None and (mutations or bf16 or write_docs):
        raise click.UsageError(
            "--from runs no planted bugs, has the run's own dtype and writes no page"
        )
    if run_dir is None and rollout_id is not None:
        raise click.UsageError("--rollout needs --from")
    import torch

    from r3train.cpu.device import prepare_device

    # tiny tensors: threads cost more than they bring
    torch.set_num_threads(1)
    prepare_device()
    from r3train.verify import verify_report
    from r3train.verify.verifier import Verification, Verifier
    from r3train.verify.mutations import planted_by
    from r3train.verify.session_bugs import verify_sessions
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
    if run_dir is not None:
        from r3train.verify.from_run import FromRun, layouts, verify_run

        with tempfile.TemporaryDirectory(prefix="r3train-verify-") as scratch:
            with usage_errors():
                test = FromRun(run_dir, rollout_id, Path(scratch))
                results.append(verify_run(test, layouts(names, ci), world_size, show))
        verify_report.print_report(results[-1], console)
    dtypes = (False, True) if bf16 else (False,)
    for use_bf16 in dtypes if run_dir is None else ():
        with tempfile.TemporaryDirectory(prefix="r3train-verify-") as scratch:
            verifier = Verifier(
                Path(scratch),
                bf16=use_bf16,
                max_world_size=world_size,
                report=show,
            )
            planted = planted_by("") if mutations and not use_bf16 else []
            results.append(verifier.verify(chosen, planted))
            if planted:
                results[-1].mutations += verify_sessions()
        verify_report.print_report(results[-1], console)
    console.print(f"{time.monotonic() - started:.0f} s")
    for suffix, v in zip(("", "-bf16"), results):
        if json_file:
            _beside(json_file, suffix).write_text(verify_report.to_json(v))
        if html_file:
            _beside(html_file, suffix).write_text(verify_report.to_html(v))
    if write_docs:
        docs = Path(__file__).parents[2] / "docs" / "internals" / "verification.md"
        docs.write_text(verify_report.to_markdown(results))
    sys.exit(0 if all(v.ok for v in results) else 1)


def _beside(file: Path, suffix: str) -> Path:
    return file.with_name(file.stem + suffix + file.suffix)
