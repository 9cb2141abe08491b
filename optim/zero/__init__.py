# SPDX-License-Identifier: Apache-2.0
"""ZeRO over torch.distributed: state, gradients and parameters sharded over ranks."""
