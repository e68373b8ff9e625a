# SPDX-License-Identifier: Apache-2.0
"""What the peer scripts share. A peer does the work of one case of `levee bench` in PyTorch, on the same machine:

    import peer
    ours = peer.newest("gemm.square")           # the newest record of the case; exits where there is none
    ms = peer.time_ms(lambda: torch.matmul(a, b))
    peer.report(ours, ms)                       # prints the ratio, appends gemm.square.vs_torch

Both sides are on one machine, one after the other: a record of another device, or of more than an hour ago, is refused.
Results are read from and appended to harness/bench/results/<area>.jsonl, or the file that --results names.
"""

import datetime
import json
import math
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def results_file(case):
    """The file of a case's area, or the one after --results on the command line."""
    words = sys.argv[1:]
    for i, word in enumerate(words):
        if word == "--results" and i + 1 < len(words):
            return pathlib.Path(words[i + 1])
        if word.startswith("--results="):
            return pathlib.Path(word.split("=", 1)[1])
    return ROOT / "results" / (case.split(".")[0] + ".jsonl")


def records(path):
    """All whole records of a file."""
    if not path.exists():
        return []
    out = []
    for line in path.read_text().splitlines():
        try:
            out.append(json.loads(line))
        except ValueError:  # cut off by a kill
            pass
    return out


def device_name():
    import torch

    return torch.cuda.get_device_name(0)


def newest(case, device=None):
    """The newest record of the case, by its time, that this device made within the hour."""
    device = device or device_name()
    path = results_file(case)
    found = [r for r in records(path) if r.get("case") == case and r.get("device") == device]
    if not found:
        sys.exit(f"{path} has no record of {case} on {device}; run: levee bench {case} --results {path}")
    best = max(enumerate(found), key=lambda r: (r[1]["time"], r[0]))[1]
    made = datetime.datetime.strptime(best["time"], "%Y-%m-%dT%H:%M:%S%z")
    if datetime.datetime.now(datetime.timezone.utc) - made > datetime.timedelta(hours=1):
        sys.exit(f"the record of {case} in {path} is of {best['time']}: run levee bench {case} --results {path} again, "
                 "just before its peer")
    return best


class Milliseconds(float):
    """A median, and what it is of: `repetitions` of `calls` in a row."""

    def __new__(cls, value, repetitions, calls):
        whole = super().__new__(cls, value)
        whole.repetitions, whole.calls = repetitions, calls
        return whole


def time_ms(work, seconds=60.0, repetitions=20, least=3):
    """Median Milliseconds of `work`, between CUDA events: as many repetitions as fit, each of so many calls in a row as
    50 ms take, after a second to warm up. The same rule as `levee bench` (repeat() in measure.c)."""
    import torch

    def of(calls):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / calls

    def calls_of(one):
        return math.ceil(50 / max(one, 1e-3))

    last, runs, total, one = 0, 0, 0, math.inf
    # beside longer work, loading kernels is nothing
    while last < 5000 and (runs < 2 or (total < 1000 and runs < 10000)):
        last, runs = of(1), runs + 1
        total, one = total + last, min(one, last)
    calls = calls_of(one)
    if calls > 1:  # a call alone shows its launch, which those in a row hide
        one = min(one, of(calls))
        calls = calls_of(one)
    n = max(least, min(repetitions, int(seconds * 1e3 / (calls * max(one, 1e-3)))))
    times = [one] if one >= 5000 else []  # one so long counts, instead of warming up
    times += [of(calls) for _ in range(n - len(times))]
    return Milliseconds(statistics.median(times), n, calls)


def command():
    """The command line as it is repeated from the top of the sources; where the results went and where `levee` lies
    does not matter."""
    words, paths = ["python3", "harness/bench/peers/" + pathlib.Path(sys.argv[0]).name], ("--results", "--levee")
    skip = False
    for word in sys.argv[1:]:
        if not skip and word.partition("=")[0] not in paths:
            words.append(word)
        skip = not skip and word in paths
    return " ".join(words)


def append(record, like):
    """Adds `record` to the results; what it does not say comes from the record `like`."""
    import torch

    whole = {key: like.get(key, "") for key in ("revision", "device", "backend", "shape")}
    whole["command"] = command()
    whole["time"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    whole["torch"] = torch.__version__
    whole.update(record)
    path = results_file(whole["case"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(whole) + "\n")


def report(ours, torch_ms, **more):
    """Prints and appends <case>.vs_torch: the peer's time, of time_ms, over ours (1.2 = 1.2 times its speed)."""
    ratio = torch_ms / ours["ms"]
    print(f"{ours['case']:<34} ours {ours['ms']:10.4g} ms   torch {torch_ms:10.4g} ms   ratio {ratio:.3f}", flush=True)
    append(
        {"case": ours["case"] + ".vs_torch", "value": ratio, "unit": "ratio", "ms": ours["ms"], "torch_ms": torch_ms,
         "torch_repetitions": torch_ms.repetitions, "torch_calls": torch_ms.calls, "our_time": ours["time"], **more},
        ours)
    return ratio
