"""What can go wrong between CUDA text and a running kernel: A5xx compiling, A6xx launching."""

from __future__ import annotations

from dataclasses import field, replace

from attngen.diagnostics.diagnostic import Diagnostic, Note
from attngen.diagnostics.span import Source, Span
from attngen.record import record

__all__ = [
    "ArchNotSupported",
    "ArgumentBlockMismatch",
    "CompilerFailed",
    "CompilerMessage",
    "CubinRefused",
    "CudaCompileError",
    "DamagedCubin",
    "ForeignByteOrder",
    "ForkedAfterCuda",
    "GpuUnavailable",
    "GradientRequired",
    "HeaderMissing",
    "LaunchFailed",
    "LaunchTooLarge",
    "MisalignedArray",
    "MixedDevices",
    "NotAnArray",
    "NotPrepared",
    "OptionRejected",
    "ReadOnlyOutput",
    "SharedMemoryExceeded",
    "ToolchainMissing",
    "UnknownKernel",
    "UnreadableArray",
    "UnsupportedDevice",
    "UnsupportedDtype",
]

MAX_SHOWN_ERRORS = 4  # of one compilation; the rest is in the log


# ---- A5xx: the toolchain -----------------------------------------------------------------


@record
class CompilerMessage:
    """One error of the compiler's log.

    `file` and `line` are those of a `#line` marker where the text has one; both are None
    for errors of the assembler, whose line numbers count lines of its own input.
    """

    file: str | None
    line: int | None
    text: str

    def __str__(self) -> str:
        return self.text if self.file is None else f"{self.file}({self.line}): {self.text}"


class ToolchainMissing(Diagnostic):
    """No compiler is installed."""

    code = "A501"
    title = "no CUDA compiler: looked for {looked_for}"
    label = "{reason}"
    hint = "pip install {packages}"
    looked_for: str
    reason: str
    packages: str


class ArchNotSupported(Diagnostic):
    """The compiler that is installed is too old or too new for the target."""

    code = "A502"
    title = "{compiler} cannot compile for {target}"
    label = "it supports {supported}"
    hint = "install another NVRTC, or choose a target that this one supports"
    compiler: str
    target: str
    supported: str


class CudaCompileError(Diagnostic):
    """The compiler rejects the CUDA text; the whole log stays reachable in `log`."""

    code = "A503"
    title = "{compiler} cannot compile `{name}` for {target}"
    label = "{first}"
    name: str
    target: str
    compiler: str
    first: str
    messages: tuple[CompilerMessage, ...]
    log: str = field(repr=False)
    source: Source | None = field(default=None, repr=False)

    def notes(self) -> tuple[Note, ...]:
        """The errors after the first, and how many are not shown."""
        shown = self.messages[1:MAX_SHOWN_ERRORS]
        notes = [Note(str(message), self.find_span(message)) for message in shown]
        hidden = len(self.messages) - 1 - len(shown)
        if hidden > 0:
            notes.append(Note(f"and {hidden} more in the compiler's log", None))
        return tuple(notes)

    def find_span(self, message: CompilerMessage) -> Span | None:
        """The line of `source` that a message points at; None where it points elsewhere."""
        source = self.source
        if source is None or message.file != source.name or message.line is None:
            return None
        if not 1 <= message.line <= source.text.count("\n") + 1:
            return None
        lines = source.text.split("\n")
        start = sum(len(line) + 1 for line in lines[: message.line - 1])
        text = lines[message.line - 1].rstrip()
        return source.span(start + len(text) - len(text.lstrip()), start + len(text))

    def locate_in(self, source: Source) -> CudaCompileError:
        """The same error at the first line of `source` that a message names, if one does."""
        located = replace(self, source=source)
        for message in self.messages:
            span = located.find_span(message)
            if span is not None:
                others = tuple(m for m in self.messages if m is not message)
                first = message.text
                return replace(located, span=span, first=first, messages=(message, *others))
        return located


class HeaderMissing(Diagnostic):
    """The CUDA text includes a header; generated text never does."""

    code = "A504"
    title = "`{name}` includes the header `{header}`, which was not found"
    label = "searched: {searched}"
    hint = "generated CUDA needs no header; pass `--include-path=DIR` for hand-written text"
    name: str
    header: str
    searched: str
    log: str = field(repr=False)


class OptionRejected(Diagnostic):
    """A compiler option that this compiler does not have."""

    code = "A505"
    title = "{compiler} rejects an option"
    label = "{detail}"
    compiler: str
    detail: str
    options: tuple[str, ...]


class CompilerFailed(Diagnostic):
    """The compiler itself failed; its input may be right."""

    code = "A506"
    title = "{compiler} failed on `{name}`: {status}"
    label = "{detail}"
    name: str
    compiler: str
    status: str
    detail: str
    log: str = field(repr=False)


class DamagedCubin(Diagnostic):
    """Bytes that are no cubin, or no longer one."""

    code = "A507"
    title = "this is not a readable cubin: {reason}"
    hint = "compile it again"
    reason: str


# ---- A60x: arrays ------------------------------------------------------------------------


class NotAnArray(Diagnostic):
    """An object without any array interface."""

    code = "A601"
    title = "argument `{argument}` is {has}, not an array"
    label = "expected an array of NumPy, CuPy or PyTorch, or with DLPack"
    argument: str
    has: str


