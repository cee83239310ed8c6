"""Peak TFLOP/s of GPUs by name: the denominator of MFU in training and in `dualpipe plan`."""

from __future__ import annotations

# 10^12 operations per second of dense bf16 GEMMs, by NVIDIA's data sheets (half of their values "with sparsity").
# The first entry whose words are all in the device's name counts.
PEAKS = {
    ("GB300",): 2500, ("GB200",): 2500, ("B300",): 2250, ("B200",): 2250,
    ("GH200",): 989, ("H200", "NVL"): 835, ("H200",): 989, ("H20",): 148,
    ("H100", "PCIe"): 756, ("H100", "NVL"): 835, ("H100",): 989, ("H800", "PCIe"): 756, ("H800",): 989,
    ("A100",): 312, ("A800",): 312, ("L40S",): 362, ("A10",): 125, ("L4",): 121,
}


def peak_tflops(model: str) -> float | None:
    """Return 10^12 operations per second of dense bf16 GEMMs on a GPU; None for an unknown one and for a MIG slice.

    model: the device's name, such as "NVIDIA H100 80GB HBM3".
    """
    model_words = set(model.replace("-", " ").split())
    if "MIG" in model_words:
        return None
    for peak_words, peak in PEAKS.items():
        if model_words.issuperset(peak_words):
            return float(peak)
    return None
