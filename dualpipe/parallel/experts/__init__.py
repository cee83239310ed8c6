"""Expert parallelism: experts sharded over ranks, with dispatch and combine of their tokens."""
