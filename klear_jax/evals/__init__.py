# SPDX-License-Identifier: Apache-2.0
"""Benchmarks and the figures they report."""
