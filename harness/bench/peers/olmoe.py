# SPDX-License-Identifier: Apache-2.0
"""OLMoE-1B-7B, all layers, loss and gradients of one sequence in bf16, no optimizer: `levee train` against the same
model in PyTorch, one after the other on one GPU.

    python3 harness/bench/peers/olmoe.py [--context 32768] [--levee build/levee] [--results FILE]
                                         [--section.key=value ...]

What follows goes to `levee train` (caps, schedules, --profile; what it prints needs --verbose); such a run, one of
another --config and one of fewer than 4 steps, of which the first does not count, is printed, not recorded. From
262,144 tokens on a step takes a minute or more: one is enough there, and a first one counts if it is the only one.
Appends train.olmoe<K>k.{mfu,speed_vs_torch,peak_vs_torch} to results/train.jsonl: ratios are ours over torch's, so
speed above 1 and peak below 1 are ours. Where PyTorch runs out of memory that is train.olmoe<K>k.torch_out_of_memory:
the GiB that it held then. `--optimizer adamw` takes the whole step, ours alone: train.olmoe<K>k.adamw.mfu. It pins 12
bytes per parameter on the host, asked or not whether they are free: some machines show memory only once it is used.
`--gpus N` splits the sequence over N ranks, each with a GPU of its own (ours alone; peaks and MFU are per GPU):
train.olmoe<K>k.gpus<N>.mfu.

PyTorch's side is the usual stack: transformers' OlmoeForCausalLM with grouped_mm experts and cuDNN attention, compiled
decoder layers under gradient checkpointing, the loss in checkpointed chunks of 8,192 tokens, expandable segments. Its
peak is that of the allocator (weights and gradients included, the context not); ours is the whole device slab. Gradient
checkpointing runs the attention of each layer twice; ours keeps its output on the host (memory.sco_keep_attention) and
runs it once: a tenth of PyTorch's step at 32,768 tokens. `--memory.sco_keep_attention=false` shows ours without that.

MFU counts 6 x 1.28e9 + 3 x 16 x 2 x 2048 x S operations per token over 989e12 per second, for both.
"""

import os

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import importlib.util
import json
import math
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import peer

ROOT = pathlib.Path(__file__).resolve().parents[3]
CONFIG = ROOT / "harness" / "configs" / "olmoe-1b-7b.toml"
VOCAB, LAYERS, HIDDEN, PEAK = 50304, 16, 2048, 989e12
CONTEXT = 1 << 30  # bytes that the driver and libraries may take beyond the plan
MOST_ROWS = 1 << 20  # routed rows of 131,072 tokens
LEAST_STEPS = 4  # of a record: the first is left out, three count
LONG = 262144  # tokens from which one step is enough


def caps(context):
    """Settings of ours: all routed rows in one chunk and one tile, up to MOST_ROWS."""
    rows = min(8 * context, MOST_ROWS)
    return (f"--memory.llep_chunk_rows={rows}", f"--memory.llep_tile_rows={rows}", "--memory.rdtp_one_pass=true",
            "--memory.rdtp_tile_rows=4096")


def mfu(context, tokens_per_second):
    return (6 * 1.28e9 + 3 * LAYERS * 2 * HIDDEN * context) * tokens_per_second / PEAK


def write_tokens(prefix, n):
    """n random tokens as one document in Megatron's format (harness/data/megatron_index.h)."""
    random.seed(1)
    with open(f"{prefix}.bin", "wb") as file:
        file.write(struct.pack(f"<{n}H", *(random.randrange(VOCAB) for _ in range(n))))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<iqqq", n, 0, 0, 1))


def same_cudnn():
    """The environment with torch's own cuDNN first, so that both sides use one version."""
    env, found = dict(os.environ), None
    if importlib.util.find_spec("nvidia"):
        found = importlib.util.find_spec("nvidia.cudnn")
    if found:
        paths = [str(pathlib.Path(next(iter(found.submodule_search_locations))) / "lib"), env.get("LD_LIBRARY_PATH")]
        env["LD_LIBRARY_PATH"] = ":".join(p for p in paths if p)
    return env


