"""Does a check notice a broken kernel?  Break it in every small way, one at a time, and see.

    python -m attngen.cpu.mutate kernel.cu                       list the mutants
    python -m attngen.cpu.mutate kernel.cu --check module:name   build, run and judge each

A mutant differs from the kernel in one token or call: a barrier, an arrival at one, a wait or a
fence deleted, a shuffle replaced by its own argument, an asynchronous copy or product, its group or
the wait for it deleted, a wait for one group less, an integer literal moved by one (an array's
declared length down, others up), a comparison changed.  Only the text below the device functions is
touched; comments, strings and preprocessor lines (`#pragma unroll`, `#line`) are not, nor are
integer literals on a line with a comment `// free: why`, which says that the number changes the
speed and nothing else.

A check takes the built library and raises when it is wrong; it is a module-level function, or a
`functools.partial` of one.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias, final

from attngen.cpu.build import CppCompiler, build_library, find_compiler
from attngen.cpu.errors import CpuBuildFailed, CpuRunFault
from attngen.diagnostics.diagnostic import AttnError

__all__ = [
    "MARKER",
    "Check",
    "Judge",
    "Mutant",
    "MutantKind",
    "Outcome",
    "Verdict",
    "mutants",
    "run_mutants",
]

MARKER = "// ---- end of device functions"
_END_OF_DEVICE_FUNCTIONS = re.compile(rf"^({MARKER}|#endif  // AG_HOST).*$", re.MULTILINE)

# Calls that stand by themselves: a mutant leaves one out.
_BARRIERS = re.compile(
    r"ag_(sync(_warp)?|barrier_(init|arrive|arrive_expect|expect|wait)|named_\w+)"
)
_FENCES = re.compile(r"ag_(barrier_init|async|wgmma)_fence")
_COPIES = re.compile(
    r"ag_(copy_async|tensor_load\w*|tensor_store|(copy|tensor_store|wgmma)_commit)"
)
_WAITS = frozenset(
    {"ag_copy_wait", "ag_tensor_store_wait", "ag_tensor_store_wait_read", "ag_wgmma_wait"}
)
_SHUFFLE_PREFIX = "ag_shuffle"
_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_DECLARED_BEFORE = re.compile(
    r"\s*(typedef )?(const )?(float|int|bool|ag_u32|ag_i64|[A-Z]\w*) [^=;()]*\["
    r"|.*\((memory|buffer), \w+, [^)]*"
)
_FREE = re.compile(r"//.*\bfree: \S")


class MutantKind(Enum):
    BARRIER = "barrier"
    FENCE = "fence"
    COPY = "copy"
    SHUFFLE = "shuffle"
    LITERAL = "literal"
    COMPARISON = "comparison"


@final
@dataclass(frozen=True, slots=True)
class Mutant:
    """A kernel's text with one thing changed, and where: lines and columns count from 1."""

    kind: MutantKind
    line: int
    column: int
    before: str
    after: str
    source: str  # the line as it was, without blanks around it
    text: str

    @property
    def description(self) -> str:
        change = f"`{self.before}` becomes `{self.after}`" if self.after else f"no `{self.before}`"
        return f"{self.line}:{self.column}: {change} in `{self.source}`"


