"""What the GPU peers share: the cases of decode_bench, time in a CUDA graph, the lines they print."""

import argparse
import json

import torch

SHAPES = {"llama": (32, 8, 4), "hk4": (40, 4, 8)}  # layers, KV heads, group; head dim 128, bf16
HEAD_DIM = 128
L2_BYTES = 300e6  # buffers of a case together: several times the L2


def tokens_of(text):
    unit = {"K": 1024, "M": 1024 * 1024}.get(text[-1], 1)
    return int(text[:-1] if unit > 1 else text) * unit


def cases():
    """(name, layers, KV heads, group, batch, tokens) of the command line, named as decode_bench and step_bench name them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="llama", choices=SHAPES)
    parser.add_argument("--cases", default="1x32K", help="sequences x tokens of each, such as 1x32K,4x128K")
    args = parser.parse_args()
    layers, heads, group = SHAPES[args.shape]
    for case in args.cases.split(","):
        batch, length = case.split("x")
        yield f"{args.shape} {batch} x {length}", layers, heads, group, int(batch), tokens_of(length)


def num_buffers(case_bytes, most=6):
    """Layers' buffers that are used in turns, so that none is in the L2 when it comes round again."""
    return max(1, min(most, int(L2_BYTES / case_bytes) + 1))


def graph_us(launch, launches=12, replays=9):
    """Median microseconds of one launch(i) of several in one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            launch(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    times = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return sorted(times[2:])[replays // 2]


def show(**fields):
    print(json.dumps(fields), flush=True)