def run_levee(words, folder):
    """Step seconds (the first step left out where there are more); bytes of the largest rank: of the device planned and
    measured, those that the driver counts, and of pinned memory."""
    write_tokens(f"{folder}/tokens", 2 * words.context + 2)
    command = [
        words.levee, "train", str(words.config), f"--run.folder={folder}/run", f"--data.train={folder}/tokens",
        f"--train.context={words.context}", f"--train.steps={words.steps}", "--lr_scheduler.warmup_steps=0",
        f"--optimizer.name={words.optimizer}", "--run.check_host_memory=false", "--run.device=cuda",
        "--run.trace_steps=0", "--checkpoint.enable=false", "--memory.sco_keep_attention=true",
        f"--run.peak_tflops={PEAK / 1e12:g}", f"--parallel.ranks={words.gpus}", f"--parallel.context={words.gpus}",
        *caps(words.context), *words.rest
    ]
    begin = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=same_cudnn())
    if done.returncode != 0:
        sys.exit(done.stdout[-4000:] + f"\n{' '.join(command)}: exit code {done.returncode}")
    if words.verbose:
        print(done.stdout)
    wall = time.monotonic() - begin
    steps = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    report = json.load(open(f"{folder}/run/memory.json"))
    used = max(gpu["used_bytes"] for gpu in report["gpus"])
    memory = max((rank["device"] for rank in report["per_rank"]), key=lambda m: m["peak_bytes"])
    pinned = max(rank["pinned"]["peak_bytes"] for rank in report["per_rank"])
    for rank in report["per_rank"]:
        if rank["device"]["planned_bytes"] != rank["device"]["peak_bytes"]:
            sys.exit(f"planned {rank['device']['planned_bytes']} bytes, measured {rank['device']['peak_bytes']}")
    if len(report["gpus"]) != words.gpus:
        sys.exit(f"{words.gpus} GPUs asked, {len(report['gpus'])} used")
    if used > memory["planned_bytes"] + CONTEXT:
        sys.exit(f"planned {memory['planned_bytes']} bytes and {CONTEXT} for the context, the driver counts {used}")
    for s in steps:  # of random tokens: near the logarithm of the vocabulary
        if s["loss"] is None or abs(s["loss"] - math.log(VOCAB)) > 1 or s["skipped"]:
            sys.exit(f"step {s['step']}: loss {s['loss']}, skipped {s['skipped']}; {math.log(VOCAB):.2f} is expected")
    seconds = statistics.median(s["step_seconds"] for s in (steps[1:] or steps))
    print(f"levee: step {1e3 * seconds:.1f} ms, {words.context / seconds:.0f} tokens/s, MFU "
          f"{mfu(words.context, words.context / seconds / words.gpus):.3f}, planned = measured "
          f"{memory['peak_bytes'] / 2**30:.2f} GiB, {used / 2**30:.2f} by the driver's count, "
          f"{pinned / 2**30:.2f} pinned, loss {steps[-1]['loss']:.4f}; {wall:.0f} s with start and end", flush=True)
    return seconds, memory["peak_bytes"], used, pinned


def make_torch_model(context):
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=1024, num_hidden_layers=LAYERS, num_attention_heads=16,
        num_key_value_heads=16, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, rms_norm_eps=1e-5,
        max_position_embeddings=context, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa")
    config._experts_implementation = "grouped_mm"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = OlmoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        layer.compile()
    return model


def torch_step(model, ids, labels):
    import torch
    from torch.utils.checkpoint import checkpoint

    def chunk_loss(hidden, target):
        return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), target, reduction="sum")

    hidden, total = model.model(input_ids=ids).last_hidden_state[0], 0
    for first in range(0, hidden.shape[0], 8192):
        part = slice(first, first + 8192)
        total = total + checkpoint(chunk_loss, hidden[part], labels[part], use_reentrant=False)
    loss = total / hidden.shape[0]
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.detach()


