"""Tokenizers of texts and conversations, and the encoding of many documents in batches."""
