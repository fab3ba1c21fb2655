"""The optimizer, and the weights on their way to SGLang."""

from __future__ import annotations

from collections.abc import Iterator
import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from r3train.config.requirements import at_most, check, excludes, requires
from r3train.config.sources import HOST
from r3train.config.section import LIMIT, OverrideScalar, Section

if TYPE_CHECKING:
    from r3train.config.run import RunConfig

_NOT_LORA = excludes(
    "lora_rank > 0: only adapters are trained (--target-modules, --exclude-modules)"
)
_NOT_ADAPTER = excludes("lora_serving = adapter: servers load adapters from the run directory")


class TrainerSection(Section):
    """The optimizer, and the weights on their way to SGLang."""

    title: ClassVar[str] = "Trainer"
    test_hooks = ("ci_test",)

    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples of an optimizer step; unset means all samples of a rollout."""
    max_tokens_per_gpu: int = Field(default=4096, ge=1)
    """Most tokens of a microbatch on one rank."""
    log_probs_chunk_size: Annotated[int, *LIMIT] = 1024
    """Rows of a microbatch whose logits are held in float32 at once, for log-probs and entropy; -1: all.
    Fewer rows take less memory."""
    reuse_log_probs: Annotated[
        Literal["auto", "on", "off"],
        requires(
            "steps_per_rollout = 1 or loss_type = sft: several steps' log-probs come from different weights",
            when="on",
        ),
        excludes(
            "kl_coef > 0: the reward needs the old log-probs before the train forward", when="on"
        ),
    ] = "auto"
    """Take the old log-probs from the forward of the train step, and skip the pass that would compute
    them before it.  This is exact with one optimizer step per rollout.  auto: do so then; on: refuse to start
    with more steps; off: never."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer; adam is AdamW."""
    optimizer_overrides: dict[str, OverrideScalar] = {}
    """Any other field of Megatron's OptimizerConfig, such as optimizer_cpu_offload; a dtype is fp32,
    bf16, fp16 or fp8."""
    lr: float = Field(default=1e-6, ge=0)
    """Learning rate.  1e-6 is usual for all weights of a pretrained model, 1e-5 for adapters, 1e-3 for a tiny
    random model."""
    min_lr: Annotated[float, at_most("lr")] = Field(default=0.0, ge=0)
    """Learning rate at the end of a decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after warm-up."""
    lr_warmup_iters: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    adam_beta2: float = Field(default=0.98, ge=0, lt=1)
    """Decay of Adam's second moment."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to Adam's denominator."""
    freeze_moe_router: Annotated[
        bool,
        _NOT_LORA,
    ] = False
    """Do not train the routers: neither their weights nor their expert biases change."""
    freeze_params: Annotated[
        tuple[str, ...],
        _NOT_LORA,
    ] = Field(default=(), strict=False)
    """Do not train parameters whose name on disk (Hugging Face's, such as
    model.layers.3.self_attn.o_proj.weight) holds a match of this regular expression."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 is off."""
    seed: int = Field(default=1234, ge=0)
    """Seed of the actor's random numbers."""
    update_weight_transfer_mode: Annotated[
        Literal["distributed", "disk", "shared_memory"],
        _NOT_ADAPTER,
    ] = "distributed"
    """Transport of new weights to SGLang: a process group (distributed), files (disk), or memory that
    servers on rank 0's node map (shared_memory)."""
    update_weight_buffer_size: Annotated[int, _NOT_ADAPTER] = Field(default=512 * 1024 * 1024, ge=1)
    """Bytes of weights that are sent at once."""
    update_weight_master_address: Annotated[str | None, _NOT_ADAPTER] = Field(
        default=None, pattern=HOST
    )
    """Address or network interface of rank 0's node, where servers join the process group.  Unset: loopback
    if all servers are on this node, else the address from which they are reached.  Pipeline stages on other
    nodes use the interface of that name there, else such an address."""
    check_weight_update_equal: Annotated[bool, requires("has_engines")] = False
    """After every weight update, compare every tensor of every server with the actor's, bit for bit, and let
    servers and actor score canaries (--r3-canaries)."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak TFLOP/s of one GPU (989 for an H100 in bfloat16): writes perf/mfu, the share of it that the
    model's arithmetic uses."""
    ci_test: bool = False
    """Strict checks for continuous integration; they include the R3 check."""

    @field_validator("freeze_params")
    @classmethod
    def _expressions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse text that is no regular expression."""
        for text in value:
            try:
                re.compile(text)
            except re.error as error:
                raise ValueError(f"{text!r} is no regular expression: {error}") from None
        return value

    @check
    def _rate(self, run: RunConfig) -> Iterator[str]:
        if self.optimizer == "adam" and self.lr >= 1:
            yield f"lr {self.lr:g}: a step of Adam moves every weight by about lr, expected below 1"

    @check
    def _whole_steps(self, run: RunConfig) -> Iterator[str]:
        samples, step = run.samples_per_rollout, run.samples_per_step
        if samples % step:
            yield f"{run.samples_in_words} is not a multiple of global_batch_size {step}"
