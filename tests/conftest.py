"""What all tests share. One thread per process: tests run side by side, and more threads than cores wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from harness import FLAT
from hypothesis import HealthCheck, settings

from specdec import kernels
from specdec.config import DEFAULT_MODEL, Precision
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.runner.cost import Costs

# How long an example takes, or takes to be made, tells of the machine alone.
settings.register_profile("any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def default_model():
    """The default model by precision, loaded once per process. Fetched into the cache folder where it is not there yet."""
    loaded = {}

    def load(precision: Precision):
        if precision not in loaded:
            loaded.clear()  # one at a time: they are large
            loaded[precision] = load_model(
                resolve(DEFAULT_MODEL), precision, kernels.select(torch.device("cpu")), torch.device("cpu")
            )
        return loaded[precision]

    return load


@pytest.fixture(autouse=True, scope="session")
def flat_costs():
    """No engine of a test measures its passes: by these costs every draft pays, whatever the machine is doing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.engine.pass_costs", lambda model, kernels, max_rows: Costs(FLAT, fixed=True))
        yield
