"""What every forward template takes: the header, sizes, and the `attention` block."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from attngen import resources
from attngen.codegen.arguments import C_ELEMENT, ArgumentLayout, layout_arguments
from attngen.codegen.expr import ExprPrinter, float_literal
from attngen.codegen.formulas import (
    FixedFormula,
    Formula,
    LetFormula,
    TensorRead,
    formula,
    let_formulas,
    tensor_reads,
)
from attngen.codegen.mask_text import MaskText
from attngen.codegen.render import template_digest
from attngen.codegen.score_text import NearText, ScoreText, ScoreUnitText
from attngen.codegen.staged_reads import StagedRead, StagedTexts, find_tile_nodes, print_staged
from attngen.ir.attention import Attention
from attngen.ir.digest import digest_attention
from attngen.ir.expr import Expr
from attngen.ir.program import Program
from attngen.targets.base import Target

__all__ = ["ForwardContext", "forward_context", "head_dims"]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The names that templates/common/attention.cu.j2 uses, and those that every kernel shares."""

    name: str
    kernel: str
    template: str
    template_digest: str
    spec_digest: str
    target: str
    schedule: str
    source_lines: tuple[str, ...]
    device: str
    element: str
    weight_scale: str
    tile_q: int
    tile_kv: int
    head_dim_qk: int
    head_dim_v: int
    arguments: ArgumentLayout
    is_checked: bool
    tensors: tuple[TensorRead, ...]
    reading: str
    staged: StagedTexts
    lets: tuple[LetFormula, ...]
    scale: Formula
    score_lines: tuple[Formula, ...]
    addend: Formula | None
    fixed: tuple[FixedFormula, ...]
    bases: tuple[Formula, ...]
    takes_product: bool
    score_unit: ScoreUnitText | None
    near: NearText | None
    mask: Formula | None
    mask_parts: MaskText | None
    sink: Formula | None
    length_q: Formula | None
    length_kv: Formula | None
    running_max: bool

    def values(self) -> dict[str, Any]:
        """These fields by name, for the context of a family that has more of them."""
        return {f.name: getattr(self, f.name) for f in fields(ForwardContext)}


def forward_context(
    program: Program,
    target: Target,
    printer: ExprPrinter,
    *,
    templates: tuple[str, ...],
    schedule: str,
    is_checked: bool,
    scores: ScoreText | None = None,
    mask: MaskText | None = None,
    staged: tuple[StagedRead, ...] = (),
    in_boxes: bool = False,
    reads_at_once: bool = False,
) -> ForwardContext:
    """The shared part of a context.

    templates:  the files that the text comes from, the family's own template first.
    schedule:   the complete schedule in the words of the header.
    scores:     the score lines in parts; None where they are computed as they stand.
    mask:       the mask in parts, of which some join `fixed`; None where it is computed as a whole.
    staged:     what score lines read from shared memory.
    in_boxes:   tiles of it lie there as tensor copies bring them.
    reads_at_once:  tensors are read without branches, so that reads are waited for together.
    """
    attention, launch, tiles = program.attention, program.main, program.main.tiles
    assert attention.dtype is not None
    qk, v = head_dims(attention)

    tensors = tensor_reads(attention, find_tile_nodes(staged))
    may_be_empty = any(tensor.is_read and tensor.clamped for tensor in tensors)
    is_branchless = reads_at_once and may_be_empty and not is_checked

    def optional(e: Expr | None) -> Formula | None:
        return None if e is None else formula(printer, e)

    return ForwardContext(
        name=attention.name,
        kernel=launch.kernel,
        template=templates[0],
        template_digest=template_digest(*templates),
        spec_digest=digest_attention(attention)[:16],
        target=target.name,
        schedule=schedule,
        source_lines=tuple(attention.source.splitlines()),
        device=resources.template_source("common/device.cuh"),
        element=C_ELEMENT[attention.dtype.name],
        weight_scale=float_literal(attention.dtype.weight_scale),
        tile_q=tiles.tile_q,
        tile_kv=tiles.tile_kv,
        head_dim_qk=qk,
        head_dim_v=v,
        arguments=layout_arguments(
            attention,
            attention.dtype,
            program.workspaces,
            program.boxes,
            program.tile_boxes,
            has_tickets=program.hands_out_tiles,
            is_checked=is_checked,
        ),
        is_checked=is_checked,
        tensors=tensors,
        reading=resources.template_source("common/reads.cuh") if is_branchless else "",
        staged=print_staged(staged, attention, tiles.tile_q, tiles.tile_kv, in_boxes=in_boxes),
        lets=let_formulas(attention if mask is None else replace(attention, mask=None), printer),
        scale=formula(printer, attention.scale),
        score_lines=(
            scores.lines if scores else tuple(formula(printer, e) for e in attention.scores)
        ),
        addend=scores.addend if scores else None,
        fixed=(*(scores.fixed if scores else ()), *(mask.fixed if mask else ())),
        bases=scores.bases if scores else (),
        takes_product=scores.is_raw if scores else False,
        score_unit=scores.unit.text if scores and scores.unit else None,
        near=scores.near if scores else None,
        mask=mask.pair if mask else optional(attention.mask),
        mask_parts=mask,
        sink=optional(attention.sink),
        length_q=optional(attention.length_q),
        length_kv=optional(attention.length_kv),
        running_max=attention.row_state.running_max,
    )


def head_dims(attention: Attention) -> tuple[int, int]:
    """(Dqk, Dv) of a specialised variant."""
    assert attention.head_dim_qk is not None, "specialise the attention first"
    assert attention.head_dim_v is not None, "specialise the attention first"
    return attention.head_dim_qk, attention.head_dim_v
