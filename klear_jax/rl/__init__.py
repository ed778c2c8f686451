# SPDX-License-Identifier: Apache-2.0
"""GPPO: surrogates, advantages, the policy loss, rollouts and the loop."""
