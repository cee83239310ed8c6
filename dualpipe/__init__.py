"""dualpipe: mixture-of-experts training on a V-shaped bidirectional pipeline.

Names are loaded on first use, so that `import dualpipe.schedule` stays free of torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names that `__getattr__` loads, for type checkers and editors
    from dualpipe.pipeline import (
        Communicate,
        Compute,
        DeferralReport,
        DualPipeV,
        Pipeline,
        PipelineError,
        WeightGradStore,
    )
    from dualpipe.schedule import Action, Schedule, ScheduleError

__version__ = "0.1.0"

_EXPORTS = {
    **dict.fromkeys(
        ("Communicate", "Compute", "DeferralReport", "DualPipeV", "Pipeline", "PipelineError", "WeightGradStore"),
        "dualpipe.pipeline",
    ),
    **dict.fromkeys(("Action", "Schedule", "ScheduleError"), "dualpipe.schedule"),
    **dict.fromkeys(("set_p2p_tensor_dtype", "set_p2p_tensor_shapes"), "dualpipe.utils"),
}
__all__ = [
    "Action", "Communicate", "Compute", "DeferralReport", "DualPipeV", "Pipeline", "PipelineError", "Schedule",
    "ScheduleError", "WeightGradStore", "__version__",
]


def __getattr__(name: str) -> object:
    """Load an exported name on first use."""
    if name == "DualPipe":
        text = ("dualpipe has no DualPipe, which keeps every parameter on two ranks; use DualPipeV, its V-shaped half, "
                "with two stages on every rank")
        # `from dualpipe import DualPipe` would replace the text of an AttributeError.
        is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise (ImportError if is_import else AttributeError)(text)
    if name not in _EXPORTS:
        raise AttributeError(f"module 'dualpipe' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
