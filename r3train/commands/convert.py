"""``r3train convert``: the weights of a run's checkpoint as a Hugging Face checkpoint."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import click

from r3train.checksums import check
from r3train.families.read_facts import read_hf_facts
from r3train.config.options import parse_train_flags, usage_errors
from r3train.hf_checkpoint import check_export_directory
from r3train.launch.job.run_dir import CONFIG_FILE
from r3train.trainer.megatron.saved_state import (
    CHECKSUMS,
    LATEST,
    latest_checkpoint,
    read_checksums,
    read_state,
)

# the topology of one process, on the device that is here; the checkpoint's own needs the ranks and
# the device of its run
_ONE_RANK = tuple(
    """
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --virtual-pipeline-model-parallel-size none
    --context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
    --decoder-first-pipeline-num-layers none --decoder-last-pipeline-num-layers none
    --pipeline-model-parallel-layout none --no-sequence-parallel
    --distributed-backend auto --attention-backend auto
    """.split()
)
# a checkpoint of somebody else's may name code; weights need neither a loss nor a reward
_NO_CODE = tuple(
    """
    --policy-loss ppo --advantage-estimator grpo --environment none --rm-type none --custom-rm-path none
    """.split()
)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("output", type=click.Path(path_type=Path, file_okay=False))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def convert(checkpoint: Path, output: Path, flags: tuple[str, ...]) -> None:
    """Write the weights of CHECKPOINT to OUTPUT as --save-hf would have done.

    CHECKPOINT is a directory of --save, or one checkpoint in it.  The settings are those saved with it, but for
    the names of code (loss, advantages, rewards, environment), which is not imported; FLAGS of
    train_async.py change them.  One process holds the model, with the
    optimizer's float32 copy and the gradient buffers: about 10 bytes a trained parameter in bf16.  Under
    torchrun its ranks share them, as --tensor-model-parallel-size and its like say.
    """
    with usage_errors():  # before torch is imported, which takes long
        if (checkpoint / "config.json").is_file():
            raise ValueError(
                f"{checkpoint}: a model (it has a config.json), expected a checkpoint of --save"
            )
    # megatron-core is imported once prepare_device() has adapted it; --help does without torch
    from r3train.cpu.device import prepare_device

    device = prepare_device()
    # as above
    from r3train.host_group import join_ranks
    from r3train.launch.start.build_actor import export_hf
    from r3train.launch.job.checked_job import Job
    from r3train.launch.job.resume import check_adapters
    from r3train.trainer.megatron import topology
    from r3train.trainer.megatron.actor import MegatronActor
    from r3train.trainer.megatron.checkpoint import load_checkpoint

    with usage_errors():
        path = latest_checkpoint(checkpoint) if (checkpoint / LATEST).is_file() else checkpoint
        rollout_id = read_state(path)["num_rollouts"]
        sums = read_checksums(path) or {}
        check(path, sums, sums.keys() & {CONFIG_FILE}, path / CHECKSUMS)
        saved = (
            "--config",
            str(path / CONFIG_FILE),
            *_ONE_RANK,
            *_NO_CODE,
            "--save-hf",
            str(output),
        )
        config = parse_train_flags([*saved, *flags], prog_name="convert")
        target = config.checkpoint.hf_directory(rollout_id)
        check_export_directory(target, config.model.hf_checkpoint)
        hf = read_hf_facts(config.model.hf_checkpoint)
        check_adapters(config, path)
    parallel = config.parallel
    with usage_errors():
        if "RANK" in os.environ:
            minutes = parallel.distributed_timeout_minutes
            topology.init_distributed(parallel.distributed_backend, minutes)
        else:
            from torch.distributed import HashStore

            hours = timedelta(hours=1)
            join_ranks(parallel.distributed_backend, HashStore(), 0, 1, timeout=hours)
    try:
        with usage_errors():
            place = topology.init_model_parallel(parallel, config.trainer.seed)
            actor = MegatronActor(config, hf, place, device)
            load_checkpoint(actor, path, model_only=True)
        job = Job(config, hf, prompts=[], tokenizer=None, reward=None, prompt_file=None)
        export_hf(job, actor, rollout_id)
        if place.rank == 0:
            click.echo(f"{path}: the weights after {rollout_id} rollouts are in {target}")
    finally:
        topology.shutdown()
