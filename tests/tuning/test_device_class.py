"""Device classes: one name for one class, and the same class from a GPU and from its alias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attngen.backend.device import GpuTraits
from attngen.diagnostics.diagnostic import AttnError
from attngen.targets import all_targets
from attngen.targets.errors import NoTargetForGpu, UnknownDevice
from attngen.tuning.device_class import DeviceClass, known_devices
from tests.toolchain.fake_cuda import FakeDriver

H200 = FakeDriver().traits(0)


def traits(**changes: Any) -> GpuTraits:
    return replace(H200, **changes)


def test_a_gpu_has_the_class_of_its_alias() -> None:
    found = DeviceClass.from_traits(traits(capability=(9, 0)))
    assert found == DeviceClass.named("h200")
    assert found.name == "sm_90a-132sm-227k-l2.60m-hbm4.8"
    assert found.aliases == ("h200",)


@pytest.mark.parametrize(
    "difference",
    [
        {"multiprocessors": 114},
        {"shared_bytes": 99 * 1024},
        {"l2_bytes": 50 << 20},
        {"memory_khz": 2_619_000},
        {"memory_bits": 5120},
        {"name": "NVIDIA H200 MIG 3g.71gb"},
    ],
)
def test_what_is_part_of_a_class(difference: dict[str, Any]) -> None:
    usual = traits(capability=(9, 0))
    assert DeviceClass.from_traits(usual) != DeviceClass.from_traits(replace(usual, **difference))


def test_names_do_not_tell_classes_apart() -> None:
    usual = traits(capability=(9, 0))
    assert DeviceClass.from_traits(usual) == DeviceClass.from_traits(replace(usual, name="H200 D"))


def test_a_part_of_a_gpu_has_a_class_of_its_own() -> None:
    name = "NVIDIA H200 MIG 1g.18gb+me"
    part = DeviceClass.from_traits(traits(capability=(9, 0), name=name, multiprocessors=16))
    assert part.name == "sm_90a-16sm-227k-l2.60m-hbm4.8-mig.1g.18gb+me"
    assert DeviceClass.parse(part.name) == part


def test_every_alias_is_a_class_of_a_target() -> None:
    targets = {target.name for target in all_targets()}
    for alias, device in known_devices().items():
        assert device.arch in targets
        assert DeviceClass.parse(device.name) == device
        assert DeviceClass.named(alias.upper()) == DeviceClass.named(device.name) == device
    assert len(set(known_devices().values())) == len(known_devices())


@pytest.mark.parametrize(
    "name",
    [
        "",
        "h200",
        "sm_90a-0sm-227k-l2.60m-hbm4.8",
        "sm_90a-132sm-227k-l2.60m-hbm0.0",
        "sm_90a-0132sm-227k-l2.60m-hbm4.8",
        "sm_90a-132sm-227k-l2.60m-hbm04.9",
        "sm_90a-132sm-227k-l2.60m-hbm4.8/../..",
        "sm_90a-132sm-227k-l2.60m-hbm4.8\n",
        "../sm_90a-132sm-227k-l2.60m-hbm4.8",
        "sm_90a-132sm-227k-l2.60m-hbm4.8-mig./",
        "sm_90a-١٣٢sm-227k-l2.60m-hbm4.8",
    ],
)
def test_only_canonical_names_are_read(name: str) -> None:
    assert DeviceClass.parse(name) is None


def test_an_unknown_name_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(AttnError) as caught:
        DeviceClass.named("h20")
    (error,) = caught.value.diagnostics
    assert isinstance(error, UnknownDevice)
    assert "h200" in error.advice
    assert "a100-80g" in error.known


def test_a_gpu_without_a_target_has_no_class() -> None:
    with pytest.raises(AttnError) as caught:
        DeviceClass.from_traits(traits(capability=(7, 5)))
    assert isinstance(caught.value.diagnostics[0], NoTargetForGpu)
