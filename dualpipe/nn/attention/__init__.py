"""Attention: rotary embedding, documents, masks, and attention itself, fused on CUDA."""

from dualpipe.nn.attention.causal_attention import attend, attend_part, attention_reference
from dualpipe.nn.attention.context import Context, document_ids, packed_positions
from dualpipe.nn.attention.kernel_choice import (
    ATTENTION_KERNELS,
    AttentionChoice,
    HeadSize,
    choose_attention_kernel,
    head_size,
    use_attention_kernel,
)
from dualpipe.nn.attention.rope import Rotary, Yarn, apply_rope, yarn_mscale
from dualpipe.nn.attention.sequence_split import Ranges, SequenceSplit, slice_sequence
from dualpipe.nn.attention.sinks import apply_sinks

__all__ = [
    "ATTENTION_KERNELS", "AttentionChoice", "Context", "HeadSize", "Ranges", "Rotary", "SequenceSplit", "Yarn",
    "apply_rope", "apply_sinks", "attend", "attend_part", "attention_reference", "choose_attention_kernel",
    "document_ids", "head_size", "packed_positions", "slice_sequence", "use_attention_kernel",
    "yarn_mscale",
]
