"""The LOCKS authors' step (score, select, attend; wheel locks-kv) over local KV on one GPU.

usage: locks_step.py --shape=llama|hk4 --cases=1x32K,4x128K,...
Microseconds of one layer in a CUDA graph, 2,048 attended tokens (126 chosen pages beside sink and window), in their fastest
build: RKI4_MMA=1 RKI4_MMA_AOS=1 RKI4_MMA_ALLG=1 TORCH_CUDA_ARCH_LIST=9.0a, which this script sets unless the environment
does. It is compiled when it is first used, which takes minutes.
"""

import os
import sys
import types

for flag in ("RKI4_MMA", "RKI4_MMA_AOS", "RKI4_MMA_ALLG"):
    os.environ.setdefault(flag, "1")
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a")

import torch  # noqa: E402
import locks  # noqa: E402

# locks.backend's own __init__ wants vLLM, which the kernels do not need.
backend = types.ModuleType("locks.backend")
backend.__path__ = [os.path.join(os.path.dirname(locks.__file__), "backend")]
sys.modules["locks.backend"] = backend

from locks.attention import decode, decode_cuda  # noqa: E402
from locks.selection import rki4_score_cuda, select_cuda  # noqa: E402
from locks.selection.rki4_state import Rki4State  # noqa: E402
from locks.selection.select import derive_page_params  # noqa: E402

import gpu_graph  # noqa: E402

PAGE = 16
CHOSEN_PAGES = 126


def measure(name, layers, heads, group, batch, tokens):
    pages = tokens // PAGE
    all_pages = pages * batch
    buffers = max(2, gpu_graph.num_buffers(all_pages * heads * 832))
    state = Rki4State(
        "cuda", num_layers=buffers, num_blocks=all_pages, n_kv=heads, G=group, head_dim=gpu_graph.HEAD_DIM, page=PAGE,
        max_reqs=batch, max_pages=pages, budget_pages=CHOSEN_PAGES, sink_pages=1, window_pages=1,
    )
    state.D, state.scale = gpu_graph.HEAD_DIM, gpu_graph.HEAD_DIM**-0.5
    # Random codes and plausible scales: its time does not depend on what is selected.
    if state.pp_rec is not None:
        state.pp_rec.random_(0, 256)
    state.pp_v4.random_(0, 256)
    for codes in (state.pp_c8, state.pp_mu8):
        codes.random_(-127, 127)
    for scales in (state.pp_vs, state.pp_cs):
        scales.uniform_(0.01, 0.03)
    state.pp_mus.uniform_(0.001, 0.01)
    caches = [
        torch.randn(all_pages, 2, PAGE, heads, gpu_graph.HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(min(buffers, 2))
    ]
    table = torch.randperm(all_pages, device="cuda", dtype=torch.int32).view(batch, pages).contiguous()
    lengths = torch.full((batch,), tokens, device="cuda", dtype=torch.int32)
    query = torch.randn(batch, heads * group, gpu_graph.HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    output = torch.empty_like(query)
    decode.ensure_stage_b_buffers(state, "cuda", gpu_graph.HEAD_DIM)
    derive_page_params(state, lengths, batch)
    sources = [decode.ResidentVSource(cache) for cache in caches]

    def step(i):
        rki4_score_cuda.rki4_score_only(state, i % buffers, query, table, lengths, batch, state.scale)
        rki4_score_cuda.rki4_select_only(state, batch)
        state._topb_done = False
        k = i % len(caches)
        decode_cuda.sparse_paged_decode_batched_cuda(
            query, caches[k], table, lengths, state, output, sources[k], scale=state.scale
        )

    us = gpu_graph.graph_us(step)
    gpu_graph.show(name=f"authors/{name}", us=us, layers=layers, finite=bool(torch.isfinite(output).all()))


rki4_score_cuda._get()
select_cuda._get()
for case in gpu_graph.cases():
    try:
        measure(*case)
    except Exception as error:  # one shape that it does not do, or that does not fit, ends no other
        print(f"locks_step: {case[0]}: {error!r:.200}", file=sys.stderr)
    torch.cuda.empty_cache()
