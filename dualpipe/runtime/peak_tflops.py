"""Peak TFLOP/s of GPUs by name, which MFU is a share of, here and in `dualpipe plan`."""

from __future__ import annotations

# 10^12 operations per second in dense bf16 products, of NVIDIA's data sheets (half of what they give "with sparsity").
# The first row whose words are all in the device's name counts.
PEAKS = {
    ("GB300",): 2500, ("GB200",): 2500, ("B300",): 2250, ("B200",): 2250,
    ("GH200",): 989, ("H200", "NVL"): 835, ("H200",): 989, ("H20",): 148,
    ("H100", "PCIe"): 756, ("H100", "NVL"): 835, ("H100",): 989, ("H800", "PCIe"): 756, ("H800",): 989,
    ("A100",): 312, ("A800",): 312, ("L40S",): 362, ("A10",): 125, ("L4",): 121,
}


def peak_tflops(model: str) -> float | None:
    """10^12 operations per second in dense bf16 products by a GPU of this name; None for an unknown one, or a part."""
    words = set(model.replace("-", " ").split())
    whole = "MIG" not in words
    return next((float(peak) for row, peak in PEAKS.items() if whole and words.issuperset(row)), None)
