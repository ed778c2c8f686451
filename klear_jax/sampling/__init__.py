# SPDX-License-Identifier: Apache-2.0
"""Rollouts: `engine` has the three verbs on the device, `sampler` the host loop around them."""
