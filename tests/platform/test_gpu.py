"""What the NVIDIA driver says of the first GPU, without torch."""

import ctypes

import pytest

from megatron_rl.platform import stack


class Driver:
    """Two GPUs of capability 10.3, through the C interface of libcuda."""

    def __init__(self, ready: bool) -> None:
        self.ready = ready

    def cuInit(self, flags):
        return 0 if self.ready else 100

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA B300"
        assert device == 0 and size == len(name)

    def cuDeviceGetAttribute(self, number, attribute, device):
        number._obj.value = {75: 10, 76: 3}[attribute]
        assert device == 0


def test_the_first_gpu_has_a_name_and_a_capability(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(ready=True))
    assert (stack.gpu_count(), stack.gpu()) == (2, stack.Gpu("NVIDIA B300", (10, 3)))


def missing(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize("library", [missing, lambda name: Driver(ready=False)])
def test_without_a_driver_or_a_device_there_is_no_gpu(monkeypatch, library):
    monkeypatch.setattr(ctypes, "CDLL", library)
    assert (stack.gpu_count(), stack.gpu()) == (0, None)
