"""`schedule` blocks → settings of `ir.schedule.Schedule`, each value checked by itself.

Whether settings fit each other, a kernel family and a target's limits is asked later, when
all three are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Final, TypeAlias

from attngen import targets
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.span import Span
from attngen.frontend import ast
from attngen.frontend.check_errors import (
    DuplicateSchedule,
    DuplicateSetting,
    SettingOutOfRange,
    SettingWithSigmoid,
    UnknownSetting,
    WrongSetting,
)
from attngen.frontend.elaborate import find_closest, find_word
from attngen.ir.schedule import LoopOrder, Normalize, Passes

__all__ = ["KERNELS", "Settings", "check_schedules"]

Settings: TypeAlias = Mapping[str, Any]
"""Values by the fields of `ir.schedule.Schedule`; None is auto."""

Evaluate: TypeAlias = Callable[[ast.Expr], int | None]
"""The value of a constant integer expression; None after an error."""

Report: TypeAlias = Callable[[Diagnostic], None]

KERNELS: Final = ("forward_mma", "forward_simt", "forward_wgmma")
"""The kernel families, which lie in a layer above this one."""

_WORDS: Final[dict[str, type[Enum]]] = {"passes": Passes, "normalize": Normalize}
_COUNTS: Final = {"stages": (1, 16), "warps": (1, 32), "splits": (1, 65535)}
"""Settings that are one number.  32 warps are the 1024 threads of the largest block."""
_TILE: Final = (1, 1024)
_KEYS: Final = ("loop", "tile", "kernel", "overlap", *_WORDS, *_COUNTS)
_OVERLAP: Final = {"values": "late_values", "weights": "early_weights", "keys": "late_keys"}
_RELEASES: Final[dict[str | None, bool | None]] = {"early": False, "late": True, "auto": None}
_LOOPS: Final[dict[tuple[str | None, ...], LoopOrder]] = {
    ("q", "kv"): LoopOrder.Q_KV,
    ("kv", "q"): LoopOrder.KV_Q,
}


def check_schedules(
    schedules: tuple[ast.Schedule, ...],
    evaluate: Evaluate,
    report: Report,
    sigmoid: Span | None,
) -> dict[str | None, Settings]:
    """The settings of each block, by target; None is the block for every target.

    `sigmoid` is the place of `weights sigmoid`, where the variant has it.
    """
    found: dict[str | None, Settings] = {}
    first: dict[str | None, Span] = {}
    for schedule in schedules:
        target = schedule.target
        head = schedule.span.source.span(schedule.span.start, schedule.span.start + 8)
        if target in first:
            text = "every target" if target is None else f"`{target}`"
            report(DuplicateSchedule(head, text, first[target]))
        first.setdefault(target, head)
        if target is not None:
            _check_target(target, find_word(schedule.span, target), report)
        checker = _Checker(evaluate, report, sigmoid)
        for setting in schedule.settings:
            checker.add(setting)
        found.setdefault(target, checker.settings)
    return found


def _check_target(name: str, span: Span, report: Report) -> None:
    try:
        targets.get(name)
    except AttnError as error:
        for diagnostic in error.diagnostics:
            report(replace(diagnostic, span=span))


class _Checker:
    """The settings of one block."""

    def __init__(self, evaluate: Evaluate, report: Report, sigmoid: Span | None) -> None:
        self.settings: dict[str, Any] = {}
        self._evaluate = evaluate
        self._report = report
        self._sigmoid = sigmoid
        self._seen: dict[str, Span] = {}

    def add(self, setting: ast.Setting) -> None:
        key = setting.key
        if key not in _KEYS:
            choices = ", ".join(sorted(_KEYS))
            closest = find_closest(key, _KEYS)
            self._report(UnknownSetting(setting.key_span, key, choices, closest))
            return
        if key in self._seen:
            self._report(DuplicateSetting(setting.key_span, key, self._seen[key]))
            return
        self._seen[key] = setting.key_span
        if key in _WORDS and self._sigmoid is not None:
            self._report(SettingWithSigmoid(setting.span, key, self._sigmoid))
        elif key == "loop":
            self._loop(setting)
        elif key == "tile":
            self._tile(setting)
        elif key == "kernel":
            self._kernel(setting)
        elif key == "overlap":
            self._overlap(setting)
        elif key in _WORDS:
            self._word(setting)
        else:
            self._count(setting)

    def _loop(self, setting: ast.Setting) -> None:
        order = tuple(_bare_name(argument) for argument in setting.arguments)
        loop = _LOOPS.get(order)
        if loop is None:
            self._wrong(setting, "`q, kv` or `kv, q`")
        else:
            self.settings["loop"] = loop

    def _tile(self, setting: ast.Setting) -> None:
        takes = "`q = …, kv = …`, each a number or `auto`"
        if not setting.arguments:
            self._wrong(setting, takes)
        given: dict[str, Span] = {}
        for argument in setting.arguments:
            name = argument.name
            if name not in ("q", "kv"):
                problem = "this value has no name" if name is None else f"there is no `{name}`"
                self._report(WrongSetting(argument.span, "tile", takes, problem, None))
            elif name in given:
                self._report(DuplicateSetting(argument.span, f"tile {name}", given[name]))
            else:
                given[name] = argument.span
                self._number(argument.value, f"tile_{name}", f"tile {name}", *_TILE)

    def _overlap(self, setting: ast.Setting) -> None:
        takes = (
            "`auto`, or `values = …, weights = …, keys = …`: numbers of keys, and `early` or `late`"
        )
        if _only_word(setting) == "auto":
            self.settings |= dict.fromkeys(_OVERLAP.values())
            return
        if not setting.arguments:
            self._wrong(setting, takes)
        given: dict[str, Span] = {}
        for argument in setting.arguments:
            name = argument.name
            if name is None or name not in _OVERLAP:
                problem = "this value has no name" if name is None else f"there is no `{name}`"
                self._report(WrongSetting(argument.span, "overlap", takes, problem, None))
            elif name in given:
                self._report(DuplicateSetting(argument.span, f"overlap {name}", given[name]))
            else:
                given[name] = argument.span
                self._overlap_part(argument.value, name)

    def _overlap_part(self, e: ast.Expr, name: str) -> None:
        if name != "keys":
            self._number(e, _OVERLAP[name], f"overlap {name}", 0, _TILE[1])
            return
        word = e.name if isinstance(e, ast.Name) else None
        if word in _RELEASES:
            self.settings[_OVERLAP[name]] = _RELEASES[word]
        else:
            problem = f"not `{e.span.text}`"
            closest = None if word is None else find_closest(word, ("early", "late"))
            words = "`early`, `late` or `auto`"
            self._report(WrongSetting(e.span, "overlap keys", words, problem, closest))

    def _kernel(self, setting: ast.Setting) -> None:
        name = _only_word(setting)
        if name == "auto":
            self.settings["kernel"] = None
        elif name in KERNELS:
            self.settings["kernel"] = name
        else:
            takes = f"`auto` or the name of a kernel family: {', '.join(KERNELS)}"
            self._wrong(setting, takes, None if name is None else find_closest(name, KERNELS))

    def _word(self, setting: ast.Setting) -> None:
        choices = {member.value: member for member in _WORDS[setting.key]}
        name = _only_word(setting)
        if name in choices:
            self.settings[setting.key] = choices[name]
            return
        takes = ", ".join(f"`{choice}`" for choice in choices)
        self._wrong(setting, takes, None if name is None else find_closest(name, choices))

    def _count(self, setting: ast.Setting) -> None:
        if len(setting.arguments) != 1 or setting.arguments[0].name is not None:
            self._wrong(setting, "one number or `auto`")
            return
        key = setting.key
        self._number(setting.arguments[0].value, key, key, *_COUNTS[key])

    def _number(self, e: ast.Expr, field: str, key: str, low: int, high: int) -> None:
        if isinstance(e, ast.Name) and e.name == "auto":
            self.settings[field] = None
            return
        value = self._evaluate(e)
        if value is None:
            return
        if low <= value <= high:
            self.settings[field] = value
        else:
            self._report(SettingOutOfRange(e.span, key, value, low, high))

    def _wrong(self, setting: ast.Setting, takes: str, closest: str | None = None) -> None:
        spans = [argument.span for argument in setting.arguments]
        span = spans[0].to(spans[-1]) if spans else setting.key_span
        problem = f"not `{span.text}`" if spans else "a value is missing"
        self._report(WrongSetting(span, setting.key, takes, problem, closest))


def _bare_name(argument: ast.Argument) -> str | None:
    value = argument.value
    return value.name if argument.name is None and isinstance(value, ast.Name) else None


def _only_word(setting: ast.Setting) -> str | None:
    return _bare_name(setting.arguments[0]) if len(setting.arguments) == 1 else None
