"""Unmodified megatron-core on a CPU with gloo.

``prepare_device()`` must run before the first ``import megatron.core``.  With CUDA it gives this rank
its device.  Without CUDA it replaces the few CUDA calls of megatron-core 0.16.1 by CPU equivalents.  Each function
here says what breaks without it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from r3train.cuda_environment import set_kernel_cache, set_rank_defaults
from r3train.cpu.torchvision_stub import declare_ops_for_imports
from r3train.cpu.products import is_large, rows_times, summed_over_rows

_installed = False


def prepare_device() -> torch.device:
    """Return the device of this rank; without CUDA, adapt megatron-core first.

    It may be called again.  Returns ``cuda:LOCAL_RANK``, which is then the current device, or ``cpu``.
    It sets where kernels are kept, and on CUDA a rank's environment first (``cuda_environment``), and lets
    transformers be imported (``torchvision_stub``).
    Without torchrun's LOCAL_RANK it is ``cuda:0``.
    """
    set_kernel_cache(os.environ, None)
    declare_ops_for_imports()
    if torch.cuda.is_available():
        set_rank_defaults(os.environ)
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cuda", torch.cuda.current_device())
    global _installed
    if not _installed:
        _installed = True
        threads = own_threads(os.environ)
        if threads is not None:
            torch.set_num_threads(threads)
        with warnings.catch_warnings():
            # at import, megatron-core warns that a CPU machine lacks apex and Transformer Engine
            warnings.simplefilter("ignore")
            _install()
    return torch.device("cpu")


def own_threads(environ: Mapping[str, str]) -> int | None:
    """A rank's share of the cores; None for a single rank, and where the user has set OMP_NUM_THREADS.

    torchrun sets it to 1 for several ranks on whatever machine; what it was started with shows who did.
    """
    ranks = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:  # no Linux
        return None
    if ranks == 1 or any(entry.startswith(b"OMP_NUM_THREADS=") for entry in given):
        return None
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def uses_transformer_engine(attention_backend: str, *, on_cuda: bool) -> bool:
    """Return True if the actor is built of Transformer Engine's layers.

    The local layers are for a CPU: on CUDA their attention and their router fail.
    Raises ValueError where the asked layers are not to be had on this device.
    """
    if attention_backend == "local" or (attention_backend == "auto" and not on_cuda):
        if on_cuda:
            raise ValueError(
                "--attention-backend local: these layers run on a CPU only, and a CUDA device is"
                " here; take te, or hide the device (CUDA_VISIBLE_DEVICES=)"
            )
        return False
    try:
        # its core installs without the part for torch, and that part without its compiled library
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # a broken build raises whatever its loader does
        where = " on a CUDA device" if on_cuda else ""
        raise ValueError(
            f"--attention-backend {attention_backend}{where} needs transformer_engine.pytorch, which"
            f" does not import ({type(error).__name__}: {error}); docs/dependencies.md says how to install it"
        ) from error
    return True


def _install() -> None:
    # The rule table of dynamo must be built from the real torch.cuda (torch.optim imports it).
    import torch._dynamo  # noqa: F401

    # megatron.core.jit binds jit_fuser = torch.compile at import: slow, and it needs a C++ compiler.
    real_compile = torch.compile
    torch.compile = lambda f=None, **_: f if f is not None else (lambda g: g)
    _patch_cuda_namespace()
    _patch_tensor_moves()
    _patch_factories()
    with _without("wandb"):  # its inference imports it for logs of its own, and that takes long
        import megatron.core  # noqa: F401

    torch.compile = real_compile
    _patch_rng()
    _patch_moe()
    _patch_uneven_collectives()
    _patch_collectives_of_one_rank()
    _patch_distributed_optimizer_checkpoint()
    _patch_norm()
    _patch_linear()


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """Let nobody import a module within the block, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None
    try:
        yield
    finally:
        del sys.modules[name]