class Verdict(Enum):
    KILLED = "killed"  # the check noticed, or the mutant crashed or hung
    SURVIVED = "survived"
    EQUIVALENT = "equivalent"  # the same machine code as the kernel: there is nothing to notice
    UNBUILDABLE = "unbuildable"  # not C++, so not a mutant


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant; `how` says what noticed it."""

    mutant: Mutant
    verdict: Verdict
    how: str


Check: TypeAlias = Callable[[Path], None]


# ---- making mutants -------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""
      (?P<comment>   //[^\n]* | /\*.*?\*/ )
    | (?P<directive> ^[ \t]*\#(?:[^\n]*\\\n)*[^\n]* )
    | (?P<string>    "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
    | (?P<number>    \.?\d(?:[eEpP][+-]|[\w.'])* )
    | (?P<name>      [A-Za-z_]\w* )
    | (?P<operator>  <<= | >>= | << | >> | <= | >= | == | != | -> | [^\w\s] )
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)")


@final
@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


def mutants(text: str) -> list[Mutant]:
    """Every mutant of a kernel's text, in the order of the text."""
    start = max((end.end() for end in _END_OF_DEVICE_FUNCTIONS.finditer(text)), default=0)
    tokens = [
        _Token(match.lastgroup or "", match[0], match.start(), match.end())
        for match in _TOKEN.finditer(text, start)
    ]
    code = [t for t in tokens if t.kind not in ("comment", "directive")]
    made: list[Mutant] = []
    for i, token in enumerate(code):
        if token.kind == "name" and _BARRIERS.fullmatch(token.text):
            made += _without_call(text, code, i, MutantKind.BARRIER)
        elif token.kind == "name" and _FENCES.fullmatch(token.text):
            made += _without_call(text, code, i, MutantKind.FENCE)
        elif token.kind == "name" and _COPIES.fullmatch(token.text):
            made += _without_call(text, code, i, MutantKind.COPY)
        elif token.kind == "name" and token.text in _WAITS:
            made += _with_less_waiting(text, code, i)
        elif token.kind == "name" and token.text.startswith(_SHUFFLE_PREFIX):
            made += _without_shuffle(text, code, i)
        elif token.kind == "number" and not _is_pending(code, i):
            made += _with_next_integer(text, token)
        elif token.kind == "operator" and token.text in _COMPARISONS:
            made += _with_other_comparison(text, code, i)
    return made


def _without_call(text: str, code: Sequence[_Token], i: int, kind: MutantKind) -> Iterator[Mutant]:
    """`ag_sync();` becomes `;`, which is a statement too."""
    end = _closing(code, i + 1)
    if end is not None:
        yield _replace(text, kind, code[i].start, code[end].end, "")


def _with_less_waiting(text: str, code: Sequence[_Token], i: int) -> Iterator[Mutant]:
    """`ag_copy_wait<1>()` becomes `ag_copy_wait<2>()`, and goes."""
    if not _is_pending(code, i + 2):
        return
    pending, end = code[i + 2], _closing(code, i + 4)
    if end is not None:
        after = str(int(pending.text) + 1)
        yield _replace(text, MutantKind.COPY, pending.start, pending.end, after)
        yield _replace(text, MutantKind.COPY, code[i].start, code[end].end, "")


def _is_pending(code: Sequence[_Token], i: int) -> bool:
    """Whether a token is the number in `ag_copy_wait<1>`."""
    around = [token.text for token in code[max(i - 2, 0) : i + 2]]
    return len(around) == 4 and around[0] in _WAITS and around[1] == "<" and around[2].isdigit()


def _without_shuffle(text: str, code: Sequence[_Token], i: int) -> Iterator[Mutant]:
    """`ag_shuffle_xor(x, mask)` becomes `(x)`."""
    end = _closing(code, i + 1)
    if end is None:
        return
    comma = _first_comma(code, i + 1, end)
    argument = text[code[i + 1].end : code[comma].start].strip()
    yield _replace(text, MutantKind.SHUFFLE, code[i].start, code[end].end, f"({argument})")


def _with_next_integer(text: str, token: _Token) -> Iterator[Mutant]:
    """`31` becomes `32`; floats are left alone, and so are lines marked as free.

    `float m[2];` becomes `float m[1];`, and so does the length of an `ag_shared`: one element more
    would change nothing.
    """
    integer = _INTEGER.fullmatch(token.text)
    line = _line_around(text, token.start)
    if integer is None or _FREE.search(line):
        return
    digits, suffix = integer.groups()
    is_hex = digits[:2] in ("0x", "0X")
    before = line[: token.start - (text.rfind("\n", 0, token.start) + 1)]
    step = -1 if _DECLARED_BEFORE.fullmatch(before) else 1
    value = int(digits, 16 if is_hex else 10) + step
    after = (hex(value) if is_hex else str(value)) + suffix
    yield _replace(text, MutantKind.LITERAL, token.start, token.end, after)


