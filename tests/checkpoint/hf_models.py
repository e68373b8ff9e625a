# SPDX-License-Identifier: Apache-2.0
"""Levee's models against Hugging Face's transformers: a model that transformers saved is loaded, its loss and gradient
norm are those of transformers, and its export is the same tensors again. Arguments: LEVEE FOLDER."""

import json
import pathlib
import random
import struct
import subprocess
import sys

import torch
import transformers
from safetensors.torch import load_file
from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

levee, work = sys.argv[1], pathlib.Path(sys.argv[2])
TOKENS, VOCAB, TOLERANCE = 96, 101, 2e-5
COMMON = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_experts=6,
              num_experts_per_tok=2, initializer_range=0.2, use_cache=False, router_aux_loss_coef=0.0,
              pad_token_id=None, bos_token_id=None, eos_token_id=None)  # a padding row would have no gradient
OLMOE = dict(COMMON, num_key_value_heads=4, intermediate_size=24)
QWEN = dict(COMMON, num_key_value_heads=2, head_dim=12, moe_intermediate_size=24, intermediate_size=40)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
CASES = {  # name: (transformers' model, its configuration, settings of ours)
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**OLMOE, norm_topk_prob=False), ["qk_norm=full", "norm_topk_prob=false"]),
    "olmoe_clipped": (OlmoeForCausalLM, OlmoeConfig(**OLMOE, norm_topk_prob=True, clip_qkv=0.5),
                      ["qk_norm=full", "norm_topk_prob=true", "clip_qkv=0.5"]),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN, norm_topk_prob=True, rms_norm_eps=1e-5),
                  ["qk_norm=head", "norm_topk_prob=true"]),
    "qwen3_moe_dense_first": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN, norm_topk_prob=True, mlp_only_layers=[0],
                                                                 rms_norm_eps=1e-5),
                              ["qk_norm=head", "norm_topk_prob=true", "first_k_dense_replace=1",
                               "intermediate_size=40"]),
    "qwen3_moe_tied": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN, norm_topk_prob=False, tie_word_embeddings=True,
                                                          rms_norm_eps=1e-5),
                       ["qk_norm=head", "norm_topk_prob=false", "tie_word_embeddings=true"]),
    "qwen3_moe_yarn": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN, norm_topk_prob=True, rope_parameters=YARN,
                                                          rms_norm_eps=1e-5, max_position_embeddings=128),
                       ["qk_norm=head", "norm_topk_prob=true", "rope_scaling=yarn", "rope_factor=4",
                        "rope_original_max_position=32"]),
}
counts = {"passed": 0, "failed": 0}
transformers.utils.logging.disable_progress_bar()


def transformers_says(make, config, folder, tokens):
    """Loss and gradient norm; leaves the model in the folder, in several files."""
    torch.manual_seed(1)
    model = make(config).float()
    with torch.no_grad():  # norms of ones would hide a norm in the wrong place
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size="40KB")
    hidden = model(input_ids=tokens[None, :-1]).logits[0]
    loss = torch.nn.functional.cross_entropy(hidden, tokens[1:])
    loss.backward()
    norm = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None))
    return float(loss.detach()), float(norm)


def settings_of(config, more):
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "num_experts", "num_experts_per_tok", "rms_norm_eps")
    out = {key: getattr(config, key) for key in keys}
    out["moe_intermediate_size"] = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    if getattr(config, "head_dim", None):
        out["head_dim"] = config.head_dim
    out["rope_theta"] = config.rope_parameters["rope_theta"]
    return [f"--model.{key}={value}" for key, value in out.items()] + [f"--model.{setting}" for setting in more]


def levee_says(folder, run, words):
    """Loss and gradient norm of a step that changes nothing, and its weights exported again."""
    base = work / "model.toml"
    base.write_text('[model]\nname = "hf"\n')
    words = [f"--run.folder={run}", f"--data.train={work}/tokens", f"--train.context={TOKENS}", "--train.steps=1",
             "--train.global_batch=1", "--lr_scheduler.warmup_steps=0", "--optimizer.name=adamw", "--optimizer.lr=0",
             "--optimizer.weight_decay=0", "--model.balance=none", "--model.router_z_loss_coef=0", "--model.dtype=f64",
             "--train.eval_at_end=false", "--run.trace_steps=0", "--run.device=cpu",
             f"--checkpoint.initial_load_path={folder}", *words]
    subprocess.run([levee, "train", str(base), *words], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([levee, "export", f"{run}/checkpoints", f"{run}/export", "--dtype=f32"], check=True,
                   stdout=subprocess.DEVNULL)
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    return step["loss"], step["grad_norm"]


def load(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def check(name, holds, detail=""):
    counts["passed" if holds else "failed"] += 1
    print(f"- hf_models: {name}" + ("" if holds else f"\n  FAILED: {detail}"), flush=True)


def main():
    random.seed(3)
    ids = [random.randrange(VOCAB) for _ in range(TOKENS + 1)]
    (work / "tokens.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    (work / "tokens.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) +
                                      struct.pack("<iqqq", len(ids), 0, 0, 1))
    tokens = torch.tensor(ids)
    for name, (make, config, more) in CASES.items():
        folder = work / name
        loss, norm = transformers_says(make, config, folder, tokens)
        words = settings_of(config, more)
        for ranks in (1, 2):
            run = work / f"{name}.{ranks}"
            got_loss, got_norm = levee_says(folder, run, [*words, f"--parallel.ranks={ranks}"])
            check(f"{name}, {ranks} rank(s): loss", abs(got_loss - loss) <= TOLERANCE * loss, f"{got_loss}, {loss}")
            check(f"{name}, {ranks} rank(s): gradient norm", abs(got_norm - norm) <= TOLERANCE * norm,
                  f"{got_norm}, {norm}")
            there, back = load(folder), load(run / "export")
            check(f"{name}, {ranks} rank(s): export", there.keys() == back.keys() and
                  all(torch.equal(there[k], back[k]) for k in there),
                  f"{sorted(there.keys() ^ back.keys())[:4]} or values differ")
    print(f"{counts['passed']} passed, {counts['failed']} failed, 0 skipped")
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
