# SPDX-License-Identifier: Apache-2.0
"""From a response to a `Verdict`. Host only: nothing here imports jax, so graders start fast."""
