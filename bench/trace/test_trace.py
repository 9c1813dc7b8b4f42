#!/usr/bin/env python3
"""Tests of bench/trace without a test framework: prints 'N passed, M failed', exits 1 on a failure.

Without the weights (or numpy) the tests that need them print SKIPPED and why.
"""

import contextlib
import io
import os
import random
import struct
import sys
import tempfile
import traceback

try:
    import numpy as np
except ImportError as error:
    print(f"SKIPPED all: {error}; run with build/venv/bin/python (deploy/install_deps.sh trace)")
    print("0 passed, 0 failed")
    sys.exit(0)

import dump_trace
import formats
import model as smollm2
import texts
import tokenizer as bpe

SEED = 7


class Skipped(Exception):
    """Why a test cannot run here."""


def make_trace(dtype="bf16", num_steps=3, num_prompt=21):
    random_bits = np.random.default_rng(SEED)

    def arrays(tokens, heads):
        values = random_bits.standard_normal((2, tokens, heads, 8)).astype(np.float32)
        return list(formats.to_bits(values, dtype))

    return formats.Trace(
        layer_ids=[2, 5],
        prompt_tokens=np.arange(num_prompt, dtype=np.uint32) * 7,
        step_tokens=np.arange(num_steps, dtype=np.uint32) + 100,
        keys=arrays(num_prompt, 2),
        values=arrays(num_prompt, 2),
        step_queries=arrays(num_steps, 6),
        step_keys=arrays(num_steps, 2),
        step_values=arrays(num_steps, 2),
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=8,
        softmax_scale=0.25,
        rope_theta=1e5,
        model_layers=9,
        model="a model",
        text="un café",
        dtype=dtype,
    )


def make_metric():
    matrices = np.random.default_rng(SEED).standard_normal((2, 3, 8, 8)).astype(np.float32)
    return formats.Metric([1, 4], matrices, 55, "a model", "a text")


def write_to_bytes(write, content):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file")
        size = write(path, content)
        assert os.listdir(folder) == ["file"], "leaves nothing beside the file"
        with open(path, "rb") as file:
            data = file.read()
    assert size == len(data)
    return data


def read_from_bytes(read, data):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file")
        with open(path, "wb") as file:
            file.write(data)
        return read(path)


def raises(kind, call, *args):
    try:
        call(*args)
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}, got none")


def mix(word, number):
    limit = (1 << 64) - 1
    z = (word + number * 0x9E3779B97F4A7C15) & limit
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & limit
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & limit
    return z ^ (z >> 31)


def slow_checksum(data, first=1):
    """The formula of FORMAT.md, one word at a time; `first` is the number of the first word."""
    words = struct.iter_unpack("<I", data)
    return sum(mix(word, first + i) for i, (word,) in enumerate(words)) % (1 << 64)


def test_checksum_equals_its_formula():
    assert formats.checksum(b"") == 0
    assert formats.checksum(struct.pack("<2I", 1, 2)) == 0x50D273FC94FE7B03
    data = random.Random(SEED).randbytes(4 * 1000)
    assert formats.checksum(data) == slow_checksum(data)
    assert formats.checksum(b"\0" * 8) != formats.checksum(b"\0" * 4), "counts zero words too"


