"""The assignment of writers, as a pure function: for a checkpoint of a run, and for one in Hugging Face's form."""

import pytest
import torch

from dualpipe.checkpoint.assign import assign_writers
from dualpipe.checkpoint.tensors import Box

BF16, F32 = torch.bfloat16, torch.float32


def box(start, stop):
    return Box((start, 0), (stop - start, 4))


def rank(start, stop, dtype=F32, stages=0, sample=b""):
    return stages, {"embed_tokens.weight": ((dtype, (8, 4), box(start, stop)), sample)}


def test_one_of_the_ranks_that_hold_the_same_writes_it():
    names, stored = assign_writers([rank(0, 4), rank(4, 8), rank(0, 4), rank(4, 8)])
    assert names == [["embed_tokens.weight"], ["embed_tokens.weight"], [], []]
    assert stored["embed_tokens.weight"] == (F32, (8, 4), {box(0, 4): 0, box(4, 8): 1})


def test_of_several_that_hold_the_same_the_one_with_least_writes_it():
    both = {"a": ((F32, (8, 4), box(0, 8)), b""), "b": ((F32, (8, 4), box(0, 8)), b"")}
    assert assign_writers([(0, both), (0, both)])[0] == [["a"], ["b"]]


def test_a_part_without_elements_is_nobodys():
    assert assign_writers([rank(8, 8), rank(0, 8)])[0] == [[], ["embed_tokens.weight"]]


def test_parts_that_do_not_make_up_a_tensor():
    with pytest.raises(ValueError, match=r"embed_tokens.weight is incomplete: its parts have 16 of 32 elements"):
        assign_writers([rank(0, 4), rank(0, 4)])
    with pytest.raises(ValueError, match="have 40 of 32"):
        assign_writers([rank(0, 5), rank(3, 8)])
    with pytest.raises(ValueError, match="some of its parts overlap"):
        assign_writers([rank(0, 5), rank(4, 7)])


def test_ranks_that_have_other_tensors_by_a_name():
    with pytest.raises(ValueError, match=r"weight is bf16 \(8, 4\) on rank 1, but fp32 \(8, 4\) on an earlier"):
        assign_writers([rank(0, 4), rank(4, 8, dtype=BF16)])
    with pytest.raises(ValueError, match=r"embed_tokens.weight has other values on rank 1"):
        assign_writers([rank(0, 8, stages=0, sample=b"a"), rank(0, 8, stages=1, sample=b"b")])
    # Replicas that have not met yet.
    assign_writers([rank(0, 8, stages=0, sample=b"a"), rank(0, 8, stages=0, sample=b"b")])
