"""Quantized tensors as FSDP2, checkpoints, optimizers and users handle them: bytes go along, nothing else is lost."""

import copy
import io

import pytest
import torch
from torch import nn

from dualpipe.quantized import FORMATS, QuantizedTensor, quantize_weights, strict
from dualpipe.quantized.tensor import rebuild

ROWS, COLUMNS = 300, 64  # partial blocks of 128 rows at the end


MATRIX, STACK = (ROWS, COLUMNS), (3, ROWS, COLUMNS)


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture(params=[MATRIX, STACK], ids=["matrix", "stack"])
def shape(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["frozen", "master"])
def tensor(format, request):
    """A matrix and a stack of each format, one of them with a master, in turn."""
    master = request.param
    is_stack = master == (list(FORMATS).index(format) % 2 == 0)
    return make(STACK if is_stack else MATRIX, format, master=master)


def make(shape, format, seed=0, **options):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return QuantizedTensor.quantize(values, format, keep_master=options.pop("master", False), **options)


def quantized(values, format):
    return QuantizedTensor.quantize(values, format).dequantize()


def assert_same(actual, expected, rows=...):
    """Same type, format, dtype, bytes and master as `expected[rows]`."""
    assert isinstance(actual, QuantizedTensor) and actual.format == expected.format and actual.dtype is expected.dtype
    assert torch.equal(actual.dequantize(), expected.dequantize()[rows])
    assert (actual.master is None) == (expected.master is None)
    if actual.master is not None:
        assert torch.equal(actual.master, expected.master[rows])


def shares_memory(x, y):
    return x.block_rows.untyped_storage().data_ptr() == y.block_rows.untyped_storage().data_ptr()


# --- what moves and cuts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["detach", "alias", "view", "flat", "as_strided", "slice"])
def test_views_share_memory(tensor, name):
    made = {
        "detach": lambda: tensor.detach(), "alias": lambda: torch.ops.aten.alias(tensor),
        "view": lambda: tensor.view(tensor.shape), "flat": lambda: tensor.view(-1).view(tensor.shape),
        "as_strided": lambda: tensor.view(-1).as_strided(tensor.shape, tensor.stride()), "slice": lambda: tensor[:],
    }[name]()
    assert_same(made, tensor)
    assert shares_memory(made, tensor)
    assert made.shape == tensor.shape and made.stride() == tensor.stride()
    made.copy_(torch.zeros(tensor.shape))
    assert not tensor.dequantize().any() and (tensor.master is None or not tensor.master.any())


@pytest.mark.parametrize("name", ["clone", "contiguous", "cpu", "to", "deepcopy", "pickle"])
def test_copies_have_bytes_of_their_own(tensor, name):
    def pickled(x):
        buffer = io.BytesIO()
        torch.save(nn.Parameter(x, requires_grad=False), buffer)
        buffer.seek(0)
        return torch.load(buffer).detach()  # with weights_only, its default

    made = {"clone": torch.clone, "contiguous": lambda x: x.contiguous().clone(), "cpu": lambda x: x.cpu().clone(),
            "to": lambda x: x.to("cpu", copy=True), "deepcopy": copy.deepcopy, "pickle": pickled}[name](tensor)
    assert_same(made, tensor)
    assert torch.equal(made.block_rows, tensor.block_rows)
    kept = tensor.dequantize()
    made.copy_(torch.ones(tensor.shape))
    assert torch.equal(tensor.dequantize(), kept)


def test_cuts_are_those_of_the_numbers(tensor):
    rows = tensor.dim() - 2
    whole = 0, 0, tensor.shape[0]
    for dim, start, stop in [(rows, 0, 128), (rows, 128, 256), (rows, 128, ROWS), (rows, 256, 256), whole]:
        cut = (slice(None),) * dim + (slice(start, stop),)
        assert_same(tensor.narrow(dim, start, stop - start), tensor, cut)
        assert_same(tensor[cut], tensor, cut)
    parts = [*tensor.split(128, rows), *tensor.split([256, 44], rows)]
    bounds = [(0, 128), (128, 256), (256, 300), (0, 256), (256, 300)]
    if tensor.format.block[0] == 1:
        parts += tensor.chunk(3, rows)
        bounds += [(0, 100), (100, 200), (200, 300)]
    for part, (start, stop) in zip(parts, bounds, strict=True):
        assert_same(part, tensor, (slice(None),) * rows + (slice(start, stop),))
    if rows:
        assert_same(tensor[1], tensor, 1)
        for index, matrix in enumerate(tensor.unbind()):
            assert_same(matrix, tensor, index)


