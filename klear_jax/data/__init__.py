# SPDX-License-Identifier: Apache-2.0
"""Problems, tokens and packed rows, made on the host. Only `pipeline` may import jax."""
