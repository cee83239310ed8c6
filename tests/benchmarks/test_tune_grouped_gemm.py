"""The tuner's decisions on any device, and a short run on a GPU."""

import math
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch

from dualpipe.kernels import grouped_gemm_tiles
from dualpipe.kernels.grouped_gemm_tiles import GemmConfig
from scripts import run_script

SCRIPT = "tune_grouped_gemm.py"
CPU = torch.device("cpu")


@pytest.fixture
def tuner(script):
    return script("tune_grouped_gemm")


@pytest.fixture
def parts(script):
    return script("gemm_candidates")


def rates(config, *values):
    return [{"config": config, "step": "fine", "product": f"product {i}", "TFLOP/s": v} for i, v in enumerate(values)]


def test_the_best_geometric_mean_wins(tuner):
    rows = [*rates("steady", 100.0, 100.0), *rates("uneven", 180.0, 50.0), *rates("failed", 300.0, None),
            *rates("unfinished", 300.0)]
    means = tuner.mean_rates(rows)
    assert list(means) == ["steady", "uneven"]
    assert means["uneven"] == pytest.approx(math.sqrt(180 * 50))
    tuned = tuner.choose(tuner.CLASSES[0], "uneven", means, rows, {})
    assert (tuned.chosen, tuned.cases) == ("steady", 2) and tuned.ratio == pytest.approx(100 / math.sqrt(9000))


def test_the_table_is_python_source(tuner):
    config = GemmConfig(64, 128, 64, 4, 4)
    tuned = [tuner.Tuned(c, tuner.source(config), 1.25, 3, [], {}) for c in tuner.CLASSES]
    values = {"GemmConfig": GemmConfig}
    exec(tuner.table(tuned, 90), values)
    assert values["_ROWS"] == {90: dict.fromkeys(("wide", "narrow"), config)}
    gathered = ("wide_gathered", "narrow_gathered")
    assert values["_WEIGHT"] == {90: dict.fromkeys(("wide", "narrow", *gathered), config)}


@pytest.mark.parametrize("arch", [80, 90])
def test_candidates_fit(tuner, parts, arch):
    for shape_class in tuner.CLASSES:
        tried = parts.candidates(shape_class, arch)
        assert len(set(tried)) == len(tried) >= 10
        for c in tried:
            buffers = (c.stages + 1) // 2 if shape_class.is_gathered else c.stages
            assert 2 * buffers * (c.rows + c.cols) * c.depth <= parts.SHARED_LIMIT[arch]
            assert c.rows * c.cols <= 128 * 32 * c.warps


def test_every_class_of_the_table_is_tuned_on_its_own_shapes(tuner):
    """At tokens that the classes name, so the shapes are computed and nothing is allocated: on the meta device."""
    tuned = {str(shape_class) for shape_class in tuner.CLASSES}
    listed = {f"row {name}" for name in grouped_gemm_tiles.row_configs(90)}
    listed |= {f"weight {name}" for name in grouped_gemm_tiles.weight_configs(90)}
    assert {name for name in listed if name.split()[1].startswith(("wide", "narrow"))} == tuned
    for shape_class in tuner.CLASSES:
        for setting in tuner.settings(shape_class, coarse=False):
            layer = setting.layer(torch.device("meta"))
            cases = tuner.cases(setting.sizes, layer, torch.device("meta"))
            names = [case.name for case in cases if tuner.class_of(case) == str(shape_class)]
            assert names, (str(shape_class), setting)


def test_launching_is_undone(tuner):
    config = GemmConfig(1, 2, 3, 4, 5)
    tables = grouped_gemm_tiles.row_configs, grouped_gemm_tiles.weight_configs
    with pytest.raises(KeyError), tuner.launching(config):
        assert grouped_gemm_tiles.row_configs(90)["wide"] is grouped_gemm_tiles.weight_configs(90)["odd"] is config
        raise KeyError
    assert (grouped_gemm_tiles.row_configs, grouped_gemm_tiles.weight_configs) == tables


def test_tunes_a_tiny_class_on_cpu(tuner, parts, monkeypatch):
    """With the reference instead of kernels: every step, and a candidate that fails."""
    models = {"tiny": tuner.Model(32, 80, 8, 2)}
    tiny = tuner.ShapeClass("row", "wide", ((64, 128),), models, ("tiny",), (512, 1024), 1.0)
    bad, good = GemmConfig(64, 128, 32, 4, 2), GemmConfig(64, 128, 32, 4, 3)
    monkeypatch.setattr(parts, "problem", lambda shape_class, config, arch: "" if config == good else "no")
    monkeypatch.setattr(parts, "candidates", lambda shape_class, arch: [bad, good])
    with ThreadPoolExecutor(1) as pool:
        tuned = tuner.tune(tiny, math.inf, 90, CPU, pool)
        assert tuner.tune(tiny, 0.0, 90, CPU, pool).cases == 0
    assert tuned.discarded == {tuner.source(bad): "no"}
    timed = {row["config"] for row in tuned.rows}
    assert timed == {tuner.source(c) for c in (tuner.present_entry(tiny, 90), good)}
    assert tuned.cases > 2 and {row["product"] for row in tuned.rows} >= {"up forward", "up forward, gathered"}
    assert tuner.best_of_each_product(tuned.rows)


def test_a_candidate_that_fails_is_recorded(tuner, monkeypatch):
    class Broken:
        name, flops = "it", 1

        def check(self, expected):
            raise RuntimeError("wrong")

    row = tuner.measure_config(Broken(), GemmConfig(64, 64, 32, 4, 2), torch.zeros(1), measure_ms=1)
    assert row["TFLOP/s"] is None and row["error"] == "RuntimeError: wrong"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_filter_knows_what_spills(parts):
    wide = parts.CLASSES[0]
    assert parts.problem(wide, parts.present_entry(wide, 90), 90) == ""
    assert "spills" in parts.problem(wide, GemmConfig(128, 256, 64, 4, 3), 90)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_tunes_on_a_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    result = run_script(SCRIPT, "--minutes", "2", "--classes", "row narrow", "--save", str(tmp_path))
    assert result.returncode == 0 and '"narrow": GemmConfig(' in result.stdout, result.stderr[-3000:]
    assert (tmp_path / "tune_grouped_gemm.json").exists()
