"""The optimizers of phase 4, for the actor and the plain-PyTorch oracle alike."""

from __future__ import annotations

from r3train.config.trainer import TrainerSection

# never reached: the norm is computed, nothing is clipped
NO_CLIPPING = 1e9
# A large epsilon keeps the first AdamW step smooth where a gradient is next to nothing.
ADAM = TrainerSection(
    optimizer="adam", lr=1e-3, weight_decay=0.01, adam_eps=1e-4, clip_grad=NO_CLIPPING
)
SGD = TrainerSection(optimizer="sgd", lr=0.3, clip_grad=NO_CLIPPING)
