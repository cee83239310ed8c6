"""The kernel of causal attention: the fastest that runs, used until the end of the `with`."""

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend

from dualpipe.nn import pick_fastest
from dualpipe.nn.attention import (
    AttentionChoice,
    Context,
    HeadSize,
    Rotary,
    attend,
    attention_reference,
    choose_attention_kernel,
    head_size,
    kernel_choice,
    use_attention_kernel,
)
from dualpipe.runtime.device import deterministic
from dualpipe.runtime.ranks.rank_sync import RankSync

CUDA = torch.device("cuda", 0)
SIZES = [HeadSize(128, 128)]


ALONE = RankSync(None)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend a GPU on which kernels take the given milliseconds, but those that `refuses` raises for."""

    def pretend(milliseconds, *, refuses=None):
        def run_heads(size, device, dtype):
            if refuses is not None:
                refuses(size)

        def seconds(run, device, *, num_calls):
            run()
            return milliseconds[run.args[0]] / 1000

        monkeypatch.setattr(kernel_choice, "_run_heads", run_heads)
        monkeypatch.setattr(pick_fastest, "min_seconds", seconds)

    return pretend


class Handle:
    """A release of FlashAttention in torch's registry."""

    def __init__(self, log):
        self.log = log
        log.append("activated")

    def remove(self):
        self.log.append("removed")


@pytest.fixture
def flash_3(monkeypatch):
    """Register a FlashAttention 3 that activates; the log of its activations."""
    log = []
    monkeypatch.setitem(torch_attention._registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: Handle(log))
    return log


def test_without_a_gpu_it_is_torchs_order():
    choice = choose_attention_kernel("auto", torch.device("cpu"), SIZES, ALONE)
    assert choice.kernel == "default" and "the model is on cpu" in choice.reason
    with pytest.raises(ValueError, match=r"'cudnn'.* cpu"):
        choose_attention_kernel("cudnn", torch.device("cpu"), SIZES, ALONE)
    with pytest.raises(ValueError, match="'fa9'"):
        choose_attention_kernel("fa9", torch.device("cpu"), SIZES, ALONE)


TIMES = {"fa3": 1.0, "flash": 3.0, "cudnn": 2.0, "efficient": 4.0}


def test_the_fastest_kernel_that_is_installed(gpu):
    gpu(TIMES)
    choice = choose_attention_kernel("auto", CUDA, SIZES, ALONE)
    assert choice.kernel == "cudnn"
    for words in ("3 ms by 'flash'", "2 ms by 'cudnn'", "'fa3', ModuleNotFoundError", "'fa4', ModuleNotFoundError"):
        assert words in str(choice)
    assert choose_attention_kernel("auto", CUDA, SIZES, ALONE, dtype=torch.float32).kernel == "default"
    assert choose_attention_kernel("auto", CUDA, [], ALONE).kernel == "default"


def test_deterministic_algorithms_pass_over_cudnn(gpu):
    gpu(TIMES)
    with deterministic():
        choice = choose_attention_kernel("auto", CUDA, SIZES, ALONE)
        with pytest.raises(ValueError, match=r"'cudnn'.*deterministic"):
            choose_attention_kernel("cudnn", CUDA, SIZES, ALONE)
        with use_attention_kernel(choice):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert choice.kernel == "flash"
    assert "'cudnn', ValueError: deterministic" in str(choice)


def test_a_kernel_that_refuses_the_heads_is_passed_over(gpu, flash_3):
    def refuses(size):
        if torch_attention.current_flash_attention_impl() == "FA3" and size.qk_dim > 128:
            raise RuntimeError("head dimension is too large\nand more")

    gpu(TIMES, refuses=refuses)
    assert choose_attention_kernel("auto", CUDA, SIZES, ALONE).kernel == "fa3"
    choice = choose_attention_kernel("auto", CUDA, [*SIZES, HeadSize(192, 128)], ALONE)
    assert choice.kernel == "cudnn" and "'fa3', RuntimeError: head dimension is too large;" in str(choice)
    assert torch_attention.current_flash_attention_impl() is None


def test_nothing_runs(gpu):
    def refuses(size):
        raise RuntimeError("no")

    gpu(TIMES, refuses=refuses)
    choice = choose_attention_kernel("auto", CUDA, SIZES, ALONE)
    assert choice.kernel == "default"
    assert "'flash', RuntimeError: no" in choice.reason


def test_it_is_used_until_the_end_of_the_with(flash_3):
    order = torch._C._get_sdp_priority_order()
    with use_attention_kernel(AttentionChoice("cudnn", "")):
        assert torch._C._get_sdp_priority_order()[0] == int(SDPBackend.CUDNN_ATTENTION)
        assert torch.backends.cuda.math_sdp_enabled()
    with pytest.raises(KeyError), use_attention_kernel(AttentionChoice("fa3", "")):
        assert torch_attention.current_flash_attention_impl() == "FA3"
        assert torch._C._get_sdp_priority_order()[0] == int(SDPBackend.FLASH_ATTENTION)
        raise KeyError
    assert flash_3 == ["activated", "removed"]
    assert torch._C._get_sdp_priority_order() == order
    assert torch_attention.current_flash_attention_impl() is None
    with use_attention_kernel(AttentionChoice("default", "")):
        assert torch._C._get_sdp_priority_order() == order


def test_another_release_that_was_active_is_active_again(flash_3, monkeypatch):
    others = []
    monkeypatch.setitem(torch_attention._registry._FLASH_ATTENTION_IMPLS, "FA4", lambda: Handle(others))
    torch_attention.activate_flash_attention_impl("FA4")
    try:
        with use_attention_kernel(AttentionChoice("fa3", "")):
            assert torch_attention.current_flash_attention_impl() == "FA3"
        assert torch_attention.current_flash_attention_impl() == "FA4"
    finally:
        torch_attention.restore_flash_attention_impl()
    assert others == ["activated", "removed", "activated", "removed"]


def test_sizes_of_heads():
    module = torch.nn.Module()
    assert head_size(module) is None
    module.head_dim = 64
    assert head_size(module) == HeadSize(64, 64)
    module.qk_head_dim, module.v_head_dim = 192, 128
    assert head_size(module) == HeadSize(192, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["auto", "flash", "cudnn", "efficient"])
def test_the_chosen_kernel_is_right(kernel):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    cuda = torch.device("cuda")
    operands = [torch.randn(2, heads, 256, 128, device=cuda, dtype=torch.bfloat16) for heads in (8, 8, 8)]
    context = Context(Rotary(128, 1e4), torch.empty(2, 256, 1, device=cuda))
    expected = attention_reference(*[tensor.double() for tensor in operands], context, scale=128**-0.5)
    with use_attention_kernel(choose_attention_kernel(kernel, cuda, SIZES, ALONE)):
        y = attend(*operands, context, scale=128**-0.5)
    # Two roundings to bfloat16, whose eps is 2**-7, of values up to about 4.
    assert (y - expected).abs().max() < 4 * 2**-7
