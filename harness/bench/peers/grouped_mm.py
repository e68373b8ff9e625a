# SPDX-License-Identifier: Apache-2.0
"""torch._grouped_mm at the shapes of area grouped:
python3 harness/bench/peers/grouped_mm.py [--cublas] [--streams] [--results FILE]

PyTorch has no gradients added to f32 (wgrad_add): they are compared with its bf16 ones, which move fewer bytes.
--cublas prints cublasGemmGroupedBatchedEx too, --streams a product per expert through cuBLAS over four streams, both
with bf16 results and without records.
"""

import ctypes
import sys

import peer
import torch

OUT, IN = 1536, 2048


def spread(how):
    """Rows per expert, as in bench_grouped.c."""
    groups, total = (64, 32768) if how == "small" else (16, 65536)
    if how != "skewed":
        return [total // groups] * groups
    shares = sum(1.0 / (i + 1) for i in range(groups))
    rows = [int(total / shares / (i + 1)) for i in range(groups)]
    rows[-1] = total - sum(rows[:-1])
    rows[0], rows[5] = rows[5], rows[0]
    return rows


def random(*sizes):
    return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)


class CuBlas:
    """cublasGemmGroupedBatchedEx of the library that PyTorch has loaded."""

    def __init__(self):
        torch.mm(random(8, 8), random(8, 8))
        self.lib = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")
        self.handle = ctypes.c_void_p()
        self.check(self.lib.cublasCreate_v2(ctypes.byref(self.handle)))
        self.check(self.lib.cublasSetStream_v2(self.handle, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)))

    @staticmethod
    def check(status):
        if status != 0:
            sys.exit(f"cuBLAS: status {status}")

    def plan(self, products):
        """products: (trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc) of each group, column-major. Returns the
        call."""
        count, column = len(products), list(zip(*products))
        ints = [(ctypes.c_int * count)(*map(int, column[i])) for i in (0, 1, 2, 3, 4, 6, 8, 10)]
        pointers = [torch.tensor(column[i], dtype=torch.int64, device="cuda") for i in (5, 7, 9)]
        ones, zeros = (ctypes.c_float * count)(*[1.0] * count), (ctypes.c_float * count)()
        sizes, bf16, compute = (ctypes.c_int * count)(*[1] * count), 14, 68
        a, b, c = (ctypes.c_void_p(p.data_ptr()) for p in pointers)

        def call(keep=pointers):
            self.check(self.lib.cublasGemmGroupedBatchedEx(
                self.handle, *ints[:5], ones, a, bf16, ints[5], b, bf16, ints[6], zeros, c, bf16, ints[7],
                count, sizes, compute))

        return call


def address(tensor, rows):
    return tensor.data_ptr() + rows * tensor.stride(0) * 2


def cublas_products(what, rows, x, dy, w, out):
    """The row-major products of each expert as column-major ones: operands change places."""
    first, products = 0, []
    for g, n in enumerate(rows):
        if what == "fwd":
            products.append((1, 0, OUT, n, IN, address(w, g), IN, address(x, first), IN, address(out, first), OUT))
        elif what == "dgrad":
            products.append((0, 0, IN, n, OUT, address(w, g), IN, address(dy, first), OUT, address(out, first), IN))
        else:
            products.append((0, 1, IN, OUT, n, address(x, first), IN, address(dy, first), OUT, address(out, g), IN))
        first += n
    return products


def over_streams(what, rows, x, dy, w, out, streams):
    """One torch.mm per expert, on the streams in turn."""
    first, here = 0, torch.cuda.current_stream()
    start = here.record_event()
    for stream in streams:
        stream.wait_event(start)
    for g, n in enumerate(rows):
        part = slice(first, first + n)
        a, b, c = {
            "fwd": lambda: (x[part], w[g].t(), out[part]),
            "dgrad": lambda: (dy[part], w[g], out[part]),
            "wgrad": lambda: (dy[part].t(), x[part], out[g]),
        }[what]()
        with torch.cuda.stream(streams[g % len(streams)]):
            torch.mm(a, b, out=c)
        first += n
    for stream in streams:
        here.wait_event(stream.record_event())


def show(name, ms, total, result, want):
    error = ((result - want).float().norm() / want.float().norm()).item()
    rate = 2e-9 * total * OUT * IN / ms
    print(f"  {name:<32} {ms:10.4g} ms, {rate:.0f} TFLOP/s (difference to torch {error:.1e})", flush=True)


cublas = CuBlas() if "--cublas" in sys.argv else None
streams = [torch.cuda.Stream() for _ in range(4)] if "--streams" in sys.argv else None
for what, how in [("fwd", "balanced"), ("fwd", "skewed"), ("fwd", "small"), ("dgrad", "balanced"), ("dgrad", "skewed"),
                  ("wgrad", "balanced"), ("wgrad", "skewed"), ("wgrad_add", "balanced"), ("wgrad_add", "skewed")]:
    rows = spread(how)
    total, groups = sum(rows), len(rows)
    ends = torch.tensor(rows, device="cuda").cumsum(0).to(torch.int32)
    x, dy, w = random(total, IN), random(total, OUT), random(groups, OUT, IN)
    work = {
        "fwd": lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
        "dgrad": lambda: torch._grouped_mm(dy, w, offs=ends),
        "wgrad": lambda: torch._grouped_mm(dy.t(), x, offs=ends),
    }[what.removesuffix("_add")]
    peer.report(peer.newest(f"grouped.{what}.{how}"), peer.time_ms(work))
    if what == "wgrad_add":
        continue
    want = work()
    if cublas:
        result = torch.empty_like(want)
        ms = peer.time_ms(cublas.plan(cublas_products(what, rows, x, dy, w, result)))
        show("cublasGemmGroupedBatchedEx", ms, total, result, want)
    if streams:
        result = torch.empty_like(want)
        ms = peer.time_ms(lambda: over_streams(what, rows, x, dy, w, result, streams))
        show("a product each, four streams", ms, total, result, want)
