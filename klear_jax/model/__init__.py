# SPDX-License-Identifier: Apache-2.0
"""The Qwen3 architecture as plain functions of a parameter pytree."""