class _Stream:
    """A stand-in for a CUDA stream: everything on a CPU is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _patch_cuda_namespace() -> None:
    """Replace torch.cuda.current_device() and the streams of alltoall dispatcher, PP and DDP."""
    cuda, cpu, stream = torch.cuda, torch.device("cpu"), _Stream()
    cuda.current_device = lambda: cpu
    cuda.synchronize = lambda *_, **__: None
    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    # the "CUDA" generator is the default CPU generator
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.random.get_rng_state = cuda.get_rng_state


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _patch_tensor_moves() -> None:
    """Replace .cuda(), .to("cuda"), and type(), which optimizers compare with CUDA's names."""
    cpu = torch.device("cpu")
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    real_to, real_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(cpu if _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = cpu
        return real_to(self, *args, **kwargs)

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = real_type(self, *args, **kwargs)
        if not args and not kwargs and not name.startswith("torch.cuda."):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    torch.Tensor.to, torch.Tensor.type = to, tensor_type


def _patch_factories() -> None:
    """Ignore device="cuda" and pinned memory in torch.zeros and its like."""
    from torch.utils._device import _device_constructors

    # Fill its cache with the real factories: `with torch.device("meta")` (HF's from_pretrained)
    # otherwise breaks silently.
    _device_constructors()

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    for name in ("zeros", "ones", "empty", "full", "tensor", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _patch_rng() -> None:
    """Give dropout and recomputation the CPU generator to save and restore."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # else it warns at every checkpoint that the CPU RNG state changed
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _patch_moe() -> None:
    """Mend two errors of the MoE code of 0.16 without Transformer Engine and without CUDA.

    And skip its sorting of chunks that are in order, as they always are where one rank holds all experts:
    it copied all rows once more in each direction.  The values are the same to the bit.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # NameError in router_gating_linear without Transformer Engine (fixed upstream in 0.19)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # all_to_all_single wants lists of ints; on a CPU the splits stay tensors
    move = token_dispatcher.maybe_move_tensor_to_cpu

    def move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = move(tensor, as_numpy, record_stream)
        return moved.detach().numpy() if as_numpy and torch.is_tensor(moved) else moved

    token_dispatcher.maybe_move_tensor_to_cpu = move_to_host
    sort = token_dispatcher.sort_chunks_by_idxs

    def sort_unless_in_order(input, split_sizes, sorted_idxs, probs=None, fused=False):
        if sorted_idxs.tolist() == list(range(len(sorted_idxs))):
            return input, probs
        return sort(input, split_sizes, sorted_idxs, probs=probs, fused=fused)

    token_dispatcher.sort_chunks_by_idxs = sort_unless_in_order


def _patch_uneven_collectives() -> None:
    """Make up for gloo's lack of uneven all-gather and reduce-scatter (ETP > 1 with EP > 1)."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    all_gather = mappings._gather_along_first_dim
    reduce_scatter = mappings._reduce_scatter_along_first_dim

    def gather(x, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return all_gather(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: x.shape[0]] = x
        out = x.new_empty((max(sizes) * len(sizes), *x.shape[1:]))
        dist.all_gather_into_tensor(out, padded, group=group)
        return torch.cat([share[:n] for share, n in zip(out.split(max(sizes)), sizes)])

    def scatter(x, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(x, group, input_split_sizes, use_global_buffer)
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.split([int(n) for n in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter


def _patch_collectives_of_one_rank() -> None:
    """Leave out the distributed optimizer's collectives over one rank, whose output is its input.

    NCCL does nothing there; gloo copies the whole buffer of gradients, 3% of a small model's step.
    """
    from megatron.core.distributed import param_and_grad_buffer

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(output: torch.Tensor, input: torch.Tensor, *, group: Any, **given: Any) -> Any:
            if group.size() == 1 and output.data_ptr() == input.data_ptr():
                return None
            return collective(output, input, group=group, **given)

        return run

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        collective = getattr(param_and_grad_buffer, name)
        setattr(param_and_grad_buffer, name, unless_alone(collective))


def _patch_distributed_optimizer_checkpoint() -> None:
    """Mend the loading of a distributed optimizer that uses torch's AdamW (no TE, no apex).

    torch keeps a ``step`` for each parameter.  Megatron's load path gives all parameters one shared
    ``step``, which AdamW would then raise once for each parameter: the bias correction would be
    silently wrong.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    load_state_dict = DistributedOptimizer.load_state_dict
    megatrons = DistributedOptimizer._set_main_param_and_optimizer_states

    @torch.no_grad()
    def set_main_state(self, model_param, tensors):
        if not isinstance(self.optimizer, torch.optim.Adam):
            return megatrons(self, model_param, tensors)
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        for key, destination in {"param": main, **self.optimizer.state[main]}.items():
            if key != "step":
                destination.copy_(tensors[key])

    def load_with_own_steps(self, state_dict):
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:  # of torch's AdamW
                state["step"] = state["step"].clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = set_main_state
    DistributedOptimizer.load_state_dict = load_with_own_steps


def _patch_norm() -> None:
    """Allow norms under sequence parallelism (MoE with TP needs it); WrappedTorchNorm refuses."""
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import torch_norm, transformer_block

    class SequenceParallelNorm:
        """torch's norm; its weights are tagged, so that their gradients are summed."""

        def __new__(cls, config, hidden_size, eps=1e-5, **_):
            kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
            norm = kind(normalized_shape=hidden_size, eps=eps)
            for p in norm.parameters():
                p.sequence_parallel = config.sequence_parallel
            return norm

    for module in (backends, gpt_layer_specs, transformer_block, torch_norm):
        for name in ("WrappedTorchNorm", "LNImpl", "LayerNormImpl"):
            if hasattr(module, name):
                setattr(module, name, SequenceParallelNorm)


def _patch_linear() -> None:
    """Give large products of linear layers on one rank, forward and backward, to the faster library."""
    from megatron.core.tensor_parallel import layers

    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    forward, backward = linear.forward, linear.backward

    def faster_forward(ctx, input, weight, bias, fusion, allreduce, sequence, buffer, *others):
        alone = not (fusion or allreduce or sequence) and buffer is None
        ctx.faster = alone and is_large(input, weight)
        if not ctx.faster:
            given = input, weight, bias, fusion, allreduce, sequence, buffer
            return forward(ctx, *given, *others)
        ctx.save_for_backward(input, weight)
        ctx.use_bias = bias is not None
        out = rows_times(input, weight.t())
        return out if bias is None else out + bias

    def faster_backward(ctx, grad_output):
        if not ctx.faster:
            return backward(ctx, grad_output)
        input, weight = ctx.saved_tensors
        of_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
        of_weight = summed_over_rows(grad_output, input)
        return rows_times(grad_output, weight), of_weight, of_bias, *[None] * 6

    linear.forward, linear.backward = staticmethod(faster_forward), staticmethod(faster_backward)
