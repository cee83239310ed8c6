"""List candidate tile sizes for each shape class of kernels/grouped_gemm_tiles.py, and filter out those that fail.

No GPU is needed. A candidate must compile in every form of the table's entry, without spills, within the chip's shared
memory and with its matrix instructions.

    python benchmarks/tune_grouped_gemm.py --offline
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import product

from compile_kernels import SHARED_LIMIT, Resources, compile_spec
from expert_shapes import MODELS, Model
from kernel_specs import row_specs, weight_specs

from dualpipe.kernels import grouped_gemm_tiles
from dualpipe.kernels.grouped_gemm_tiles import GemmConfig

TABLES = {"row": "_ROWS", "weight": "_WEIGHT"}  # the tables behind row_configs and weight_configs
MOST_STAGES = 5
FINE_GRAINED = {"intermediate-64": Model(2048, 64, 64, 6)}  # gate and up together are one narrow tile
FINEST_GRAINED = {"intermediate-32": Model(2048, 32, 64, 6)}  # half of one narrow tile, as its narrow gradients are


@dataclass(frozen=True)
class ShapeClass:
    """One entry of the table, and the models and tokens that it is tuned on."""

    table: str  # a key of TABLES
    name: str
    tiles: tuple[tuple[int, int], ...]  # rows and columns of candidates
    models: dict[str, Model]
    coarse_models: tuple[str, ...]
    tokens: tuple[int, ...]  # the coarse step uses the first
    time_share: float  # of the time budget

    @property
    def is_gathered(self) -> bool:
        """Return True if the loop that sums over rows reads them through a gather index."""
        return self.name.endswith("_gathered")

    def __str__(self) -> str:
        return f"{self.table} {self.name}"


LARGE = ((128, 128), (128, 256), (256, 128), (64, 256), (256, 64))
SLIM = ((64, 128), (128, 64), (128, 128), (256, 64), (256, 128))
UNLIKE = ("qwen3-30b-a3b", "gpt-oss-20b")  # many small experts; few large ones whose widths few tiles divide
MIDDLE_FIRST = (16384, 65536, 4096)
CLASSES = (
    ShapeClass("row", "wide", LARGE, MODELS, UNLIKE, MIDDLE_FIRST, 0.4),
    ShapeClass("weight", "wide_gathered", LARGE, MODELS, UNLIKE, MIDDLE_FIRST, 0.2),
    ShapeClass("weight", "wide", LARGE, MODELS, UNLIKE, MIDDLE_FIRST, 0.15),
    ShapeClass("row", "narrow", SLIM, FINE_GRAINED, tuple(FINE_GRAINED), (16384, 4096), 0.06),
    ShapeClass("weight", "narrow_gathered", SLIM, FINEST_GRAINED, tuple(FINEST_GRAINED), (16384, 4096), 0.06),
    ShapeClass("weight", "narrow", SLIM, FINE_GRAINED, tuple(FINE_GRAINED), (16384, 4096), 0.06),
)


def candidates(shape_class: ShapeClass, arch: int) -> list[GemmConfig]:
    """Return, per tile, the deepest pipelines that fit once or twice on a multiprocessor, and the next shorter ones."""
    found = []
    for (rows, cols), depth, warps in product(shape_class.tiles, (32, 64, 128), (4, 8)):
        if 32 <= rows * cols // (32 * warps) <= 128:  # float32 sums per thread, which has 255 registers
            stage = 2 * (rows + cols) * depth
            deepest = {min(SHARED_LIMIT[arch] // programs // stage, MOST_STAGES) for programs in (1, 2)}
            stages = {n - less for n in deepest for less in (0, 1)}
            if shape_class.is_gathered:  # as many buffers: see grouped_gemm_tiles._WEIGHT
                stages = {2 * n - 1 for n in stages}
            found += [GemmConfig(rows, cols, depth, warps, n) for n in sorted(stages) if n >= 2]
    return found


def compile_all(shape_class: ShapeClass, config: GemmConfig, arch: int) -> list[Resources]:
    """Compile every kernel of the table's entry with `config`, up to the first problem; return their resources."""
    specs = {"row": row_specs, "weight": weight_specs}[shape_class.table]
    results = []
    for spec in specs(shape_class.name, config, arch):
        results.append(compile_spec(spec, arch))
        if results[-1].problems:
            break
    return results


def problem(shape_class: ShapeClass, config: GemmConfig, arch: int) -> str:
    """Return the reason why `config` fails, or an empty string."""
    try:
        return ", ".join(compile_all(shape_class, config, arch)[-1].problems)
    except Exception as error:  # any compiler error drops this candidate
        return f"does not compile: {type(error).__name__}"


def survivors(
    shape_class: ShapeClass, arch: int, pool: Executor, most: int | None = None
) -> tuple[list[GemmConfig], dict[GemmConfig, str]]:
    """Return (candidates worth timing, reasons by dropped candidate). most: consider only the first N candidates."""
    tried = candidates(shape_class, arch)[:most]
    reasons = dict(zip(tried, pool.map(partial(problem, shape_class, arch=arch), tried)))
    return [c for c, why in reasons.items() if not why], {c: why for c, why in reasons.items() if why}


def source(config: GemmConfig) -> str:
    """Return `config` as Python source, as the table has it."""
    return f"GemmConfig({config.rows}, {config.cols}, {config.depth}, {config.warps}, {config.stages})"


def present_entry(shape_class: ShapeClass, arch: int) -> GemmConfig:
    return getattr(grouped_gemm_tiles, f"{shape_class.table}_configs")(arch)[shape_class.name]
