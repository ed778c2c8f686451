# SPDX-License-Identifier: Apache-2.0
"""Klear-Reasoner in JAX: SFT and GPPO of the Qwen3 architecture. Start at `rl/loop.py`."""
