"""The optimizer's state as a checkpoint holds it: a topology-independent form.

Megatron makes one optimizer, or a second one for experts with data-parallel ranks of their own (EP above
1, or an expert TP other than TP), and nests its state accordingly.  A checkpoint has neither: the
tensors by the name of their parameter (optimizer.state.exp_avg.NAME), the number of steps once.
Learning rates and the rest of the parameter groups come from the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensorFactory,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from r3train.trainer.megatron import fused_adam

# can be loaded with other TP, PP and DP sizes; Megatron's default type needs Transformer Engine
METADATA = {  # to be copied: Megatron adds its process groups
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
}
_PREFIX = "optimizer.state."
# names of the float32 weights: of the sharded optimizer, and of the other under bf16
_MAIN_WEIGHTS = (f"{_PREFIX}param.", f"{_PREFIX}fp32_param.")


class OptimizerState:
    """The state of one rank's optimizer, to be saved or to be loaded.

    model_state: the sharded state of the model, whose names and shards the tensors take.
    ``tensors`` are Megatron's sharded tensors, by their place in the optimizer's own form.
    """

    def __init__(
        self, optimizer: MegatronOptimizer, model_state: dict[str, Any], *, is_loading: bool
    ):
        self._optimizer = optimizer
        for part in optimizer.chained_optimizers:
            _create_moments(part.optimizer)
        with _float32_groups_known(optimizer):
            self._form = optimizer.sharded_state_dict(
                # SGD has no state to make room for
                model_state,
                is_loading=is_loading and _has_moments(optimizer),
                metadata=dict(METADATA),
            )
        self.tensors: dict[int, Any] = {}
        self._model_values: dict[int, torch.Tensor] = {}  # not in the checkpoint
        dict_list_map_inplace(self._take_tensor, self._form)

    def _take_tensor(self, leaf: Any) -> Any:
        if isinstance(leaf, LocalNonpersistentObject):
            return leaf.unwrap()
        if isinstance(leaf, ShardedBase):
            self.tensors[len(self.tensors)] = leaf
            return _Place(len(self.tensors) - 1)
        return leaf

    def facts(self) -> dict[str, Any]:
        """Return what else is saved: the number of steps, and settings for ``changed_settings``."""
        groups = self._optimizer.param_groups
        found = {name: find(groups, name) for name in ("betas", "eps")}
        return {"step": int(find(self._form, "step", "common_step") or 0), **found}

    def match(self, checkpoint: Path) -> None:
        """Leave only tensors that the checkpoint has, under the names that it has them by.

        Float32 weights that it does not have next to the model's are those of the model.
        Raises ValueError if it lacks another tensor: another optimizer saved it.  So for these of Transformer
        Engine's Adam, which holds them itself and takes none from the model.
        """
        holds_main = any(
            part.config.use_precision_aware_optimizer and not part.config.optimizer_cpu_offload
            for part in self._optimizer.chained_optimizers
        )
        saved = dist_checkpointing.load_tensors_metadata(str(checkpoint))
        for number, tensor in list(self.tensors.items()):
            prefix = next((p for p in _MAIN_WEIGHTS if tensor.key.startswith(p)), None)
            if prefix is not None:
                name = tensor.key.removeprefix(prefix)
                found = [head + name for head in _MAIN_WEIGHTS if head + name in saved]
                if found:
                    tensor.key = found[0]
                elif name in saved and holds_main:
                    raise ValueError(
                        f"{checkpoint}: has no float32 weights next to the model's, as"
                        " optimizer_overrides.use_precision_aware_optimizer needs them: resume without"
                        " it, or --load-model-only takes the model only"
                    )
                elif name in saved:
                    self._model_values[number] = self.tensors.pop(number).data
                    continue
            # one that is saved in parts (the sections of a delta net) has their names after its own
            is_cut = isinstance(tensor, ShardedTensorFactory) and any(
                name.startswith(f"{tensor.key}.") for name in saved
            )
            if tensor.key not in saved and not is_cut:
                raise ValueError(
                    f"{checkpoint}: has no {tensor.key}: it was saved with another optimizer,"
                    " another model or other weights frozen; --load-model-only takes the model only"
                )

    def restore(
        self,
        loaded: dict[int, torch.Tensor],
        saved: dict[str, Any],
        parameters: Iterable[torch.nn.Parameter],
    ) -> None:
        """Put loaded tensors and the saved number of steps into the optimizer, after the model's.

        saved: ``facts``, or the optimizer's own form in a checkpoint of before there were any.
        parameters: the model's, as they were loaded.
        """
        # in float32 the sharded optimizer's weights are their memory: where the checkpoint has none next to
        # the model's, the optimizer's empty ones are written there
        weights = [(p, p.detach().clone()) for p in parameters] if self._model_values else []

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, _Place):
                return leaf
            return loaded[leaf.number] if leaf.number in loaded else self._model_values[leaf.number]

        dict_list_map_inplace(fill, self._form)
        step = find(saved, "step", "common_step")
        parts = self._optimizer.chained_optimizers
        forms = [self._form] if len(parts) == 1 else [self._form[i] for i in range(len(parts))]
        for part, form in zip(parts, forms, strict=True):
            inner = form.get("optimizer", form)
            if not _has_moments(part):
                continue
            if "state" in inner and isinstance(part.optimizer, torch.optim.Adam):
                inner["state"]["common_step"] = torch.tensor(float(step))
            else:
                for group in inner["param_groups"]:
                    group["step"] = int(step)
        self._optimizer.load_state_dict(self._form)
        for parameter, value in weights:
            parameter.data.copy_(value)
        if self._model_values:
            self._optimizer.reload_model_params()


@contextmanager
def _float32_groups_known(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Have Megatron's unsharded optimizer of bfloat16 find the parameters of float32 in the model's state too."""
    parts = [p for p in optimizer.chained_optimizers if hasattr(p, "fp32_from_fp32_groups")]
    found = [part.float16_groups for part in parts]
    for part in parts:
        pairs = zip(part.float16_groups, part.fp32_from_fp32_groups)
        part.float16_groups = [narrow or wide for narrow, wide in pairs]
    try:
        yield
    finally:
        for part, groups in zip(parts, found):
            part.float16_groups = groups


