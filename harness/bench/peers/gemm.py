# SPDX-License-Identifier: Apache-2.0
"""torch.matmul at the shapes of area gemm: python3 harness/bench/peers/gemm.py [--results FILE]"""

import peer
import torch


def matrix(rows, cols):
    return torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)


a, b = matrix(8192, 8192), matrix(8192, 8192)
peer.report(peer.newest("gemm.square"), peer.time_ms(lambda: a @ b.t()))
a, b = matrix(32768, 2048), matrix(2048, 2048)
peer.report(peer.newest("gemm.forward"), peer.time_ms(lambda: a @ b.t()))
peer.report(peer.newest("gemm.input_gradient"), peer.time_ms(lambda: a @ b))