def test_checksum_does_not_depend_on_its_inner_parts():
    data = (
        np.random.default_rng(SEED).integers(0, 256, 4 * ((1 << 20) + 5), dtype=np.uint8).tobytes()
    )
    head = 4 * ((1 << 20) - 3)
    tail = slow_checksum(data[head:], first=head // 4 + 1)
    assert formats.checksum(data) == (formats.checksum(data[:head]) + tail) % (1 << 64)


def test_bf16_rounds_to_nearest_even():
    one_ulp = 2.0**-7
    cases = [
        (1.0, 0x3F80),
        (1.0 + one_ulp / 2, 0x3F80),
        (1.0 + one_ulp * 1.5, 0x3F82),
        (1.0 + one_ulp * 0.51, 0x3F81),
        (-2.0, 0xC000),
        (0.0, 0),
    ]
    values, bits = zip(*cases)
    assert formats.to_bits(np.array(values, np.float32), "bf16").tolist() == list(bits)
    every_finite = np.array([b for b in range(1 << 16) if b & 0x7F80 != 0x7F80], np.uint16)
    again = formats.to_bits(formats.to_float32(every_finite, "bf16"), "bf16")
    assert (again == every_finite).all()
    raises(formats.FormatError, formats.to_bits, np.array([np.inf]), "bf16")
    raises(formats.FormatError, formats.to_bits, np.array([7e4]), "fp16")


def test_trace_reads_back_as_written():
    for dtype in ("bf16", "fp16"):
        for num_steps in (0, 3):
            written = make_trace(dtype, num_steps)
            got = read_from_bytes(formats.read_trace, write_to_bytes(formats.write_trace, written))
            for name in ("keys", "values", "step_queries", "step_keys", "step_values"):
                for ours, theirs in zip(getattr(got, name), getattr(written, name), strict=True):
                    assert ours.shape == theirs.shape and (ours == theirs).all(), name
            assert got.prompt_tokens.tolist() == written.prompt_tokens.tolist()
            assert got.step_tokens.tolist() == written.step_tokens.tolist()
            for name in ("layer_ids", "dtype", "model", "text", "softmax_scale", "model_layers"):
                assert getattr(got, name) == getattr(written, name), name


def test_trace_bytes_are_those_of_the_document():
    trace = make_trace()
    data = write_to_bytes(formats.write_trace, trace)
    assert data[:8] == b"KVDTRACE"
    assert struct.unpack_from("<9I", data, 8) == (1, 256, 2, 6, 2, 8, 21, 3, 1)
    assert struct.unpack_from("<3fI", data, 44) == (0.25, 0.0, 1e5, 9)
    assert data[60:124] == b"a model".ljust(64, b"\0")
    assert data[124:188] == "un café".encode().ljust(64, b"\0")
    assert data[188:256] == bytes(68)
    offset = 256
    sections = [np.array(trace.layer_ids, "<u4"), trace.prompt_tokens, trace.step_tokens]
    for i in range(2):
        sections += [trace.keys[i], trace.values[i]]
    for i in range(2):
        sections += [trace.step_queries[i], trace.step_keys[i], trace.step_values[i]]
    for section in sections:
        raw = section.tobytes()
        end = offset + len(raw)
        assert data[offset:end] == raw
        offset = -(-end // 64) * 64
        assert data[end:offset] == bytes(offset - end)
    assert len(data) == offset + 8
    assert struct.unpack_from("<Q", data, offset)[0] == slow_checksum(data[:offset])


def test_metric_bytes_are_those_of_the_document():
    metric = make_metric()
    data = write_to_bytes(formats.write_metric, metric)
    assert data[:8] == b"KVDQMETR"
    assert struct.unpack_from("<6I", data, 8) == (1, 256, 2, 3, 8, 55)
    assert data[32:96] == b"a model".ljust(64, b"\0") and data[96:160] == b"a text".ljust(64, b"\0")
    assert data[160:256] == bytes(96) and data[256:264] == struct.pack("<2I", 1, 4)
    assert data[320 : 320 + 4 * 384] == metric.matrices.tobytes()
    assert len(data) == 320 + 4 * 384 + 8
    assert struct.unpack_from("<Q", data, len(data) - 8)[0] == slow_checksum(data[:-8])
    got = read_from_bytes(formats.read_metric, data)
    assert (got.matrices == metric.matrices).all() and got.layer_ids == [1, 4]
    assert (got.num_tokens, got.model, got.text) == (55, "a model", "a text")


def test_damaged_files_are_refused():
    for write, read, content in (
        (formats.write_trace, formats.read_trace, make_trace()),
        (formats.write_metric, formats.read_metric, make_metric()),
    ):
        data = write_to_bytes(write, content)
        for position in (200, 257, 300, len(data) // 2, len(data) - 9, len(data) - 1):
            damaged = bytearray(data)
            damaged[position] ^= 0x10
            assert "checksum" in raises(formats.FormatError, read_from_bytes, read, bytes(damaged))
        assert "cut short" in raises(formats.FormatError, read_from_bytes, read, data[:-1])
        raises(formats.FormatError, read_from_bytes, read, data + b"\0")
        raises(formats.FormatError, read_from_bytes, read, data[:100])
        raises(formats.FormatError, read_from_bytes, read, b"NOTATALL" + data[8:])
        newer = data[:8] + struct.pack("<I", 2) + data[12:]
        assert "version" in raises(formats.FormatError, read_from_bytes, read, newer)


def test_writer_refuses_wrong_shapes_and_cuts_long_names_at_a_character():
    trace = make_trace()
    trace.step_keys[1] = trace.step_keys[1][:1]
    assert "step_keys" in raises(formats.FormatError, write_to_bytes, formats.write_trace, trace)
    trace = make_trace()
    trace.text = "x" * 62 + "é"
    got = read_from_bytes(formats.read_trace, write_to_bytes(formats.write_trace, trace))
    assert got.text == "x" * 62


def test_words_are_cut_as_gpt2_does_with_single_digits():
    for text, pieces in (
        ("It's 2024, ok", ["It", "'s", " ", "2", "0", "2", "4", ",", " ok"]),
        ("a  b\n\n c ", ["a", " ", " b", "\n\n", " c", " "]),
        ("naïve_x²日本!?", ["naïve", "_", "x", "²", "日本", "!?"]),
        ("'S don't", ["'", "S", " don", "'t"]),
        ("e\u0301a", ["e", "\u0301", "a"]),
    ):
        assert bpe.split_words(text) == pieces, (text, bpe.split_words(text))


def test_merges_go_by_rank_and_special_tokens_stay_whole():
    tokens = ["<|x|>", "a", "b", "c", "ab", "bc", "abc", "Ġ", "Ã", "©"]
    coder = bpe.Tokenizer(tokens, ["b c", "a b", "a bc"], [3] + [1] * 9)
    assert coder.encode("abc") == [6]
    assert coder.encode("abab") == [4, 4]
    assert coder.encode("a<|x|>bc") == [1, 0, 5]
    assert coder.encode("é") == [8, 9]
    assert coder.decode(coder.encode("abc é<|x|>")) == "abc é<|x|>"


def test_pod_becomes_prose():
    pod = (
        "=encoding utf8\n\n=head1 A B<title>\n\nSome I<nested C<code>> and C<< a->b >>,\n"
        "see L<the page|perlfoo/bar>, L<perlfoo>, L<https://x.org/y> E<lt>3X<index>.\n\n"
        "  $verbatim = 1;\n\n=over 4\n\n=item *\n\nFirst\n\n=item 2. Second\n\n=back\n\n"
        "=begin comment\n\nhidden\n\n=end comment\n\n=for html hidden\n\n=cut\n"
    )
    lines = texts.plain_text_of_pod(pod).split("\n\n")
    assert lines == [
        "A title",
        "Some nested code and a->b, see the page, perlfoo, https://x.org/y <3.",
        "First",
        "Second\n",
    ], lines


def test_layers_option():
    assert dump_trace.parse_layers(None, 30) == [1, 5, 8, 13, 17, 21, 25, 29]
    assert dump_trace.parse_layers("all", 4) == [0, 1, 2, 3]
    assert dump_trace.parse_layers("0,6", 30) == [0, 6]
    assert len(dump_trace.parse_layers(None, 12)) == 8
    for wrong in ("6,0", "1,1", "30", "-1", "a", ""):
        assert "--layers" in raises(ValueError, dump_trace.parse_layers, wrong, 30)


def test_attention_in_tiles_equals_a_plain_softmax():
    random_values = np.random.default_rng(SEED)
    num_rows, first = smollm2.ROW_TILE + 37, 50
    q = random_values.standard_normal((num_rows, 3, 8)).astype(np.float32)
    k, v = random_values.standard_normal((2, first + num_rows, 8)).astype(np.float32)
    got = smollm2.attend(q, k, v, first, 0.5)
    for row in (0, 1, smollm2.ROW_TILE - 1, smollm2.ROW_TILE, num_rows - 1):
        wanted = plain_attention(q[row], k[: first + row + 1], v[: first + row + 1], 0.5)
        assert np.abs(got[row] - wanted).max() < 1e-5


def plain_attention(q, k, v, scale):
    """One token's heads [G,D] over k, v [t,D], in double precision."""
    logits = scale * (q.astype(np.float64) @ k.astype(np.float64).T)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights @ v.astype(np.float64) / weights.sum(axis=-1, keepdims=True)


def test_rope_makes_logits_depend_on_distance_only():
    x = np.random.default_rng(SEED).standard_normal((2, 1, 1, 64)).astype(np.float32)
    logits = []
    for position in (0.0, 1000.0):
        q = smollm2.rotate_pairs(x[0], np.array([position + 7]), 1e5)
        k = smollm2.rotate_pairs(x[1], np.array([position]), 1e5)
        logits.append(float((q * k).sum()))
    assert abs(logits[0] - logits[1]) < 1e-4
    assert (smollm2.rotate_pairs(x[0], np.zeros(1), 1e5) == x[0]).all()


def test_command_line_errors():
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "x.kvt")
        nothing = os.path.join(folder, "none.gguf")
        code, message = run_tool("trace", "--out", out, "--weights", nothing)
        assert code == dump_trace.EXIT_NO_WEIGHTS == 3 and "NO WEIGHTS" in message
        code, message = run_tool("trace", "--out", out, "--steps", "-1")
        assert code == 1 and "--steps" in message
        code, message = run_tool("info", nothing)
        assert code == 1 and "none.gguf" in message
        formats.write_trace(out, make_trace(num_steps=0))
        code, message = run_tool("info", out)
        assert code == 0 and "checksum:       right" in message


def run_tool(*args):
    """(exit code, stdout and stderr together)."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = dump_trace.main(list(args))
    return code, text.getvalue()


_loaded = {}


def loaded():
    """(model, tokenizer, tokens of a text), once; or Skipped."""
    if "error" in _loaded:
        raise Skipped(_loaded["error"])
    if not _loaded:
        try:
            path, reader = smollm2.open_gguf()
            text = texts.load("GPL-3")[1]
        except (smollm2.WeightsMissing, texts.TextError) as error:
            _loaded["error"] = str(error)
            raise Skipped(str(error)) from error
        coder = dump_trace.make_tokenizer(reader)
        tokens = coder.encode(text)
        _loaded["all"] = (smollm2.Model(path, reader), coder, tokens)
    return _loaded["all"]


def test_tokens_equal_those_of_llama_cpp():
    """The wanted ids were printed by llama.cpp for the same GGUF file."""
    _, coder, _ = loaded()
    for text, ids in (
        (
            "It's 2024: naïve café, 日本 x²\n\n  if (a != b) {\treturn 10; }  ",
            [1589, 506, 216, 34, 32, 34, 36, 42, 15486, 46494, 37366, 28, 17097, 241, 115, 40993]
            + [1792, 19133, 8866, 585, 365, 81, 6541, 278, 25, 1662, 197, 5406, 216, 33, 32, 43]
            + [4029, 256],
        ),
        ("<|im_start|>user\nHi<|im_end|>", [1, 4093, 198, 26843, 2]),
    ):
        assert coder.encode(text) == ids, coder.encode(text)
        assert coder.decode(ids) == text


def test_perplexity_is_that_of_a_language_model():
    model, _, tokens = loaded()
    _, perplexity = dump_trace.prefill(
        model, tokens[:600], smollm2.Cache(model, 600), with_likelihood=True
    )
    assert 5 < perplexity < 40, perplexity


def test_prefill_in_segments_equals_token_by_token():
    model, _, tokens = loaded()
    whole, single = smollm2.Cache(model, 40), smollm2.Cache(model, 40)
    wanted = model.forward(tokens[:40], whole)[-1]
    model.forward(tokens[:30], single)
    for token in tokens[30:40]:
        got = model.forward([token], single)[-1]
    # Different sums may round a key to the other neighbour in bf16; that is all.
    assert np.abs(got - wanted).max() < 0.02 * np.abs(wanted).max()


def test_attention_from_the_file_is_that_of_the_run():
    model, _, tokens = loaded()
    num_prompt, num_steps, layer_ids = 150, 4, [1, 8, 29]
    trace, _ = dump_trace.make_trace(model, tokens[:num_prompt], num_steps, layer_ids, "GPL-3")
    trace = read_from_bytes(formats.read_trace, write_to_bytes(formats.write_trace, trace))

    outputs = {layer: [] for layer in layer_ids}

    def observe(layer, q, k, v, attention):
        if layer in outputs:
            outputs[layer].append(attention[-1])

    cache = smollm2.Cache(model, num_prompt + num_steps)
    hidden = model.forward(trace.prompt_tokens, cache)[-1]
    for step in range(num_steps):
        assert int(np.argmax(model.logits(hidden[None]))) == trace.step_tokens[step]
        hidden = model.forward(trace.step_tokens[step : step + 1], cache, observe)[-1]

    group = model.num_q_heads // model.num_kv_heads
    for i, layer in enumerate(layer_ids):
        q, prompt_k, prompt_v, step_k, step_v = (
            formats.to_float32(arrays[i], "bf16")
            for arrays in (
                trace.step_queries, trace.keys, trace.values, trace.step_keys, trace.step_values,
            )
        )  # fmt: skip
        for step in range(num_steps):
            k = np.concatenate([prompt_k, step_k[: step + 1]])
            v = np.concatenate([prompt_v, step_v[: step + 1]])
            for head in range(model.num_q_heads):
                kv_head = head // group
                wanted = plain_attention(
                    q[step, head : head + 1], k[:, kv_head], v[:, kv_head], trace.softmax_scale
                )
                error = np.abs(outputs[layer][step][head] - wanted[0]).max()
                assert error < 1e-4 * np.abs(v).max(), (layer, step, head, error)


def test_steps_can_feed_given_tokens():
    model, _, tokens = loaded()
    trace, _ = dump_trace.make_trace(model, tokens[:20], 3, [8], "GPL-3", tokens[20:23])
    assert trace.step_tokens.tolist() == tokens[20:23]
    cache = smollm2.Cache(model, 23)
    for token in tokens[:23]:
        model.forward([token], cache)
    got = formats.to_float32(trace.step_keys[0][2], "bf16")
    wanted = cache.keys[8, :, 22]
    assert np.abs(got - wanted).max() < 0.02 * np.abs(wanted).max()


def test_metric_is_the_mean_of_the_run_s_queries():
    model, _, tokens = loaded()
    metric, _ = dump_trace.make_metric(model, tokens[:50], [3, 8], "GPL-3")
    queries = {}

    def observe(layer, q, k, v, attention):
        queries[layer] = q.astype(np.float64)

    model.forward(tokens[:50], smollm2.Cache(model, 50), observe)
    rows = queries[8][:, 3:6].reshape(150, 64)
    wanted = rows.T @ rows / 150
    assert np.abs(metric.matrices[1, 1] - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert np.abs(metric.matrices - metric.matrices.transpose(0, 1, 3, 2)).max() < 1e-3


def main():
    passed = failed = skipped = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                test()
            passed += 1
        except Skipped as why:
            skipped += 1
            print(f"SKIPPED {name}: {why}")
        except Exception:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}")
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
