# SPDX-License-Identifier: Apache-2.0
"""Vocabulary projection and cross entropy, loss and gradients, in PyTorch: the work of modules.ring_dtp.

    python3 harness/bench/peers/linear_xent.py [--results FILE]

32,768 tokens, H 2048, V 151,936, bf16, two forms: torch.compile of linear + cross_entropy, and a loop over chunks of
4096 tokens (the usual way to bound the logits). The ratio is taken against the faster one.
"""

import peer
import torch
import torch.nn.functional as F

N, H, V, CHUNK = 32768, 2048, 151936, 4096
h = torch.randn(N, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
w = (torch.randn(V, H, device="cuda") * 0.02).to(torch.bfloat16).requires_grad_()
labels = torch.arange(N, device="cuda") * 7919 % V
w.grad = torch.zeros_like(w)  # accumulated into, as in a training step


def loss_of(x, weight, y):
    return F.cross_entropy((x @ weight.t()).float(), y, reduction="sum")


compiled = torch.compile(loss_of)


def whole():
    h.grad = None
    compiled(h, w, labels).backward()


def chunked():
    h.grad = None
    for at in range(0, N, CHUNK):
        loss_of(h[at : at + CHUNK], w, labels[at : at + CHUNK]).backward()


def measure(work):
    """Milliseconds, and the bytes of the peak beyond what was there before."""
    work()
    torch.cuda.synchronize()
    h.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    held = torch.cuda.max_memory_allocated() - before
    return peer.time_ms(work, seconds=8), held


forms = {"torch.compile": measure(whole), "chunks of 4096": measure(chunked)}
for name, (ms, held) in forms.items():
    print(f"{name:<16} {ms:8.1f} ms, {held / 2**30:.2f} GiB at the peak")
best = min(forms, key=lambda name: forms[name][0])
for case in "modules.ring_dtp", "modules.ring_dtp.one_pass":
    ours = peer.newest(case)
    peer.report(ours, forms[best][0], torch_form=best, torch_bytes=forms[best][1], held_bytes=ours["held_bytes"])
