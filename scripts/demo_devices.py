#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo's losses on a GPU against the CPU's: 50 steps on the CPU in f32, on the GPU in f32 and in bf16.

    python3 scripts/demo_devices.py [--results FILE]

Prints the largest difference of a step's loss from the CPU's, appends train.demo50.{f32,bf16}.loss_difference to the
results (harness/bench/results/train.jsonl), and fails above 1e-4 in f32 and 1e-2 in bf16, then without a record. LEVEE
names the command (build/levee). The text is the demo's own: scripts/demo.sh tokenizes it again.
"""

import argparse
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

STEPS, MOST = 50, {"f32": 1e-4, "bf16": 1e-2}


def losses(levee, device, dtype):
    """The loss of every step of a fresh run."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([levee, "train", "harness/configs/demo.toml", f"--run.device={device}", f"--model.dtype={dtype}",
                        f"--run.folder={folder}", f"--train.steps={STEPS}", "--train.eval_at_end=false",
                        "--checkpoint.enable=false", "--run.trace_steps=0"], check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
    if [r["step"] for r in rows] != list(range(1, STEPS + 1)) or any(r["loss"] is None for r in rows):
        sys.exit(f"{device}, {dtype}: not {STEPS} steps, or a loss that is no number")
    return [r["loss"] for r in rows]


def probe(levee):
    """A short case tells whether there is a GPU, its name, and the revision of the command."""
    try:
        done = subprocess.run([levee, "bench", "gemm.square", "--backend", "cuda", "--seconds", "0.01", "--json"],
                              stdout=subprocess.PIPE, text=True)
    except OSError as error:
        sys.exit(f"demo_devices.py: LEVEE: {error}")
    if done.returncode != 0:
        sys.exit(f"demo_devices.py: {levee} cannot use a GPU here")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run under way and removes its folder
    top = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=top / "harness/bench/results/train.jsonl")
    results = parser.parse_args().results.resolve()
    levee = str(pathlib.Path(os.environ.get("LEVEE") or top / "build/levee").resolve())
    os.chdir(top)
    like = probe(levee)
    try:
        open(results, "a").close()
    except OSError as error:
        sys.exit(f"demo_devices.py: {error}")
    text = {name: value for name, value in os.environ.items() if name != "TEXT"}
    subprocess.run(["sh", "scripts/demo.sh", levee, "text"], check=True, env=text, stdout=subprocess.DEVNULL)
    cpu, records, failed = losses(levee, "cpu", "f32"), [], False
    for dtype, most in MOST.items():
        gpu = losses(levee, "cuda", dtype)
        apart = [abs(a - b) for a, b in zip(gpu, cpu)]
        worst = max(apart)
        holds = worst <= most
        failed |= not holds
        print(f"{dtype}: losses differ by {worst:.3g} at most (step {apart.index(worst) + 1}), allowed {most:g}"
              f"{'' if holds else ': FAILED'}; last {gpu[-1]:.5f}, cpu f32 {cpu[-1]:.5f}", flush=True)
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        records.append({"case": f"train.demo50.{dtype}.loss_difference", "value": worst, "unit": "nats",
                        "command": "python3 scripts/demo_devices.py", "revision": like["revision"],
                        "device": like["device"], "time": now, "backend": "cuda",
                        "shape": f"demo, {STEPS} steps, {dtype} against the CPU's f32"})
    if failed:
        sys.exit(1)
    with open(results, "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


main()