def test_chunks_that_cut_through_blocks_are_refused(shape):
    with pytest.raises(ValueError, match="cut rows at multiples of 128"):
        make(shape, "fp8_block").chunk(2, len(shape) - 2)
    with pytest.raises(ValueError, match="would cut through blocks"):
        make(shape, "mxfp8")[..., :32]
    with pytest.raises(ValueError, match="every 2th row"):
        make(shape, "mxfp8")[::2]
    with pytest.raises(ValueError, match="cannot be viewed"):
        make(shape, "mxfp8").view(-1, 32)
    with pytest.raises(ValueError, match="is not a contiguous view"):
        make(shape, "mxfp8").as_strided((4, 4), (1, 4))
    stack = make((3, 256, COLUMNS), "mxfp8")
    for parts in (lambda: stack.split([1, 1]), lambda: stack.split([2, 2]), lambda: stack.split([-1, 4]),
                  lambda: stack.split(0), lambda: stack.select(0, 3), lambda: stack.select(0, -4)):
        with pytest.raises((RuntimeError, IndexError), match=r"split_with_sizes expects|split_size|is out of range"):
            parts()
    # The end of the last block may be padding, which FSDP2 cuts off.
    padded = make((384, COLUMNS), "fp8_block")
    assert_same(padded[:381], padded, slice(381))


def test_parts_make_the_whole_again(tensor):
    rows = tensor.dim() - 2
    assert_same(torch.cat(tensor.split(128, rows), rows), tensor)
    assert torch.equal(torch.cat(tensor.split(128, rows), rows).block_rows, tensor.block_rows)
    if rows:
        assert_same(torch.cat(tensor.split(1)), tensor)
    ones = torch.ones(tensor.shape)
    for parts, start in (([tensor, ones], 0), ([ones, tensor], ROWS)):
        plain = torch.cat(parts, rows)
        assert type(plain) is torch.Tensor and torch.equal(plain.narrow(rows, start, ROWS), tensor.dequantize())
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):  # rows of 60 and of 62 take 64 bytes each
        torch.cat([make((4, 60), "mxfp8"), make((4, 62), "mxfp8")])


def test_vectors_of_parameters_keep_masters(tensor):
    module = nn.Module()
    module.weight, module.bias = nn.Parameter(tensor, requires_grad=False), nn.Parameter(torch.ones(3))
    kept = tensor.clone()
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(vector, module.parameters())
    assert_same(module.weight.detach(), kept)
    with strict(), pytest.raises(ValueError, match="would dequantize"):
        nn.utils.parameters_to_vector(module.parameters())


def test_stacks_of_whole_blocks_are_viewed_as_matrices(format):
    stack = make((2, 256, COLUMNS), format, master=True)
    for size in [(512, COLUMNS), (1, 512, COLUMNS), (4, 128, COLUMNS)]:
        view = stack.view(size)
        assert shares_memory(view, stack) and view.shape == size
        assert torch.equal(view.dequantize(), stack.dequantize().view(size))
        assert_same(view.view(stack.shape), stack)


# --- new ones --------------------------------------------------------------------------------------------------------


def test_new_ones(tensor):
    for made in (torch.empty_like(tensor), torch.zeros_like(tensor), tensor.new_empty(tensor.shape),
                 tensor.new_zeros(tensor.shape), tensor.new_empty(tensor.shape, device="cpu"),
                 tensor.new_zeros((7, 32)), tensor.new_zeros(tensor.numel()),
                 torch.full_like(tensor, 1.0), tensor.new_full(tensor.shape, 1.0)):
        assert isinstance(made, QuantizedTensor) and made.format is tensor.format
        assert not shares_memory(made, tensor)
        assert (made.dequantize() == made.dequantize().flatten()[0]).all()
    assert torch.equal(torch.full_like(tensor, 1.0).dequantize(), quantized(torch.ones(tensor.shape), tensor.format))
    for made in (torch.empty_like(tensor, dtype=torch.float64), torch.zeros_like(tensor, dtype=torch.float64),
                 tensor.new_empty(tensor.shape, dtype=torch.float64), torch.full_like(tensor, 1, dtype=torch.float64),
                 tensor.new_zeros(tensor.shape, dtype=torch.float64)):
        assert type(made) is torch.Tensor and made.dtype is torch.float64 and made.shape == tensor.shape
    odd = tensor.new_zeros((3, 5))  # which four bits cannot have
    assert isinstance(odd, QuantizedTensor) == (tensor.format.bits == 8) and odd.shape == (3, 5)
    one = tensor.new_empty(torch.Size([]))
    assert one.numel() == 1 and one.dtype is tensor.dtype


def test_another_dtype_is_plain(tensor):
    assert type(tensor.to(torch.float64)) is torch.Tensor
    assert torch.equal(tensor.bfloat16(), tensor.dequantize().bfloat16())


