"""Which kernels a device gets: Triton's on CUDA, else torch's and a warning that says what is lost."""

from __future__ import annotations

import logging

import pytest
import torch

from specdec import kernels
from specdec.kernels.portable import PortableKernels
from specdec.quant.linear import DenseLinear, DeviceLinear
from specdec.quant.make import make_linear


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_KERNELS", raising=False)


def test_without_triton_a_warning_names_what_is_lost(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda _name: None)
    with caplog.at_level(logging.WARNING):
        assert type(kernels.select("cuda")) is PortableKernels
    assert "Triton is not installed (pip install 'specdec[gpu]')" in caplog.text
    assert "speculation may change tokens" in caplog.text
    assert "Triton is not installed" in kernels.describe("cuda")


def test_a_device_without_kernels_is_named(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert type(kernels.select("mps")) is PortableKernels
    assert "there are no kernels for mps devices" in caplog.text


def test_a_cuda_device_gets_tritons_kernels() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    chosen = kernels.select("cuda")
    assert (chosen.name, chosen.capturable) == ("triton", True)
    assert kernels.describe("cuda").startswith("triton (sampler: ")


def test_asking_for_torch_or_native_holds_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_KERNELS", "torch")
    assert type(kernels.select("cuda")) is PortableKernels
    monkeypatch.setenv("SPECDEC_KERNELS", "native")
    with pytest.raises(kernels.KernelError, match="run on the CPU, not on cuda"):
        kernels.select("cuda")


def test_only_kernels_of_ours_get_packed_weights_on_a_device() -> None:
    """The portable kernels would unpack the weight in each call there, so torch's own product serves instead."""

    class Ours(PortableKernels.__base__):  # type: ignore[misc, name-defined]
        def block_linear(self, x, weight): ...

        def dense_linear(self, x, weight): ...

    weight, meta = [torch.randn(16, 32)], torch.device("meta")
    assert type(make_linear(weight, "bf16", Ours(), meta, None)) is DenseLinear
    assert type(make_linear(weight, "bf16", PortableKernels(), meta, None)) is DeviceLinear
