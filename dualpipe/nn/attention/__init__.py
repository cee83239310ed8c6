"""Attention: rotary embedding, documents, masks, and attention itself, fused on CUDA.

Imports `nn` and `kernels`.
"""

from dualpipe.nn.attention.causal_attention import attend, attend_part, attention_reference
from dualpipe.nn.attention.context import Context
from dualpipe.nn.attention.documents import document_ids, document_numbers, packed_positions
from dualpipe.nn.attention.rope import Rotary, Yarn, apply_rope, yarn_mscale
from dualpipe.nn.attention.sequence_split import Ranges, SequenceSplit, cut, slice_sequence
from dualpipe.nn.attention.sinks import apply_sinks

__all__ = [
    "Context", "Ranges", "Rotary", "SequenceSplit", "Yarn", "apply_rope", "apply_sinks", "attend", "attend_part",
    "attention_reference", "cut", "document_ids", "document_numbers", "packed_positions", "slice_sequence",
    "yarn_mscale",
]
