# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps, training state, checkpoints and metrics: the same for SFT and GPPO."""
