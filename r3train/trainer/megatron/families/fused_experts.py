"""Checkpoints that hold all experts of a layer in one tensor."""

from __future__ import annotations

from typing import Any

import torch
from mbridge.core.bridge import Bridge
from mbridge.core.safetensor_io import SafeTensorIO

from r3train.trainer.megatron.hf_bridge import EXPERT


class _OncePerTensor(SafeTensorIO):
    """Reads a tensor that several experts ask for once; mbridge counts every request."""

    def load_some_hf_weight(self, names: list[str]) -> dict[str, torch.Tensor]:
        return super().load_some_hf_weight(list(dict.fromkeys(names)))


class FusedExperts(Bridge):
    """A bridge whose expert parameters are one row each of a tensor on disk.

    An expert's bias has the name of a weight here: mbridge and the export split names at ".weight".
    """

    def __init__(self, hf_config: Any, **kwargs: Any):
        self._experts: dict[str, dict[int, torch.Tensor]] = {}  # of a tensor that is not whole yet
        super().__init__(hf_config, **kwargs)

    def _expert_from_disk(self, name: str, row: torch.Tensor) -> torch.Tensor:
        """Bring one expert's row into Megatron's layout; fc1 is [gate; up] in both here."""
        return row

    def _expert_to_disk(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undo ``_expert_from_disk``."""
        return tensor

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        return _OncePerTensor(self._get_actual_hf_path(weights_path))

    def _weight_to_mcore_format(self, name: str, hf_weights: list[torch.Tensor]) -> torch.Tensor:
        """Take one expert out."""
        if EXPERT not in name:
            return super()._weight_to_mcore_format(name, hf_weights)
        per_rank = self.config.num_moe_experts // self.mpu.ep_size
        index = self.mpu.ep_rank * per_rank + int(name.rsplit(".weight", 1)[1])
        return self._expert_from_disk(name, hf_weights[0][index].to(self.dtype)).contiguous()

    def _weight_to_hf_format(
        self, name: str, tensor: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]:
        """Put one expert back; the tensor comes with the layer's last."""
        if EXPERT not in name:
            return super()._weight_to_hf_format(name, tensor)
        (hf_name,) = self._weight_name_mapping_mcore_to_hf(name)
        experts = self._experts.setdefault(hf_name, {})
        # a copy: the parameter may move before the last expert is here
        row = self._expert_to_disk(name, tensor).clone(memory_format=torch.contiguous_format)
        experts[int(name.rsplit(".weight", 1)[1])] = row
        if len(experts) < self.config.num_moe_experts:
            return [], []
        del self._experts[hf_name]
        return [hf_name], [torch.stack([experts[i] for i in range(len(experts))])]
