"""Peak TFLOP/s by the names of devices."""

import pytest

from dualpipe.runtime.peak_tflops import peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H200 MIG 1g.18gb", None), ("NVIDIA GH200 480GB", 989), ("NVIDIA H20", 148),
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500), ("NVIDIA B200", 2250), ("NVIDIA A10", 125), ("NVIDIA GeForce RTX 3060", None),
        ("", None),
    ],
)
def test_peaks_of_devices(name, peak):
    assert peak_tflops(name) == peak