def run_torch(words):
    """Median step seconds, None where memory ran out, and the allocator's peak bytes."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = make_torch_model(words.context)
    tokens = torch.randint(VOCAB, (words.context + 1,), device="cuda")
    ids, labels = tokens[None, :-1], tokens[1:]
    seconds, warm_up = [], 1 if words.context >= LONG else 2
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            for step in range(words.torch_steps + warm_up):
                if step == warm_up:  # compiled by now
                    torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
                begin = time.monotonic()
                loss = torch_step(model, ids, labels)
                torch.cuda.synchronize()
                seconds.append(time.monotonic() - begin)
    except torch.OutOfMemoryError as error:
        print(f"torch: {str(error).splitlines()[0]}")
        return None, torch.cuda.max_memory_allocated()
    peak, step = torch.cuda.max_memory_allocated(), statistics.median(seconds[warm_up:])
    print(f"torch: step {1e3 * step:.1f} ms, {words.context / step:.0f} tokens/s, MFU "
          f"{mfu(words.context, words.context / step):.3f}, allocated at most {peak / 2**30:.2f} GiB (reserved "
          f"{torch.cuda.max_memory_reserved() / 2**30:.2f}), loss {float(loss):.4f}", flush=True)
    return step, peak


def record(words, what, value, unit, **more):
    version = subprocess.run([words.levee, "--version"], capture_output=True, text=True).stdout
    work = "no optimizer" if words.optimizer == "none" else f"whole step with {words.optimizer}"
    like = {
        "revision": version.partition("(")[2].partition(")")[0] or "unknown", "device": peer.device_name(),
        "backend": "cuda", "shape": f"16 layers, {words.context} tokens, bf16, "
                                    f"{'one rank' if words.gpus == 1 else f'{words.gpus} GPUs'}, {work}"
    }
    part = "" if words.gpus == 1 else f"gpus{words.gpus}."
    part += "" if words.optimizer == "none" else f"{words.optimizer}."
    name = f"train.olmoe{words.context // 1024}k.{part}{what}"
    print(f"{name} {value:.4g} {unit}" + ("" if words.recorded else " (other settings: not recorded)"))
    if not words.recorded:
        return
    peer.append({"case": name, "value": value, "unit": unit, **more}, like)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--levee", default=str(ROOT / "build" / "levee"))
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--optimizer", default="none", choices=["none", "adamw", "muon"], help="not none: ours alone")
    parser.add_argument("--gpus", type=int, default=1, help="ranks, a GPU each; more than one: ours alone")
    parser.add_argument("--steps", type=int, help=f"8, from {LONG} tokens on 1")
    parser.add_argument("--torch-steps", type=int, help=f"5, from {LONG} tokens on 1")
    parser.add_argument("--results", help="read by peer.py")
    parser.add_argument("--verbose", action="store_true", help="levee's own output too")
    parser.add_argument("--skip-torch", action="store_true", help="our side alone: prints, records only the MFU")
    words, words.rest = parser.parse_known_args()
    long = words.context >= LONG
    words.steps, words.torch_steps = words.steps or (1 if long else 8), words.torch_steps or (1 if long else 5)
    words.recorded = not words.rest and words.config == str(CONFIG) and (long or words.steps >= LEAST_STEPS)
    if words.gpus < 1 or words.steps < (1 if long else 2) or words.torch_steps < (1 if long else LEAST_STEPS - 1):
        parser.error(f"--gpus from 1, --steps from 2 (the first is left out), --torch-steps from {LEAST_STEPS - 1}; "
                     f"from {LONG} tokens on 1 is enough of both")
    if words.context % 1024 != 0:
        parser.error(f"--context {words.context}: records are named by multiples of 1024 tokens")
    with tempfile.TemporaryDirectory() as folder:
        ours, our_peak, used, pinned = run_levee(words, folder)
    rate = words.context / ours
    record(words, "mfu", mfu(words.context, rate / words.gpus), "fraction", ms=1e3 * ours, tokens_per_second=rate,
           held_bytes=our_peak, driver_bytes=used, pinned_bytes=pinned, steps=words.steps)
    if words.skip_torch or words.optimizer != "none" or words.gpus > 1:
        return
    theirs, their_peak = run_torch(words)
    if theirs is None:
        record(words, "torch_out_of_memory", their_peak / 2**30, "GiB")
        return
    record(words, "speed_vs_torch", theirs / ours, "ratio", ms=1e3 * ours, torch_ms=1e3 * theirs)
    record(words, "peak_vs_torch", our_peak / their_peak, "ratio", held_bytes=our_peak, torch_bytes=their_peak)


if __name__ == "__main__":
    main()
