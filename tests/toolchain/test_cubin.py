"""Facts read from cubins: against the compiler's own report, and from damaged bytes."""

from __future__ import annotations

import random
import re
import struct
import subprocess
from pathlib import Path

import pytest

from attngen import targets
from attngen.backend.cubin import KernelParam, read_resources
from attngen.backend.nvrtc import compile_cuda
from attngen.diagnostics.diagnostic import AttnError
from tests.sass import find_tool
from tests.toolchain.tiny_kernel import (
    ARGUMENT_BYTES,
    KERNEL,
    PRELUDE,
    STATIC_SHARED_BYTES,
    compile_tiny,
)

NAMES = [target.name for target in targets.all_targets()]

# A tensor map first, so that the struct is 64-byte aligned; named barriers; a callee.
SOURCE = (
    PRELUDE
    + """
struct alignas(64) Map { unsigned char bytes[128]; };
struct Mapped { Map map; float* x; int n; };
struct Wide { float x[1250]; };

__device__ __noinline__ float look_up(float x, int n) {
    float a[32];
    for (int i = 0; i < 32; i++) a[i] = x * i;
    return a[n & 31];
}
AG_KERNEL(256, mapped, Mapped) {
    asm volatile("bar.sync 3, 128;");
    ag_store(args.x, (float)args.map.bytes[args.n]);
}
AG_KERNEL(64, wide, Wide) { if (args.x[ag_thread()] == 1.0f) ag_sync(); }
extern "C" __global__ void calls(float* x, int n) { x[0] = look_up(x[1], n); }
extern "C" __global__ void empty() {}
"""
)


@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_kernel(name: str) -> None:
    resources = read_resources(compile_tiny(name))
    assert list(resources) == [KERNEL]
    found = resources[KERNEL]
    assert found.params == (KernelParam(0, 0, ARGUMENT_BYTES),)
    assert found.shared_bytes == STATIC_SHARED_BYTES
    assert found.max_threads == 128
    assert found.stack_bytes == 0
    assert 0 < found.registers < 64
    assert found.code_bytes > 0
    assert len(found.code_digest) == 64


@pytest.mark.parametrize("name", NAMES)
def test_facts_agree_with_the_compilers_report(name: str) -> None:
    compiled = compile_cuda(SOURCE, name="several", target=targets.get(name))
    resources = read_resources(compiled.binary)
    assert list(resources) == ["calls", "empty", "mapped", "wide"]
    for kernel, found in resources.items():
        report = re.search(
            rf"entry function '{kernel}'.*?Used (\d+) registers, used (\d+) barriers"
            r"(?:, (\d+) bytes cumulative stack size)?",
            compiled.log,
            re.DOTALL,
        )
        assert report is not None
        assert found.registers == int(report[1])
        assert found.barriers == int(report[2])
        assert found.stack_bytes == int(report[3] or 0)
    assert [param.size for param in resources["mapped"].params] == [192]
    assert [param.size for param in resources["wide"].params] == [5000]
    assert [(p.offset, p.size) for p in resources["calls"].params] == [(0, 8), (8, 4)]
    assert resources["empty"].params == ()
    assert resources["empty"].max_threads is None
    assert resources["mapped"].barriers == 4
    assert resources["calls"].stack_bytes >= 128


def test_the_digest_is_that_of_the_code() -> None:
    first, again = (
        compile_cuda(PRELUDE + body, name="x", target=targets.get("sm_80"))
        for body in (
            'extern "C" __global__ void a(float* x) { x[0] = 1.0f; }',
            'extern "C" __global__ void a(float* y) { y[0] = 1.0f; }\n'
            'extern "C" __global__ void b(float* x) { x[0] = 2.0f; }',
        )
    )
    one, two = read_resources(first.binary), read_resources(again.binary)
    assert first.binary != again.binary
    assert one["a"].code_digest == two["a"].code_digest != two["b"].code_digest


def test_the_digest_covers_what_the_disassembler_shows(tmp_path: Path) -> None:
    tool = find_tool("nvdisasm")
    if tool is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    path = tmp_path / "tiny.cubin"
    path.write_bytes(compile_tiny("sm_90a"))
    shown = subprocess.run([tool, "-hex", path], capture_output=True, text=True, check=True).stdout
    # Two 64-bit words per instruction; the tool may leave out the padding behind the last one.
    words = [int(word, 16) for word in re.findall(r"/\* 0x([0-9a-f]{16}) \*/", shown)]
    code = b"".join(struct.pack("<Q", word) for word in words)
    found = read_resources(compile_tiny("sm_90a"))[KERNEL]
    assert 0 < len(code) <= found.code_bytes
    assert compile_tiny("sm_90a").count(code) == 1


# ---- damage ------------------------------------------------------------------------------


def test_what_is_no_cubin_is_refused() -> None:
    whole = compile_tiny("sm_80")
    host = bytearray(whole)
    struct.pack_into("<H", host, 18, 62)  # x86-64
    for data in (b"", b"\x7fELF", b"not a cubin" * 99, whole[:64], whole[:2000], bytes(host)):
        with pytest.raises(AttnError) as caught:
            read_resources(data)
        assert caught.value.diagnostics[0].code == "A507"


@pytest.mark.parametrize("name", NAMES)
def test_a_section_beyond_the_end_is_refused(name: str) -> None:
    whole = compile_tiny(name)
    (table,) = struct.unpack_from("<Q", whole, 40)
    (count,) = struct.unpack_from("<H", whole, 60)
    refused = 0
    for i in range(count):
        data = bytearray(whole)
        struct.pack_into("<Q", data, table + 64 * i + 32, len(whole) + 1)  # its size
        refused += code_of(bytes(data)) == "A507"
    assert refused >= count - 4  # all but those that occupy no bytes of the file


@pytest.mark.parametrize("name", ["sm_80", "sm_100a"])
def test_damage_is_a_typed_error_or_harmless(name: str) -> None:
    whole = compile_tiny(name)
    codes = [code_of(data) for data in damage(whole, random.Random(7), 3000)]
    assert set(codes) == {None, "A507"}
    assert codes.count("A507") > 500


def code_of(data: bytes) -> str | None:
    try:
        read_resources(data)
    except AttnError as error:
        return error.diagnostics[0].code
    return None


def damage(whole: bytes, rng: random.Random, count: int) -> list[bytes]:
    made = []
    for _ in range(count):
        data = bytearray(whole)
        match rng.randrange(4):
            case 0:
                del data[rng.randrange(len(data)) :]
            case 1:
                for _ in range(rng.randrange(1, 4)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
            case 2:
                data[rng.randrange(64)] = rng.randrange(256)
            case _:
                at = rng.randrange(len(data) - 8)
                data[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), rng.randbytes(8)])
        made.append(bytes(data))
    return made
