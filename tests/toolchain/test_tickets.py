"""Counters for launches that hand out query tiles: who shares them, and who must not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from attngen.backend.device import cuda_device
from attngen.backend.launch import CudaModule, DriverError
from attngen.backend.tickets import Tickets
from tests.toolchain.fake_cuda import FakeDriver
from tests.toolchain.tiny_kernel import ARGUMENT_BYTES, KERNEL, compile_tiny

BLOCK = bytes(range(ARGUMENT_BYTES))
AT = 8


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def module(driver: FakeDriver) -> CudaModule:
    return CudaModule(compile_tiny("sm_90a"), name="tiny", driver=driver)


def launch(module: CudaModule, stream: int, device: int = 0, **changes: Any) -> None:
    options = {"grid": 1, "threads": 128, "shared_bytes": 512, "tickets_at": AT} | changes
    ready = module.ready(
        KERNEL, ARGUMENT_BYTES, device=cuda_device(device), stream=stream, **options
    )
    ready.start(stream, BLOCK)


def addresses(driver: FakeDriver) -> list[int]:
    return [int.from_bytes(each["block"][AT : AT + 8], "little") for each in driver.launches]


def test_the_address_goes_to_its_place_and_nowhere_else(
    module: CudaModule, driver: FakeDriver
) -> None:
    launch(module, stream=7)
    block = driver.launches[0]["block"]
    assert (block[:AT], block[AT + 8 :]) == (BLOCK[:AT], BLOCK[AT + 8 :])
    assert addresses(driver)[0] != 0


def test_launches_of_a_stream_share_and_streams_do_not(
    module: CudaModule, driver: FakeDriver
) -> None:
    for stream in (7, 8, 7, 8):
        launch(module, stream)
    one, two, *again = addresses(driver)
    assert one != two
    assert again == [one, two]


def test_one_handle_for_the_streams_of_all_threads(module: CudaModule, driver: FakeDriver) -> None:
    per_thread = 2
    launch(module, per_thread)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch, module, per_thread).result()
    here, there = addresses(driver)
    assert here != there


def test_kernels_and_devices_have_their_own(driver: FakeDriver) -> None:
    for name in ("one", "two"):
        kernel = CudaModule(compile_tiny("sm_90a"), name=name, driver=driver)
        for device in (0, 1):
            launch(kernel, stream=7, device=device)
    assert len(driver.allocated) == 4


def test_each_captured_launch_has_its_own(module: CudaModule, driver: FakeDriver) -> None:
    launch(module, stream=7)
    driver.is_capturing_now = True
    for _ in range(3):
        launch(module, stream=7)
    driver.is_capturing_now = False
    launch(module, stream=7)
    before, *captured, behind = addresses(driver)
    assert before == behind
    assert len({before, *captured}) == 4


def test_a_captured_launch_without_counters_keeps_the_null_of_its_block(
    module: CudaModule, driver: FakeDriver
) -> None:
    module.prepare(KERNEL, cuda_device(0), shared_bytes=512)
    driver.is_capturing_now = True
    launch(module, stream=7)
    assert driver.launches[0]["block"] == BLOCK
    assert not driver.allocated


def test_a_thread_that_has_not_used_cuda_yet(module: CudaModule, driver: FakeDriver) -> None:
    launch(module, stream=7)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch, module, 7).result()
    here, there = addresses(driver)
    assert here == there != 0


def test_where_memory_is_not_to_be_had_tiles_are_dealt(
    module: CudaModule, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> int:
        raise DriverError(2)  # CUDA_ERROR_OUT_OF_MEMORY

    monkeypatch.setattr(driver, "allocate_zeros", refuse)
    launch(module, stream=7)
    assert driver.launches[0]["block"] == BLOCK


def test_what_is_prepared_has_counters_in_its_first_capture(
    module: CudaModule, driver: FakeDriver
) -> None:
    module.prepare(KERNEL, cuda_device(0), shared_bytes=512, hands_out_tiles=True)
    driver.is_capturing_now = True
    launch(module, stream=7)
    assert addresses(driver)[0] != 0


def test_a_launch_that_hands_out_nothing_keeps_its_block(
    module: CudaModule, driver: FakeDriver
) -> None:
    launch(module, stream=7, tickets_at=None)
    assert driver.launches[0]["block"] == BLOCK


def test_when_all_are_taken_tiles_are_dealt(driver: FakeDriver) -> None:
    driver.is_capturing_now = True
    tickets = Tickets(driver)
    found = [tickets.find(7) for _ in range(driver.allocated[0] // 8 + 2)]
    assert found[-2:] == [0, 0]
    assert 0 not in found[:-2]
    assert len(set(found[:-2])) == len(found) - 2
