# SPDX-License-Identifier: Apache-2.0
"""Optimizers and CPU kernels of swapio (imported as `swapio.optim`)."""
