"""QK-clip: after a step, heads whose largest attention score was above a limit have their weights scaled back to it.

    share_h = min(1, limit / largest score of head h in the step's micro-batches, on all ranks)

Muon lets scores grow where AdamW does not, until the softmax knows one key alone; unlike a cap on the scores this
changes no forward, and a head that stays below is not touched (Kimi K2, arXiv:2507.20534, section 2.1).
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
    """The heads of all attention layers of this rank's stages, whose largest scores are noted from now on.

    group: the ranks with the same stages. Raises ValueError for a limit that is not positive, and for queries and keys
    that have norms.
    """

    def __init__(
        self, stages: Iterable[nn.Module], limit: float, *, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        if limit <= 0:
            raise ValueError(f"the limit of attention scores must be positive; got {limit}")
        self._layers = [module for stage in stages for module in stage.modules() if isinstance(module, Attention)]
        self._limit, self._group = limit, group
        for layer in self._layers:
            layer.peaks_A = torch.full((layer.num_heads,), -torch.inf, dtype=torch.float32, device=device)
            layer.scaled(layer.peaks_A)

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, grad_norm: Tensor) -> Tensor:
        """Scale weights after a step of the optimizer, unless its gradient norm was infinite or NaN; returns the step's
        largest score, a scalar on the device. Collective over the group; the host does not wait."""
        if not self._layers:
            return grad_norm.new_full((), -torch.inf)
        peaks = [layer.peaks_A for layer in self._layers if layer.peaks_A is not None]
        largest, recorder = torch.cat(peaks), Recorder.current()
        if self._group is not None:
            with recorder.collective("qk_clip", "the largest attention scores", recorder.members(self._group)):
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        above = (largest > self._limit) & largest.isfinite() & grad_norm.isfinite()
        shares = torch.where(above, self._limit / largest, 1.0).split([layer.num_heads for layer in self._layers])
        optimizer.scale_rows(pair for layer, share_A in zip(self._layers, shares) for pair in layer.scaled(share_A))
        self.forget()
        return largest.max()

    def forget(self) -> None:
        """Take no account of the scores since the last step, as of a micro-batch that was only looked at."""
        for layer in self._layers:
            if layer.peaks_A is not None:
                layer.peaks_A.fill_(-torch.inf)
