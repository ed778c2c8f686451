# SPDX-License-Identifier: Apache-2.0
"""Weights that make the layers matter, and a watch over page pools."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.model import params as params_lib
from klear_jax.model.config import QWEN3
from klear_jax.sampling import sampler as sampler_lib
from klear_jax.sampling.pages import PagePool


@pytest.fixture(scope="session")
def host_params():
    """Weights so large that the layers, and not only the last token, decide what comes next."""
    rng = np.random.default_rng(0)
    params = params_lib.init(QWEN3["tiny"], 0)

    def spread(x):
        large = 6 if x.ndim > 2 else 1
        return np.asarray(large * x * rng.uniform(0.6, 1.6, x.shape[-1:]), np.float32)

    return jax.tree.map(spread, params)


@pytest.fixture(scope="session")
def params(host_params):
    return jax.tree.map(jnp.asarray, host_params)


class WatchedPool(PagePool):
    """On one device: no page is ever lost or owned twice."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.most_slots = 0

    def page_map(self):
        used = [page for row in self.rows for page in row]
        assert len(used) == len(set(used))
        assert sorted(used + self._free[0]) == list(range(self.pages))
        self.most_slots = max(self.most_slots, sum(map(bool, self.rows)))
        return super().page_map()

    @property
    def whole(self):
        """Whether every page is free again."""
        return not any(self.rows) and sorted(self._free[0]) == list(range(self.pages))


@pytest.fixture
def pools(monkeypatch):
    """Every page pool that a sampler makes."""
    made = []

    def make(*args, **kwargs):
        made.append(WatchedPool(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(sampler_lib, "PagePool", make)
    return made
