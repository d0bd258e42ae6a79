"""The numeric conformance cases in the language.

`SPECS` maps a case id to its text; `VARIATIONS` maps it to further texts of the same meaning.
All variants of a case share one text: what they change are sizes and the numbers passed in.

    spec = SPECS[case.id]
    text = source(case, spec)                      # a complete .attn file
    given = arguments(inputs, spec)                # tensors, params, consts by name
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import indent

import numpy as np

from .cases import Case, Inputs

__all__ = ["SPECS", "VARIATIONS", "Arguments", "Spec", "all_specs", "arguments", "source"]


@dataclass(frozen=True)
class Spec:
    """`body` is what stands in the attention block below dtype, head dims and outputs.

    `tensors`, `params` and `consts` map the names of the text to auxiliary names of the case.
    `definitions` stands above the block.
    """

    body: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    consts: Mapping[str, str] = field(default_factory=dict)
    definitions: str = ""


@dataclass(frozen=True, eq=False)
class Arguments:
    """What a call passes beside q, k and v."""

    tensors: Mapping[str, np.ndarray]
    params: Mapping[str, int | float]
    consts: Mapping[str, int | float]


def source(case: Case, spec: Spec | None = None) -> str:
    """The complete text of a case: `SPECS[case.id]`, or the given one."""
    spec = spec or SPECS[case.id]
    qk, v = case.dims["Dqk"], case.dims["Dv"]
    head_dim = f"{qk}" if qk == v else f"qk = {qk}, v = {v}"
    lines = [f"dtype {case.dtype}", f"head_dim {head_dim}", *_lines(spec.body), "output o, lse"]
    block = f"attention {case.id.lower()} {{\n{indent(chr(10).join(lines), '    ')}\n}}\n"
    return "".join(f"{line}\n" for line in _lines(spec.definitions)) + block


def arguments(inputs: Inputs, spec: Spec) -> Arguments:
    """The tensors, params and consts that the text of `spec` takes."""

    def numbers(names: Mapping[str, str]) -> dict[str, int | float]:
        return {name: np.asarray(inputs.aux[aux]).item() for name, aux in names.items()}

    tensors = {name: np.asarray(inputs.aux[aux]) for name, aux in spec.tensors.items()}
    small = {n: t.astype(np.int32) if t.dtype.kind == "i" else t for n, t in tensors.items()}
    return Arguments(small, numbers(spec.params), numbers(spec.consts))


def all_specs(case: Case) -> tuple[Spec, ...]:
    """The text of a case, then its variations."""
    return (SPECS[case.id], *VARIATIONS.get(case.id, ()))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


_BOTTOM_RIGHT = Spec("mask kv <= qpos")
_TOP_LEFT = Spec("mask kv <= q")
_NO_MASK = Spec()

SPECS: Mapping[str, Spec] = {
    "O01": Spec("mask q < Sq // 2 and kv < Skv // 2"),
    "O02": _BOTTOM_RIGHT,
    "O03": _NO_MASK,
    "O04": _BOTTOM_RIGHT,
    "O05": Spec("mask kv <= q and (q * 7 + kv * 13) % 5 < 3"),
    "O06": _TOP_LEFT,
    "O07": _BOTTOM_RIGHT,
    "O08": _BOTTOM_RIGHT,
    "O09": _TOP_LEFT,
    "O10": Spec(
        """
        tensor bias : float[Sq, Skv]
        score s + bias[q, kv]
        """,
        tensors={"bias": "bias"},
    ),
    "O11": _NO_MASK,
    "O12": _BOTTOM_RIGHT,
    "O13": Spec(
        """
        tensor filled : int32[B]
        mask kv < filled[b]
        """,
        tensors={"filled": "length"},
    ),
    "O14": Spec(
        """
        param cap : float where cap > 0
        score cap * tanh(s / cap)
        mask kv <= q
        """,
        params={"cap": "cap"},
    ),
    "O15": Spec(
        """
        tensor slope : float[Hq]
        score s + slope[h] * (kv - qpos)
        mask kv <= qpos
        """,
        tensors={"slope": "slope"},
    ),
    "O16": Spec(
        """
        param W : int where 1 <= W < 2**31
        param R : int where 0 <= R < 2**31
        mask q - kv < W and kv - q <= R
        """,
        params={"W": "W", "R": "R"},
    ),
    "O17": Spec(
        """
        const K : int
        const dil : int
        let half = (K * dil - 1) // 2
        mask abs(clamp(q, half, Skv - 1 - half) - kv) <= K * dil // 2
        mask q % dil == kv % dil
        """,
        consts={"K": "K", "dil": "dil"},
    ),
    "O18": Spec(
        """
        tensor doc : int32[B, Skv]
        mask doc[b, q] == doc[b, kv] and kv <= q and doc[b, q] > 0
        """,
        tensors={"doc": "doc"},
    ),
    "O19": Spec(
        """
        tensor plen : int32[B]
        mask kv <= q or kv < plen[b]
        """,
        tensors={"plen": "plen"},
    ),
    "O20": Spec(
        """
        const BS : int
        mask q // BS - 2 <= kv // BS <= q // BS
        """,
        consts={"BS": "BS"},
    ),
    "O21": Spec(
        """
        param P : int where 0 <= P < 2**31
        tensor anc : bool[T, T]
        mask kv < P or anc[q, kv - P]
        """,
        tensors={"anc": "anc"},
        params={"P": "P"},
    ),
    "O22": Spec(
        """
        tensor buf : float[L]
        score s + buf[kv]
        mask kv < L and kv <= q
        """,
        tensors={"buf": "buf"},
    ),
    "O23": Spec(
        """
        tensor bias : float[B?, Hq?, Sq?, Skv?]
        score s + bias[b, h, q, kv]
        mask kv <= qpos
        """,
        tensors={"bias": "bias"},
    ),
    "O24": Spec(
        """
        tensor sink : float[Hq]
        mask kv <= q and q - kv < 8
        weights softmax(sink = sink[h])
        """,
        tensors={"sink": "sink"},
    ),
    "O25": Spec(
        """
        score s - 0.02 * abs(qpos - kv)
        mask kv <= qpos
        """
    ),
    "O26": _NO_MASK,
    "O27": Spec(
        """
        scale -0.5
        mask kv <= q
        """
    ),
    "O28": Spec(
        """
        score s - 3 * (q - kv) / Skv
        mask (q - kv) % 3 == 1 and (q - kv) // 4 >= -15
        """
    ),
    "O29": Spec(
        """
        param W : int where 0 <= W < 2**31
        mask kv <= q and (q - kv <= W or kv < 4)
        """,
        params={"W": "W"},
    ),
    "O35": _TOP_LEFT,
    "O40": Spec(
        """
        score -2**2 * 0.01 * kv + s
        mask 0 <= q - kv < 9 or kv < 2 and not q % 2 == 1
        """
    ),
    "O41": Spec("score where(kv > q, -inf, s)"),
}

_CAUSAL = "define causal : bool = kv <= qpos"

VARIATIONS: Mapping[str, tuple[Spec, ...]] = {
    "O01": (
        Spec(
            """
            mask not (q >= Sq // 2)
            mask 2 * kv < 2 * (Skv // 2)
            """
        ),
    ),
    "O02": (
        Spec("mask kv <= q + (Skv - Sq)"),
        Spec("mask causal", definitions=_CAUSAL),
        Spec("mask kv - qpos <= 0"),
    ),
    "O13": (
        Spec(
            """
            tensor filled : int32[B]
            length kv = filled[b]
            """,
            tensors={"filled": "length"},
        ),
        Spec(
            """
            tensor filled : int32[B]
            score where(kv < filled[b], s, -inf)
            """,
            tensors={"filled": "length"},
        ),
    ),
    "O14": (
        Spec(
            """
            param cap : float where cap > 0
            score softcap(s, cap)
            mask kv <= q
            """,
            params={"cap": "cap"},
            definitions="define softcap(x : float, c : float) : float = c * tanh(x / c)",
        ),
    ),
    "O16": (
        Spec(
            """
            param W : int where 1 <= W < 2**31
            param R : int where 0 <= R < 2**31
            mask window(left = W - 1, right = R)
            """,
            params={"W": "W", "R": "R"},
            definitions="""
            define window(left : int, right : int = 0) : bool = -left <= kv - qpos <= right
            """,
        ),
    ),
    "O19": (
        Spec(
            """
            tensor plen : int32[B]
            mask kv <= max(q, plen[b] - 1)
            """,
            tensors={"plen": "plen"},
        ),
    ),
    "O21": (
        Spec(
            """
            param P : int where 0 <= P < 2**31
            tensor anc : bool[T, T]
            mask kv < P or anc[q, clamp(kv - P, 0, T - 1)]
            """,
            tensors={"anc": "anc"},
            params={"P": "P"},
        ),
    ),
    "O22": (
        Spec(
            """
            tensor buf : float[L]
            score s + buf[min(kv, L - 1)]
            mask kv < L and kv <= q
            """,
            tensors={"buf": "buf"},
        ),
        Spec(
            """
            tensor buf : float[L]
            score where(kv < L and kv <= q, s + buf[kv], -inf)
            """,
            tensors={"buf": "buf"},
        ),
    ),
    "O27": (
        Spec(
            """
            let half = 1 / 2
            scale -half
            mask kv <= q
            """
        ),
    ),
    "O40": (
        Spec(
            f"""
            score {"(" * 500}-2**2{")" * 500} * 0.01 * kv + s
            mask {" or ".join(["q - kv == 0"] * 2000)} or q - kv >= 0 and q - kv < 9 \
or kv < 2 and not q % 2 == 1
            """
        ),
    ),
    "O41": (
        Spec("mask kv <= q"),
        Spec("score s + where(kv > q, -inf, 0)"),
        Spec(
            """
            score where(kv <= q, s, where(kv > q, -inf, nan))
            score where(s > 3.4028234e38, 1e22, s + 1e-45)
            score s * (5 / 2) / 2.5 - -0.0
            """
        ),
        Spec(
            """
            param float : float = 0.0
            param acc : float = 0.0
            param threadIdx : int = 0
            param m_i : float = 0.0
            score where(kv > q + threadIdx, -inf, s + float + acc * m_i)
            """
        ),
    ),
}
