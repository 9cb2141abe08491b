# SPDX-License-Identifier: Apache-2.0
"""A byte-level GPT, its data and the plain training loop that `swapio demo` runs twice."""
