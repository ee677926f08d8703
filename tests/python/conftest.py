# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
import numpy as np
import pytest

import sievemla


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    return sievemla.Backend(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(20261202)
