"""Old paths of moved modules: importing one returns the module at its new path, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "dualpipe.nn.layers": "dualpipe.nn",
    "dualpipe.nn.products": "dualpipe.nn.quantized_matmul",
    "dualpipe.nn.sequence_split": "dualpipe.nn.attention.sequence_split",
    "dualpipe.nn.router": "dualpipe.nn.routing.router",
    "dualpipe.nn.router_set": "dualpipe.nn.routing.router_set",
    "dualpipe.background": "dualpipe.runtime.background",
    "dualpipe.checkpoint.flight": "dualpipe.checkpoint.pending",
    "dualpipe.checkpoint.hub_commands": "dualpipe.checkpoint.hub.commands",
    "dualpipe.checkpoint.hub_files": "dualpipe.checkpoint.hub.files",
    "dualpipe.checkpoint.hub_load": "dualpipe.checkpoint.hub.load",
    "dualpipe.checkpoint.hub_quantized": "dualpipe.checkpoint.hub.save_quantized",
    "dualpipe.checkpoint.hub_save": "dualpipe.checkpoint.hub.save",
    "dualpipe.checkpoint.plan": "dualpipe.checkpoint.assign",
    "dualpipe.device": "dualpipe.runtime.device",
    "dualpipe.doctor": "dualpipe.runtime.doctor",
    "dualpipe.dtypes": "dualpipe.runtime.dtypes",
    "dualpipe.errors": "dualpipe.runtime.errors",
    "dualpipe.files": "dualpipe.runtime.files",
    "dualpipe.models.activations": "dualpipe.plan.activations",
    "dualpipe.models.sizes": "dualpipe.models.flops",
    "dualpipe.parallel.context.sequence_rows": "dualpipe.parallel.context.row_exchange",
    "dualpipe.parallel.dtype_plan": "dualpipe.parallel.precision.plan",
    "dualpipe.parallel.expert": "dualpipe.parallel.experts.dispatcher",
    "dualpipe.parallel.fp8_rows": "dualpipe.parallel.experts.fp8_rows",
    "dualpipe.parallel.gather": "dualpipe.parallel.fsdp.quantized_gather",
    "dualpipe.parallel.heads": "dualpipe.parallel.context.ulysses",
    "dualpipe.parallel.precision.units": "dualpipe.parallel.precision.fsdp_units",
    "dualpipe.parallel.private": "dualpipe.parallel.fsdp.private",
    "dualpipe.parallel.resolve": "dualpipe.parallel.precision.resolve",
    "dualpipe.parallel.ring": "dualpipe.parallel.context.ring",
    "dualpipe.parallel.sequence_rows": "dualpipe.parallel.context.row_exchange",
    "dualpipe.parallel.shared_loads": "dualpipe.parallel.experts.shared_loads",
    "dualpipe.plan.context_traffic": "dualpipe.plan.communication",
    "dualpipe.plan.costs": "dualpipe.plan.stage_costs",
    "dualpipe.plan.meta_run": "dualpipe.plan.on_meta.meta_run",
    "dualpipe.quantized.weights": "dualpipe.quantized.quantize_model",
    "dualpipe.ranks": "dualpipe.runtime.ranks.rank_sync",
    "dualpipe.recorder": "dualpipe.runtime.recorder",
    "dualpipe.schedule.anneal": "dualpipe.schedule.search.anneal",
    "dualpipe.schedule.bound": "dualpipe.schedule.search.bound",
    "dualpipe.schedule.cache": "dualpipe.schedule.search.cache",
    "dualpipe.schedule.command": "dualpipe.schedule.by_name.command",
    "dualpipe.schedule.greedy": "dualpipe.schedule.search.greedy",
    "dualpipe.schedule.progress": "dualpipe.schedule.search.progress",
    "dualpipe.train.anomaly.replay": "dualpipe.train.replay",
    "dualpipe.train.build": "dualpipe.train.step.stages",
    "dualpipe.train.control": "dualpipe.train.health.peer_store",
    "dualpipe.train.document_index": "dualpipe.train.data.document_index",
    "dualpipe.train.elastic": "dualpipe.train.config.resolve",
    "dualpipe.train.garbage": "dualpipe.train.garbage_collection",
    "dualpipe.train.guard": "dualpipe.train.anomaly.guard",
    "dualpipe.train.job": "dualpipe.train.launch.distributed",
    "dualpipe.train.loop": "dualpipe.train.trainer",
    "dualpipe.train.loss": "dualpipe.train.step.loss",
    "dualpipe.train.memory": "dualpipe.plan.memory",
    "dualpipe.train.memory_timeline": "dualpipe.plan.memory_timeline",
    "dualpipe.train.model": "dualpipe.train.step.stages",
    "dualpipe.train.mtp": "dualpipe.train.step.loss",
    "dualpipe.train.muon": "dualpipe.train.optim.muon",
    "dualpipe.train.optimizer": "dualpipe.train.optim.optimizer",
    "dualpipe.train.pack": "dualpipe.train.data.pack",
    "dualpipe.train.profiled": "dualpipe.train.observers.profiler",
    "dualpipe.train.qk_clip": "dualpipe.train.optim.qk_clip",
    "dualpipe.train.rendezvous": "dualpipe.train.launch.store",
    "dualpipe.train.rerun": "dualpipe.train.anomaly.localize",
    "dualpipe.train.resume": "dualpipe.train.checkpointing.saver",
    "dualpipe.train.schedule": "dualpipe.train.step.stages",
    "dualpipe.train.shuffle": "dualpipe.train.data.shuffle",
    "dualpipe.train.start": "dualpipe.train.launch.local",
    "dualpipe.train.step_runner": "dualpipe.train.step.step_runner",
    "dualpipe.train.step_sync": "dualpipe.train.stop",
    "dualpipe.train.tables": "dualpipe.train.config.schema",
    "dualpipe.train.traced": "dualpipe.train.observers.tracing",
    "dualpipe.train.votes": "dualpipe.train.stop",
    "dualpipe.train.watchdog": "dualpipe.train.health.watchdog",
    "dualpipe.train.why": "dualpipe.train.health.diagnose",
}


class _MovedModules(MetaPathFinder, Loader):
    """Finds a moved module by its old path. Old and new path give one module object."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that loads the module from its new path, or None for all other modules."""
        if fullname not in MOVED:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module at the new path."""
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} has moved to {new}; import that, as the old path goes with the next release",
                      DeprecationWarning, stacklevel=2)
        module = import_module(new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the new path, which the import system has replaced; the module has run already."""
        module.__spec__ = self._spec


def install() -> None:
    """Let `import` find moved modules; calling it again changes nothing."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
