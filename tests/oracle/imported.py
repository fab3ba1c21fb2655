"""Imports of a rank, in the order of a job: the process that imports this is forked into ranks."""

import gc

import torch

from r3train.cpu.device import prepare_device

torch.set_num_threads(1)
prepare_device()

from r3train.cpu.torchvision_stub import declare_torchvision_ops  # noqa: E402

declare_torchvision_ops()

import r3train.launch.job.preflight  # noqa: E402, F401
import r3train.launch.start.rank  # noqa: E402, F401
import r3train.launch.start.run_rank  # noqa: E402, F401
import r3train.trainer.megatron.checkpoint  # noqa: E402, F401
import r3train.trainer.megatron.model  # noqa: E402, F401
import r3train.verify.topology_worker  # noqa: E402, F401

gc.freeze()  # ranks do not search these imports for garbage