# --- what is written -------------------------------------------------------------------------------------------------


def test_copy_of_plain_numbers_quantizes_into_the_bytes_that_are_there(tensor, format):
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    address = tensor.block_rows.data_ptr()
    tensor.copy_(values)
    assert tensor.block_rows.data_ptr() == address
    assert torch.equal(tensor.block_rows, QuantizedTensor.quantize(values, format).block_rows)
    assert tensor.master is None or torch.equal(tensor.master, values)
    with pytest.raises(ValueError, match=r"x is torch\.int64, expected a floating-point dtype"):
        tensor.copy_(torch.ones(tensor.shape, dtype=torch.int64))
    assert tensor.master is None or torch.equal(tensor.master, values)


def test_copy_between_quantized_ones(tensor, format):
    source = make(tensor.shape, format, seed=1, master=tensor.master is not None)
    tensor.copy_(source)
    assert torch.equal(tensor.block_rows, source.block_rows)
    assert_same(tensor, source)
    other = make(tensor.shape, "mxfp8" if format != "mxfp8" else "nvfp4", seed=2)
    tensor.copy_(other)
    assert torch.equal(tensor.block_rows, QuantizedTensor.quantize(other.dequantize(), format).block_rows)
    plain = torch.empty(tensor.shape, dtype=torch.float64)
    plain.copy_(other)
    assert torch.equal(plain, other.dequantize().double())


def test_bytes_without_a_master_leave_the_one_that_fits_them(shape, format):
    """A master that an optimizer's state has brought is not replaced by what the same bytes dequantize to."""
    trained = make(shape, format, master=True)
    master = trained.master.clone()
    trained.copy_(make(shape, format))
    assert torch.equal(trained.master, master)
    other = make(shape, format, seed=1)
    trained.copy_(other)
    assert torch.equal(trained.master, other.dequantize())


def test_fillers(tensor):
    for fill, value in [(lambda: tensor.fill_(2.0), 2.0), (lambda: tensor.zero_(), 0.0)]:
        fill()
        assert torch.equal(tensor.dequantize(), quantized(torch.full(tensor.shape, value), tensor.format))
    tensor.normal_()
    assert tensor.master is None or 0.9 < tensor.master.std() < 1.1
    assert 0.9 < tensor.dequantize().std() < 1.1


def test_computing_in_place_is_refused(tensor):
    """By itself, in a list or as `out`: an update of what was dequantized would be lost without a word."""
    plain = torch.ones(tensor.shape)
    for change in (lambda: tensor.add_(1), lambda: tensor.mul_(2), lambda: tensor.clamp_(0),
                   lambda: torch._foreach_add_([tensor], 1), lambda: torch.add(plain, 1, out=tensor)):
        with pytest.raises(ValueError, match="would change a quantized tensor in place"):
            change()


@pytest.mark.parametrize("way", ["fused", "foreach"])
def test_optimizers_that_would_update_it_in_place_are_refused(tensor, way):
    weight = nn.Parameter(tensor)
    weight.grad = torch.ones(tensor.shape)
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        with pytest.raises(ValueError, match="would change a quantized tensor in place"):
            optimizer([weight], lr=0.1, **{way: True}).step()


def test_whatever_computes_sees_the_numbers(tensor):
    plain = tensor.dequantize()
    x = torch.randn(4, COLUMNS)
    assert torch.equal(x @ tensor.mT, x @ plain.mT)
    assert torch.equal(tensor + 1, plain + 1) and torch.equal(tensor.amax(), plain.amax())
    assert torch.equal(tensor, plain) and not torch.equal(tensor, plain + 1)
    with strict(), pytest.raises(ValueError, match="would dequantize a quantized tensor"):
        tensor + 1
    with strict():  # moves bytes
        tensor.clone(), tensor.detach(), tensor[:128]


# --- what it says of itself ------------------------------------------------------------------------------------------


def test_storage_is_that_of_the_bytes(tensor):
    other, view = make(tensor.shape, tensor.format), tensor.detach()
    assert tensor.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    assert tensor.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    assert tensor.untyped_storage().nbytes() == tensor.nbytes == tensor.block_rows.nbytes
    assert tensor._typed_storage().dtype is torch.uint8 and tensor._typed_storage()._size() == tensor.nbytes
    part = tensor.narrow(tensor.dim() - 2, 0, 128)
    assert part.nbytes < part.untyped_storage().nbytes() == tensor.nbytes
    assert tensor.data_ptr() == 0 and not tensor.is_pinned()
    with pytest.raises(ValueError, match="dequantize"):
        torch.from_dlpack(tensor)
    with pytest.raises(RuntimeError):
        tensor.numpy()


