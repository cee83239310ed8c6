"""Optimizers over sharded parameters, by the table [optimizer].

`optimizer` runs AdamW, `muon` or a custom class over the parameters that `groups` assigns to them, with moments on the
device or, by `offload`, on the host. `lr_schedule` has the learning rate of each step.
"""
