# SPDX-License-Identifier: Apache-2.0
"""torch's scaled_dot_product_attention, cuDNN backend, at the shapes of area attn:

    python3 harness/bench/peers/attention.py [--results FILE] [--seconds S] [CASE ...]

Without cases, every one that the results have. Forward and backward of one sequence; of the two layouts
[heads, tokens, dim] and [tokens, heads, dim] the faster one counts (at 2^20 tokens the first alone is timed). torch
brings its own cuDNN: for both sides to use the same one, run `levee bench` with its folder first in LD_LIBRARY_PATH,

    python3 -c "import os, nvidia.cudnn as c; print(os.path.join(c.__path__[0], 'lib'))"
"""

import sys

import peer
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {  # tokens, query heads, key heads
    "attn.fwdbwd.32768": (32768, 16, 16),
    "attn.fwdbwd.32768.h8": (32768, 8, 8),
    "attn.fwdbwd.32768.gqa": (32768, 16, 4),
    "attn.fwdbwd.131072": (131072, 16, 16),
    "attn.fwdbwd.131072.h8": (131072, 8, 8),
    "attn.fwdbwd.131072.gqa": (131072, 16, 4),
    "attn.fwdbwd.1048576": (1048576, 8, 8),
    "attn.fwdbwd.1048576.gqa": (1048576, 8, 2),
    "attn.fwdbwd.1048576.h16": (1048576, 16, 16),
}


def tensors(tokens, heads, kv_heads, by_token):
    def one(n):
        if by_token:
            return torch.randn(1, tokens, n, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        return torch.randn(1, n, tokens, 128, device="cuda", dtype=torch.bfloat16)

    q, k, v, d_o = one(heads), one(kv_heads), one(kv_heads), one(heads)
    return [x.requires_grad_() for x in (q, k, v)], d_o


def time_ms(tokens, heads, kv_heads, by_token, **limits):
    (q, k, v), d_o = tensors(tokens, heads, kv_heads, by_token)

    def work():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        torch.autograd.grad(o, (q, k, v), d_o)

    return peer.time_ms(work, **limits)


def known(case):
    return any(r.get("case") == case for r in peer.records(peer.results_file(case)))


limit = {"seconds": float(sys.argv[sys.argv.index("--seconds") + 1])} if "--seconds" in sys.argv else {}
wanted = [word for word in sys.argv[1:] if word in SHAPES] or [case for case in SHAPES if known(case)]
if not wanted:
    sys.exit("no record of area attn; run: levee bench attn --results harness/bench/results/attn.jsonl")
for case in wanted:
    ours = peer.newest(case)
    layouts = {False: "heads, tokens, dim", True: "tokens, heads, dim"}
    if SHAPES[case][0] > 500000:  # 15 to 30 s a call: one layout; in the records of 131,072 it is at most 0.2 % behind
        layouts.pop(True)
    times = {text: time_ms(*SHAPES[case], by_token, **limit) for by_token, text in layouts.items()}
    best = min(times, key=times.get)
    peer.report(ours, times[best], layout=best, layouts=times, cudnn=torch.backends.cudnn.version())
    print("   " + "; ".join(f"{layout}: {ms:.2f} ms" for layout, ms in times.items()))
