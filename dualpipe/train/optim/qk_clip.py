"""QK-clip: after a step, scale back the query and key weights of heads whose largest attention logit exceeds a limit.

    factor_h = min(1, limit / largest logit of head h in the step's micro-batches, on all ranks)

With Muon, logits grow where they do not with AdamW, until the softmax attends to one key only. In contrast to a cap on
the logits, QK-clip changes no forward pass, and leaves heads below the limit alone (Kimi K2, arXiv:2507.20534, section
2.1).

Dimension letter: A attention heads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualpipe.models.decoder import Attention
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.optim.optimizer import Optimizer


class QKClip:
    """QK-clip of all attention layers in the stages of this rank. Makes the layers record their largest logits.

    Args:
        stages: the stages of this rank.
        limit: largest attention logit.
        group: the ranks with the same stages. None: this rank only.
        device: of the stages.

    Raises:
        ValueError: the limit is not positive, or queries and keys are normalized.
    """

    def __init__(
        self, stages: Iterable[nn.Module], limit: float, *, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        if limit <= 0:
            raise ValueError(f"the limit of attention logits must be positive; got {limit}")
        self._layers = [module for stage in stages for module in stage.modules() if isinstance(module, Attention)]
        self._limit = limit
        self._group = group
        for layer in self._layers:
            layer.max_logits_A = torch.full((layer.num_heads,), -torch.inf, dtype=torch.float32, device=device)
            layer.logit_row_scales(layer.max_logits_A)  # raises ValueError for norms

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, grad_norm: Tensor) -> Tensor:
        """Scale weights after a step of the optimizer, and return the largest logit of the step.

        Collective over the group. The host does not wait for the device.

        Args:
            optimizer: owns the weights.
            grad_norm: of the step, a scalar on the device. If it is infinite or NaN, no weight is scaled.

        Returns:
            A scalar on the device.
        """
        if not self._layers:
            return grad_norm.new_full((), -torch.inf)
        recorder = Recorder.current()
        max_logits = torch.cat([layer.max_logits_A for layer in self._layers if layer.max_logits_A is not None])
        if self._group is not None:
            with recorder.collective("qk_clip", "the largest attention logits", recorder.members(self._group)):
                dist.all_reduce(max_logits, dist.ReduceOp.MAX, group=self._group)
        exceeds = (max_logits > self._limit) & max_logits.isfinite() & grad_norm.isfinite()
        factors = torch.where(exceeds, self._limit / max_logits, 1.0)
        factors_by_layer = factors.split([layer.num_heads for layer in self._layers])
        optimizer.scale_rows(
            parameter_and_factors for layer, factors_A in zip(self._layers, factors_by_layer)
            for parameter_and_factors in layer.logit_row_scales(factors_A))
        self.reset()
        return max_logits.max()

    def reset(self) -> None:
        """Discard the logits recorded since the last step, for example those of a micro-batch that updates nothing."""
        for layer in self._layers:
            if layer.max_logits_A is not None:
                layer.max_logits_A.fill_(-torch.inf)
