"""The files of bench/trace: KV trace (.kvt) and query metric (.kvq). Their contract is FORMAT.md.

A file is built in memory as a list of sections, each padded with zeros to the next multiple of 64
bytes, then written beside its target and renamed, so that a reader never sees half a file.
"""

import dataclasses
import os
import struct

import numpy as np

VERSION = 1
HEADER_BYTES = 256
ALIGN_BYTES = 64
NAME_BYTES = 64
TRACE_MAGIC = b"KVDTRACE"
METRIC_MAGIC = b"KVDQMETR"
DTYPE_NAMES = {1: "bf16", 2: "fp16"}
DTYPE_CODES = {name: code for code, name in DTYPE_NAMES.items()}

_TRACE_HEADER = struct.Struct("<8s9I3fI64s64s")
_METRIC_HEADER = struct.Struct("<8s2I4I64s64s")
assert _TRACE_HEADER.size <= HEADER_BYTES and _METRIC_HEADER.size <= HEADER_BYTES


class FormatError(ValueError):
    """A file that is not what its header says: the message has what, expected, got, what to do."""


@dataclasses.dataclass
class Trace:
    """keys, values: [L][T,Hk,D]; step_queries: [L][S,H,D]; step_keys, step_values: [L][S,Hk,D].

    The arrays hold 16-bit patterns (uint16) of `dtype`; to_float32() reads them.
    """

    layer_ids: list
    prompt_tokens: np.ndarray
    step_tokens: np.ndarray
    keys: list
    values: list
    step_queries: list
    step_keys: list
    step_values: list
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    rope_theta: float
    model_layers: int
    model: str
    text: str
    dtype: str = "bf16"
    logit_softcap: float = 0.0


@dataclasses.dataclass
class Metric:
    """matrices: fp32 [L,Hk,D,D], the mean of q q' over tokens and over the queries of the group."""

    layer_ids: list
    matrices: np.ndarray
    num_tokens: int
    model: str
    text: str