def test_safetensors_takes_no_two_for_one_and_writes_no_nonsense(tmp_path):
    from safetensors.torch import _find_shared_tensors, save_file

    model = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Linear(COLUMNS, ROWS))
    quantize_weights(model, "mxfp8")
    assert all(len(names) == 1 for names in _find_shared_tensors(model.state_dict()))
    with pytest.raises(ValueError, match="dequantize"):
        _find_shared_tensors(model.state_dict() | {"again": model[0].weight.detach()})
    with pytest.raises(Exception, match="invalid"):
        save_file(model.state_dict(), tmp_path / "model.safetensors")


def test_pickles_have_the_own_bytes_alone(tensor):
    """One that is part of a storage, as of a padded shard, has the file that one with a storage of its own has."""

    def pickled(x):
        torch.save(x, buffer := io.BytesIO())
        return buffer.getvalue()

    part = tensor.narrow(tensor.dim() - 2, 0, 128)
    assert pickled(part) == pickled(part.clone()) == pickled(part.detach())
    assert len(pickled(part)) < part.nbytes + 4000
    loaded = torch.load(io.BytesIO(pickled(tensor)))
    assert loaded.master is None and torch.equal(loaded.block_rows, tensor.block_rows)
    assert len(pickled(nn.Parameter(tensor, requires_grad=False))) > tensor.nbytes + 4 * tensor.numel() * (
        tensor.master is not None)


def test_pickles_of_other_blocks_are_refused():
    function, (rows, master, name, _, *rest) = make((ROWS, COLUMNS), "fp8_block").__reduce_ex__(2)
    assert function is rebuild
    with pytest.raises(ValueError, match=r"in blocks of \(64, 64\), but this version has blocks of \(128, 128\)"):
        rebuild(rows, master, name, (64, 64), *rest)


@pytest.mark.parametrize("name", ["bfloat16", "double", "share_memory", "to_empty"])
def test_modules_convert(tensor, name):
    """Its bytes and master stay; torch would put a plain tensor under its skin, with a storage of its own."""
    module, frozen = nn.Linear(COLUMNS, ROWS), tensor.master is None
    module.weight = nn.Parameter(tensor, requires_grad=not frozen)
    kept = tensor.clone()
    getattr(module, name)(**({"device": "cpu"} if name == "to_empty" else {}))
    weight = module.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, QuantizedTensor)
    assert weight.requires_grad is not frozen and weight.data_ptr() == 0
    if name in ("bfloat16", "double"):
        assert weight.dtype is getattr(torch, name)
    if name != "to_empty":
        assert torch.equal(weight.block_rows, kept.block_rows)
        assert frozen or torch.equal(weight.master, kept.master)
    assert weight.is_shared() == (name == "share_memory") == weight.block_rows.is_shared()


def test_data_may_be_assigned(tensor, format):
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensor.data = values
    assert tensor.dtype is torch.float64 and tensor.data_ptr() == 0
    assert torch.equal(tensor.block_rows, QuantizedTensor.quantize(values, format).block_rows)
    assert tensor.master is None or torch.equal(tensor.master, values.float())
    other = make(tensor.shape, "mxfp4", seed=2)
    tensor.data = other
    assert tensor.format.name == "mxfp4" and shares_memory(tensor, other) and tensor.dtype is torch.float32


def test_swap(tensor):
    other = make((256, 32), "mxfp4", seed=2)
    first, second = tensor.clone(), other.clone()
    torch.utils.swap_tensors(tensor, other)
    assert_same(tensor, second)
    assert_same(other, first)


def test_state_dicts_go_into_other_forms(shape, format):
    """Bytes into the same format, numbers into another or none, plain numbers as if quantized at once."""
    module = nn.Module()
    module.weight = nn.Parameter(make(shape, format), requires_grad=False)
    saved = module.state_dict()
    for target in (format, "mxfp8", None):
        other = nn.Module()
        other.weight = nn.Parameter(torch.zeros(shape) if target is None else make(shape, target, seed=3))
        other.load_state_dict(saved)
        if target is None:
            assert torch.equal(other.weight, saved["weight"].dequantize())
        else:
            expected = QuantizedTensor.quantize(saved["weight"].dequantize(), target)
            assert torch.equal(other.weight.block_rows, expected.block_rows)
    plain = torch.randn(shape).bfloat16()
    module.load_state_dict({"weight": plain})
    assert torch.equal(module.weight.block_rows, QuantizedTensor.quantize(plain, format).block_rows)
    module.load_state_dict({"weight": make(shape, "mxfp4")}, assign=True)
    assert module.weight.format.name == "mxfp4" and isinstance(module.weight, nn.Parameter)
