"""Dense decode attention over local KV on one GPU: FlashAttention-3 (wheel fa3-fwd) and cuDNN (through PyTorch).

usage: dense_attention.py --shape=llama|hk4 --cases=1x32K,4x128K,...
Microseconds of one layer in a CUDA graph; the layers of a step take turns over a few layers' buffers, past the L2.
"""

import sys

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpu_graph

try:
    import fa3_fwd_config

    sys.modules["flash_attn_config"] = fa3_fwd_config  # the name under which its interface looks for it
    from fa3_fwd_interface import flash_attn_with_kvcache
except ImportError as error:
    print(f"dense_attention: FlashAttention-3 does not load: {error}", file=sys.stderr)
    flash_attn_with_kvcache = None


def measure(name, layers, heads, group, batch, tokens):
    case_bytes = 2 * batch * tokens * heads * gpu_graph.HEAD_DIM * 2
    buffers = gpu_graph.num_buffers(case_bytes, 4)

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    keys = [random(batch, tokens, heads, gpu_graph.HEAD_DIM) for _ in range(buffers)]
    values = [random(batch, tokens, heads, gpu_graph.HEAD_DIM) for _ in range(buffers)]
    query = random(batch, 1, heads * group, gpu_graph.HEAD_DIM)
    times, outputs = {}, {}
    if flash_attn_with_kvcache is not None:
        lengths = torch.full((batch,), tokens, device="cuda", dtype=torch.int32)
        for pack in (None, True):

            def fa3(i, pack=pack):
                outputs["fa3"] = flash_attn_with_kvcache(
                    query, keys[i % buffers], values[i % buffers], cache_seqlens=lengths, num_splits=0, pack_gqa=pack
                )

            times["fa3"] = min(times.get("fa3", 1e9), gpu_graph.graph_us(fa3))
            fa3(0)

    def cudnn(i):
        outputs["cudnn"] = functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys[i % buffers].transpose(1, 2), values[i % buffers].transpose(1, 2), enable_gqa=True
        )

    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            times["cudnn"] = gpu_graph.graph_us(cudnn)
            cudnn(0)
    except RuntimeError as error:
        print(f"dense_attention: cuDNN, {name}: {str(error)[:120]}", file=sys.stderr)
    fields = {f"{who}_us": round(us, 2) for who, us in times.items()}
    if len(outputs) == 2:  # two libraries that agree attended the same thing
        fa3_out = outputs["fa3"][0] if isinstance(outputs["fa3"], tuple) else outputs["fa3"]
        gap = (fa3_out.reshape(-1).float() - outputs["cudnn"].transpose(1, 2).reshape(-1).float()).abs().max()
        fields["largest_difference"] = round(gap.item(), 6)
    best = min(times, key=times.get)
    gpu_graph.show(name=f"dense/{name}", us=times[best], who=best, layers=layers, gb_per_s=round(case_bytes / times[best] / 1e3), **fields)


for case in gpu_graph.cases():
    measure(*case)
    torch.cuda.empty_cache()
