# SPDX-License-Identifier: Apache-2.0
"""What every device package shares: the mesh, the batch records and the numerics."""
