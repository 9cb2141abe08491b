# SPDX-License-Identifier: Apache-2.0
"""Adapters to other libraries, one module each, so that nobody imports a library that is not used.

    swapio.integrations.accelerate   accelerate's `prepare` leaves state where it is
    swapio.integrations.dcp          torch.distributed.checkpoint: loads that stream into the slots
    swapio.integrations.deepspeed    DeepSpeed's async_io, pin_memory and cpu_adam, on swapio

transformers' Trainer, Lightning, FSDP2 and torch's own tools need no adapter: swapio's optimizers
are torch optimizers. `examples/` has one script for each, and the tests run them.
"""