def _with_other_comparison(text: str, code: Sequence[_Token], i: int) -> Iterator[Mutant]:
    """`<` becomes `<=` and so on.  Template brackets have no blank on either side of them."""
    token = code[i]
    around = text[token.start - 1 : token.start] + text[token.end : token.end + 1]
    is_template = i > 0 and code[i - 1].text == "template"
    if around.strip() or is_template:
        return
    after = _COMPARISONS[token.text]
    yield _replace(text, MutantKind.COMPARISON, token.start, token.end, after)


def _closing(code: Sequence[_Token], opening: int) -> int | None:
    """The index of the `)` that closes the `(` at `opening`; None when there is no call."""
    if opening >= len(code) or code[opening].text != "(":
        return None
    depth = 0
    for i in range(opening, len(code)):
        depth += {"(": 1, ")": -1}.get(code[i].text, 0)
        if depth == 0:
            return i
    return None


def _first_comma(code: Sequence[_Token], opening: int, closing: int) -> int:
    """The index of the comma behind the first argument of a call; `closing` when it has one."""
    depth = 0
    for i in range(opening, closing):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(code[i].text, 0)
        if depth == 1 and code[i].text == ",":
            return i
    return closing


def _line_around(text: str, offset: int) -> str:
    start = text.rfind("\n", 0, offset) + 1
    end = text.find("\n", offset)
    return text[start : end if end >= 0 else len(text)]


def _replace(text: str, kind: MutantKind, start: int, end: int, after: str) -> Mutant:
    line_start = text.rfind("\n", 0, start) + 1
    return Mutant(
        kind=kind,
        line=text.count("\n", 0, start) + 1,
        column=start - line_start + 1,
        before=text[start:end],
        after=after,
        source=_line_around(text, start).strip(),
        text=text[:start] + after + text[end:],
    )


# ---- running them ---------------------------------------------------------------------------