def to_bits(values, dtype):
    """fp32 to the 16-bit patterns of `dtype`, rounding to nearest, ties to even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(values).all():
        raise FormatError(
            "values to store: expected finite numbers, got inf or NaN; the model run is broken"
        )
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.isfinite(half).all():
            raise FormatError("values to store as fp16: expected at most 65504, got more; use bf16")
        return half.view(np.uint16)
    words = values.view(np.uint32)
    return (
        (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    ).astype(np.uint16)


def to_float32(bits, dtype):
    """16-bit patterns of `dtype` to fp32, exactly."""
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def checksum(data):
    """Sum of mix64(word + (i+1) * golden) over the 32-bit little-endian words i, modulo 2^64."""
    words = np.frombuffer(data, dtype="<u4")
    total = 0
    part_words = 1 << 20
    for begin in range(0, len(words), part_words):
        part = words[begin : begin + part_words]
        index = np.arange(begin + 1, begin + 1 + len(part), dtype=np.uint64)
        z = part + index * np.uint64(0x9E3779B97F4A7C15)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        total += int(z.sum(dtype=np.uint64))
    return total % (1 << 64)


def _name_field(name):
    """At most 63 bytes of UTF-8, cut at a character, so that a NUL always ends it."""
    return name.encode("utf-8")[: NAME_BYTES - 1].decode("utf-8", "ignore").encode("utf-8")


def _name(field):
    return field.split(b"\0", 1)[0].decode("utf-8", "replace")


def _write(path, header, sections):
    out = bytearray(header.ljust(HEADER_BYTES, b"\0"))
    for array in sections:
        out += b"\0" * (-len(out) % ALIGN_BYTES)
        out += np.ascontiguousarray(array).tobytes()
    out += b"\0" * (-len(out) % ALIGN_BYTES)
    out += struct.pack("<Q", checksum(out))
    beside = f"{path}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            file.write(out)
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.remove(beside)
    return len(out)


def write_trace(path, trace):
    """Writes a .kvt file; returns its size in bytes."""
    num_prompt, num_steps = len(trace.prompt_tokens), len(trace.step_tokens)
    kv = (trace.num_kv_heads, trace.head_dim)
    q = (trace.num_q_heads, trace.head_dim)
    groups = (
        ("keys", trace.keys, (num_prompt, *kv)),
        ("values", trace.values, (num_prompt, *kv)),
        ("step_queries", trace.step_queries, (num_steps, *q)),
        ("step_keys", trace.step_keys, (num_steps, *kv)),
        ("step_values", trace.step_values, (num_steps, *kv)),
    )
    for name, arrays, shape in groups:
        got = [(array.shape, str(array.dtype)) for array in arrays]
        if got != [(shape, "uint16")] * len(trace.layer_ids):
            raise FormatError(
                f"{name}: expected {len(trace.layer_ids)} uint16 arrays of {shape}, got {got}"
            )
    header = _TRACE_HEADER.pack(
        TRACE_MAGIC, VERSION, HEADER_BYTES, len(trace.layer_ids), trace.num_q_heads,
        trace.num_kv_heads, trace.head_dim, num_prompt, num_steps, DTYPE_CODES[trace.dtype],
        trace.softmax_scale, trace.logit_softcap, trace.rope_theta, trace.model_layers,
        _name_field(trace.model), _name_field(trace.text),
    )  # fmt: skip
    sections = [_u4(trace.layer_ids), _u4(trace.prompt_tokens), _u4(trace.step_tokens)]
    for pair in zip(trace.keys, trace.values):
        sections += pair
    for triple in zip(trace.step_queries, trace.step_keys, trace.step_values):
        sections += triple
    return _write(path, header, sections)


def write_metric(path, metric):
    """Writes a .kvq file; returns its size in bytes."""
    matrices = np.ascontiguousarray(metric.matrices, dtype="<f4")
    num_layers, num_kv_heads, head_dim, columns = matrices.shape
    if num_layers != len(metric.layer_ids) or columns != head_dim:
        raise FormatError(
            f"matrices: expected [{len(metric.layer_ids)},Hk,D,D], got {list(matrices.shape)}"
        )
    header = _METRIC_HEADER.pack(
        METRIC_MAGIC, VERSION, HEADER_BYTES, num_layers, num_kv_heads, head_dim,
        metric.num_tokens, _name_field(metric.model), _name_field(metric.text),
    )  # fmt: skip
    return _write(path, header, [_u4(metric.layer_ids), matrices])


def _u4(values):
    return np.asarray(values, dtype="<u4")


class _Sections:
    """Hands out the sections of a file in order; a short or long file is a FormatError."""

    def __init__(self, path, data):
        self.path, self.data, self.offset = path, data, HEADER_BYTES

    def take(self, shape, dtype):
        begin = self.offset + -self.offset % ALIGN_BYTES
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if begin + num_bytes > len(self.data):
            raise FormatError(
                f"{self.path}: cut short: expected at least {begin + num_bytes} bytes, "
                f"got {len(self.data)}; write it again"
            )
        self.offset = begin + num_bytes
        return np.frombuffer(self.data[begin : self.offset], dtype=dtype).reshape(shape)

    def check_end(self):
        begin = self.offset + -self.offset % ALIGN_BYTES
        stored = int(self.take((1,), "<u8")[0])
        if self.offset != len(self.data):
            raise FormatError(
                f"{self.path}: expected {self.offset} bytes, got {len(self.data)}; write it again"
            )
        got = checksum(self.data[:begin])
        if got != stored:
            raise FormatError(
                f"{self.path}: checksum: expected {stored:016x} (stored), got {got:016x}; "
                "the file is damaged, write it again"
            )


def _open(path, magics):
    with open(path, "rb") as file:
        data = file.read()
    if len(data) < HEADER_BYTES or data[:8] not in magics:
        raise FormatError(
            f"{path}: expected a file that starts with {' or '.join(m.decode() for m in magics)}, "
            f"got {len(data)} bytes that start with {data[:8]!r}; see FORMAT.md"
        )
    version, header_bytes = struct.unpack_from("<2I", data, 8)
    if (version, header_bytes) != (VERSION, HEADER_BYTES):
        raise FormatError(
            f"{path}: expected version {VERSION} with a header of {HEADER_BYTES} bytes, got "
            f"version {version} with {header_bytes}; write it again with this dump_trace.py"
        )
    return data


def read_kind(path):
    """'trace' or 'metric'."""
    return "trace" if _open(path, (TRACE_MAGIC, METRIC_MAGIC))[:8] == TRACE_MAGIC else "metric"


def read_trace(path):
    """Reads and verifies a .kvt file."""
    data = _open(path, (TRACE_MAGIC,))
    (_, _, _, num_layers, num_q_heads, num_kv_heads, head_dim, num_prompt, num_steps, dtype, scale,
     softcap, theta, model_layers, model, text) = _TRACE_HEADER.unpack_from(data)  # fmt: skip
    if dtype not in DTYPE_NAMES:
        raise FormatError(f"{path}: dtype: expected one of {DTYPE_NAMES}, got {dtype}")
    sections = _Sections(path, data)
    layer_ids, prompt_tokens, step_tokens = (
        sections.take((count,), "<u4") for count in (num_layers, num_prompt, num_steps)
    )
    trace = Trace(
        layer_ids=[int(layer) for layer in layer_ids], prompt_tokens=prompt_tokens,
        step_tokens=step_tokens, keys=[], values=[], step_queries=[], step_keys=[], step_values=[],
        num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, softmax_scale=scale,
        rope_theta=theta, model_layers=model_layers, model=_name(model), text=_name(text),
        dtype=DTYPE_NAMES[dtype], logit_softcap=softcap,
    )  # fmt: skip
    for _ in range(num_layers):
        for arrays in (trace.keys, trace.values):
            arrays.append(sections.take((num_prompt, num_kv_heads, head_dim), "<u2"))
    for _ in range(num_layers):
        trace.step_queries.append(sections.take((num_steps, num_q_heads, head_dim), "<u2"))
        for arrays in (trace.step_keys, trace.step_values):
            arrays.append(sections.take((num_steps, num_kv_heads, head_dim), "<u2"))
    sections.check_end()
    return trace


def read_metric(path):
    """Reads and verifies a .kvq file."""
    data = _open(path, (METRIC_MAGIC,))
    _, _, _, num_layers, num_kv_heads, head_dim, num_tokens, model, text = (
        _METRIC_HEADER.unpack_from(data)
    )
    sections = _Sections(path, data)
    layer_ids = sections.take((num_layers,), "<u4")
    matrices = sections.take((num_layers, num_kv_heads, head_dim, head_dim), "<f4")
    sections.check_end()
    return Metric(
        layer_ids=[int(layer) for layer in layer_ids], matrices=matrices, num_tokens=num_tokens,
        model=_name(model), text=_name(text),
    )  # fmt: skip