class _Place:
    """Stands in the optimizer's form for the tensor of that number."""

    def __init__(self, number: int):
        self.number = number


def changed_settings(scheduler: OptimizerParamScheduler, saved: dict[str, Any]) -> list[str]:
    """Return "name was X, is Y" for each setting of the optimizer that differs from the checkpoint's.

    saved: the checkpoint's common state, with ``scheduler`` and ``optimizer``.
    """
    old, new = saved["scheduler"], scheduler.state_dict()
    names = {
        "max_lr": "lr",
        "min_lr": "min_lr",
        "lr_warmup_steps": "lr_warmup_iters",
        "lr_decay_style": "lr_decay_style",
        "start_wd": "weight_decay",
    }
    if "constant" not in (old["lr_decay_style"], new["lr_decay_style"]):
        names["lr_decay_steps"] = "steps of the decay"
    pairs = [(name, old[key], new[key]) for key, name in names.items()]
    groups = scheduler.optimizer.param_groups
    for key, name in (("betas", "adam_beta1, adam_beta2"), ("eps", "adam_eps")):
        was, now = find(saved["optimizer"], key), find(groups, key)
        if was is not None and now is not None:
            pairs.append((name, tuple(was) if key == "betas" else was, now))
    return [f"{name} was {was}, is {now}" for name, was, now in pairs if was != now]


def find(tree: Any, *names: str) -> Any:
    """Return the first value under one of ``names`` anywhere in nested dicts and lists, or None."""
    if isinstance(tree, dict):
        for name in names:
            if tree.get(name) is not None:
                return tree[name]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return next((v for v in (find(child, *names) for child in children) if v is not None), None)


def _has_moments(optimizer: MegatronOptimizer) -> bool:
    return any("betas" in group for group in optimizer.param_groups)


def _create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an Adam, as its first step would; Megatron expects it to be there.

    Of an optimizer with state on the host, that of its parts, which may be Transformer Engine's Adam.
    """
    if isinstance(optimizer, HybridDeviceOptimizer):
        for part in optimizer.sub_optimizers:
            _create_moments_of(part)
        optimizer._sync_sub_optimizers_state_to_hdo()
    elif isinstance(optimizer, torch.optim.Adam):
        _create_moments_of(optimizer)
    elif hasattr(optimizer, "initialize_state"):  # Transformer Engine's
        fused_adam.create_state(optimizer)


def _create_moments_of(adam: torch.optim.Optimizer) -> None:
    for p in (p for group in adam.param_groups for p in group["params"]):
        if not adam.state[p]:
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            if isinstance(adam, torch.optim.Adam):
                moments["step"] = torch.zeros(())
            adam.state[p].update(moments)