def run_mutants(
    text: str,
    chosen: Sequence[Mutant],
    check: Check,
    *,
    limit_s: float | None = None,
    jobs: int | None = None,
    compiler: CppCompiler | None = None,
    report: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Build each mutant of `text` (-O1) and run `check` on it, in a process of its own.

    limit_s: processor time of one check; a mutant that takes longer counts as noticed: it hangs.
             None is 8 times what the kernel itself takes, and at least 2 seconds.
    report:  called with each outcome as it is known, from several threads.
    Errors:  ValueError when the check fails on the kernel itself.
    """
    with tempfile.TemporaryDirectory(prefix="attngen-mutants-") as folder:
        judge = Judge(text, check, Path(folder), limit_s=limit_s, compiler=compiler)

        def judge_one(mutant: Mutant) -> Outcome:
            outcome = judge.judge(mutant)
            if report is not None:
                report(outcome)
            return outcome

        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            return list(pool.map(judge_one, chosen))


@final
class Judge:
    """Builds mutants of one kernel (-O1), and runs a check on each in a process of its own.

    Threads may share it.  `limit_s` and errors are those of `run_mutants`; a library lies in
    `folder` while it is judged.
    """

    def __init__(
        self,
        text: str,
        check: Check,
        folder: Path,
        *,
        limit_s: float | None = None,
        compiler: CppCompiler | None = None,
    ) -> None:
        self._check, self._folder = check, folder
        self._compiler = compiler or find_compiler()
        original = self._build(text)
        answer = _run_check(check, original, limit_s or 600.0)
        if answer.complaint is not None:
            raise ValueError(f"the kernel itself does not pass the check: {answer.complaint}")
        self._limit_s = limit_s or max(2.0, 8 * answer.seconds)
        self._machine_code = original.read_bytes()

    def judge(self, mutant: Mutant) -> Outcome:
        try:
            library = self._build(mutant.text)
        except AttnError as error:
            if not isinstance(error.diagnostics[0], CpuBuildFailed):
                raise
            return Outcome(mutant, Verdict.UNBUILDABLE, error.diagnostics[0].lines)
        try:
            if library.read_bytes() == self._machine_code:
                return Outcome(mutant, Verdict.EQUIVALENT, "the same machine code")
            complaint = _run_check(self._check, library, self._limit_s).complaint
        finally:
            library.unlink(missing_ok=True)
        if complaint is None:
            return Outcome(mutant, Verdict.SURVIVED, "the check passes")
        return Outcome(mutant, Verdict.KILLED, complaint)

    def _build(self, text: str) -> Path:
        return build_library(text, cache_dir=self._folder, compiler=self._compiler, optimization=1)


@final
@dataclass(frozen=True, slots=True)
class _Answer:
    """What a check says (None: it is content), and the processor time it took."""

    complaint: str | None
    seconds: float


def _run_check(check: Check, library: Path, limit_s: float) -> _Answer:
    """Run `check` on a library in a process of its own.

    The process is forked from a server that has imported the check, so it costs milliseconds,
    and whatever the kernel does to it, this process goes on.  The limit is on processor time, so
    that a busy machine kills no mutant; a process that only sleeps is stopped much later.
    """
    context = multiprocessing.get_context("forkserver")
    function = check.func if isinstance(check, partial) else check
    context.set_forkserver_preload([function.__module__, "attngen.cpu.run"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_check_in_child, args=(check, library, limit_s, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(10 * limit_s):
            return _Answer("hangs: it waits for something", limit_s)
        answer: _Answer = ours.recv()
        return answer
    except EOFError:
        process.join()
        name = _exit_name(process.exitcode)
        how = "hangs" if name == "SIGXCPU" else "crashes"
        return _Answer(f"{how}: {name}", limit_s)
    finally:
        process.kill()
        process.join()
        ours.close()


def _check_in_child(check: Check, library: Path, limit_s: float, pipe: Connection) -> None:
    seconds = math.ceil(limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    start = time.process_time()
    complaint = None
    try:
        check(library)
    except AttnError as error:
        first = error.diagnostics[0]
        if isinstance(first, CpuRunFault):
            complaint = f"{first.fault.name.lower()}: {first.text}"
        else:
            complaint = f"{first.code}: {first.label_text() or first.message()}"
    except Exception as error:  # whatever the check raises is its verdict
        complaint = f"{type(error).__name__}: {str(error).strip()}"
    pipe.send(_Answer(complaint, time.process_time() - start))


def _exit_name(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit status {exitcode}"
    return signal.Signals(-exitcode).name


# ---- command line ---------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m attngen.cpu.mutate`: 0 when nothing survives."""
    parser = argparse.ArgumentParser(prog="python -m attngen.cpu.mutate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kernel", type=Path, help="a generated kernel's text")
    parser.add_argument("--check", metavar="MODULE:NAME", help="judge the mutants by this function")
    parser.add_argument("--kind", choices=[k.value for k in MutantKind], help="only mutants of it")
    parser.add_argument("--limit", type=float, default=None, metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=None)
    options = parser.parse_args(arguments)

    text = options.kernel.read_text(encoding="utf-8")
    chosen = [m for m in mutants(text) if options.kind in (None, m.kind.value)]
    if options.check is None:
        for mutant in chosen:
            print(f"{mutant.kind.value:10} {mutant.description}")
        return 0

    module, _, name = options.check.partition(":")
    check: Check = getattr(importlib.import_module(module), name)
    outcomes = run_mutants(text, chosen, check, limit_s=options.limit, jobs=options.jobs)
    for outcome in outcomes:
        if outcome.verdict is not Verdict.KILLED:
            print(f"{outcome.verdict.value:11} {outcome.mutant.description}")
    tally = Counter(o.verdict for o in outcomes)
    print(", ".join(f"{tally[v]} {v.value}" for v in Verdict))
    return 1 if tally[Verdict.SURVIVED] else 0


if __name__ == "__main__":
    sys.exit(main())
