"""What the examples in README.md and docs/ take as given: a user's own model, data and set-up."""

from collections.abc import Callable, Iterable, Sequence

import torch as torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from dualpipe import Communicate as Communicate
from dualpipe import Compute as Compute
from dualpipe import DualPipeV as DualPipeV
from dualpipe.checkpoint import Checkpoints as Checkpoints
from dualpipe.checkpoint import hub_dtypes as hub_dtypes
from dualpipe.checkpoint import load as load
from dualpipe.checkpoint import load_hf as load_hf
from dualpipe.checkpoint import save_hf as save_hf
from dualpipe.checkpoint import training_state as training_state
from dualpipe.models import HubConfig
from dualpipe.models import build_stages as build_stages
from dualpipe.nn import RouterSet
from dualpipe.parallel import Dispatcher, DTypePlan, DTypePolicy
from dualpipe.parallel import build_on_meta as build_on_meta
from dualpipe.parallel import resolve_dtypes as resolve_dtypes
from dualpipe.pipeline import Communication
from dualpipe.train.data.loader import Loader
from dualpipe.train.optim.optimizer import Optimizer

stage_a: nn.Module
stage_b: nn.Module
stages: Sequence[nn.Module]
x: Tensor
y: Tensor
batches: Iterable[tuple[Tensor, Tensor]]
loss_fn: Callable[[Tensor, Tensor], Tensor]
mesh: DeviceMesh
config: HubConfig
mine: Sequence[int]
policy: DTypePolicy
plan: DTypePlan
optimizer: Optimizer
adamw: torch.optim.AdamW
scaler: GradScaler
routers: RouterSet
pipe: DualPipeV
inputs: Sequence[Tensor]
targets: Sequence[Tensor]
loader: Loader
step: int
device: torch.device
num_experts: int

class Model(nn.Module): ...

class Layer(nn.Module):
    dispatcher: Dispatcher
    dispatch: Communication
    combine: Communication
    def attend(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, object]: ...
    def experts(self, rows: Tensor, weights: Tensor, received: Tensor) -> Tensor: ...
    def finish(self, residual: Tensor, rows: Tensor, plan: object) -> Tensor: ...

class Stage(nn.Module):
    layers: Sequence[Layer]

stage: Stage