class UnsupportedDtype(Diagnostic):
    """A dtype that no kernel reads."""

    code = "A602"
    title = "argument `{argument}` has dtype {has}"
    label = "expected one of {expected}"
    hint = "{advice}"
    argument: str
    has: str
    expected: str
    advice: str | None = None


class ForeignByteOrder(Diagnostic):
    """Big-endian data on a little-endian machine, or the reverse."""

    code = "A603"
    title = "argument `{argument}` has dtype {has}, which is not in native byte order"
    label = "expected {expected}"
    argument: str
    has: str
    expected: str


class MisalignedArray(Diagnostic):
    """Elements that do not start at multiples of their size."""

    code = "A604"
    title = "argument `{argument}` has {has}"
    label = "expected a multiple of the {item_bytes}-byte item size of {dtype}"
    argument: str
    has: str
    item_bytes: int
    dtype: str


class ReadOnlyOutput(Diagnostic):
    """An output that must not be written."""

    code = "A605"
    title = "argument `{argument}` is an output, but it is read-only"
    label = "expected an array that may be written; this one is {has}"
    argument: str
    has: str


class GradientRequired(Diagnostic):
    """A tensor that takes part in automatic differentiation."""

    code = "A606"
    title = "argument `{argument}` requires a gradient, and attngen computes none"
    label = "it has requires_grad=True; expected a tensor outside of autograd"
    hint = "call it under torch.no_grad(), or pass `{argument}.detach()`"
    argument: str


class UnsupportedDevice(Diagnostic):
    """Memory that neither a CPU nor a CUDA kernel reaches."""

    code = "A607"
    title = "argument `{argument}` is on device {has}"
    label = "expected a CPU or a CUDA device"
    argument: str
    has: str


class MixedDevices(Diagnostic):
    """Arguments that are not all on one device."""

    code = "A608"
    title = "argument `{argument}` is on {device}, but `{first_argument}` is on {first_device}"
    label = "expected all arrays of a call on one device"
    argument: str
    device: str
    first_argument: str
    first_device: str


class UnreadableArray(Diagnostic):
    """An array whose memory its own library does not give out."""

    code = "A609"
    title = "argument `{argument}` of type {has} gives no access to its memory"
    label = "{reason}"
    argument: str
    has: str
    reason: str


# ---- A61x: launches ----------------------------------------------------------------------


class GpuUnavailable(Diagnostic):
    """Nothing to launch on."""

    code = "A611"
    title = "no GPU can be used: {reason}"
    hint = "{advice}"
    reason: str
    advice: str | None


class ForkedAfterCuda(Diagnostic):
    """CUDA does not survive a fork."""

    code = "A612"
    title = "this process was forked from one that had already used CUDA"
    label = "CUDA cannot be used in the child"
    hint = "start workers with multiprocessing.get_context('spawn'), or fork before the first use"


class NotPrepared(Diagnostic):
    """A kernel that would have to be loaded while a CUDA graph is being captured."""

    code = "A613"
    title = "kernel `{kernel}` is not loaded on {device}, and the stream is capturing a graph"
    label = "loading during capture would break the graph; nothing was launched"
    hint = (
        "call the kernel once with arrays like these, or its `prepare`, before the capture begins"
    )
    kernel: str
    device: str


class CubinRefused(Diagnostic):
    """The driver does not load the machine code."""

    code = "A614"
    title = "the driver does not load {what} on {device}: {status}"
    label = "GPU of compute capability {capability}, driver for CUDA {driver}"
    hint = "compile for the GPU's own target, with an NVRTC of the driver's major version"
    what: str
    device: str
    status: str
    capability: str
    driver: str


class SharedMemoryExceeded(Diagnostic):
    """More shared memory than one block may have."""

    code = "A615"
    title = "kernel `{kernel}` needs {needed_bytes} bytes of shared memory per block"
    label = (
        "static {static_bytes} + dynamic {dynamic_bytes} = {needed_bytes} bytes; "
        "{device} allows {limit_bytes} bytes per block"
    )
    hint = "choose smaller tiles or fewer stages"
    kernel: str
    static_bytes: int
    dynamic_bytes: int
    needed_bytes: int
    limit_bytes: int
    device: str


class ArgumentBlockMismatch(Diagnostic):
    """Host and kernel disagree about the arguments; launching would read foreign memory."""

    code = "A616"
    title = "the argument block of kernel `{kernel}` has {has}"
    label = "the cubin expects {expected}"
    hint = "the cubin and its manifest or Python side come from different versions: compile again"
    kernel: str
    has: str
    expected: str


class LaunchTooLarge(Diagnostic):
    """A grid or block that no GPU, or not this kernel, can be launched with."""

    code = "A617"
    title = "kernel `{kernel}` cannot be launched with {has}"
    label = "the limit is {limit}"
    kernel: str
    has: str
    limit: str


class LaunchFailed(Diagnostic):
    """The driver refused a launch, or reports the failure of earlier work."""

    code = "A618"
    title = "launching kernel `{kernel}` failed: {status}"
    label = "grid {grid}, {threads} threads, {shared_bytes} bytes of shared memory, on {device}"
    hint = "{advice}"
    kernel: str
    status: str
    grid: str
    threads: int
    shared_bytes: int
    device: str
    advice: str | None


class UnknownKernel(Diagnostic):
    """A kernel that the cubin does not hold."""

    code = "A619"
    title = "the cubin has no kernel `{kernel}`"
    label = "it has {available}"
    kernel: str
    available: str
