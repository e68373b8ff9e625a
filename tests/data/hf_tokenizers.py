# SPDX-License-Identifier: Apache-2.0
"""Compares `levee tokenize` with Hugging Face's tokenizers, id by id. Arguments: LEVEE FOLDER."""
import json
import os
import random
import struct
import subprocess
import sys
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

levee, work = sys.argv[1:3]
counts = {"passed": 0, "failed": 0, "skipped": 0}

QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
NASTY = [
    "", " ", "  ", "\n", "\r\n\r\n", "\t \t", "a", " a", "a ", "  a  b   c    ", "don't we'll I'M you'Re 'S 'ſ it's",
    "x\u180ey \u180e z", "\u180e", "a\u180e\u180e b", " \u180e ", "\u00a0a\u00a0 b\u2003c\u3000d\u1680e\u2028f\u2029g\u202fh\u205fi\u200bj\ufeffk",
    "\x85\x85 a\x85b", "\x0b\x0c\x1c\x1d\x1e\x1f a", "\x00\x00 nul \x00", "\x7f\x80\x9f", "\u0e01\u0e33 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "e\u0301 \u00e9 E\u0301\u0302 a\u0308\u0304", "\u1100\u1161\u11a8 \uac00\u11a8 \ud55c\uae00", "\u212b \u2126 \u2460 \u00bd \u00b2 \u0663\u06f3 \u0967 \u2167",
    "👩‍👩‍👧‍👦 👍🏽🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿 ❤️ ☃", "日本語のテキスト、漢字かな交じり。", "مرحبا بالعالم ١٢٣", "שלום עולם", "हिन्दी पाठ क्षत्रिय", "ß ẞ ﬁ ǅ ŉ İ ı",
    "12345 1234567890 1,234.5 3.14e-10 0x1F", "a" * 300, " " * 300, "\n" * 77 + "x", "ab" * 200 + " " + "ba" * 90, "=" * 130,
    "<|endoftext|>", "a<|endoftext|>b <|endoftext|> c", "<|endoftext", "<|endoftext|><|endoftext|>", "x <|mask|> y", "x\n<|mask|>\u3000\u00a0z",
    "café cafe\u0301 <tag\u00e9> <tage\u0301>", "\U0010ffff\ue000\ufffd\ufffe", "if (x == 1) {\n\treturn a[0]->b; // !!\n}\n\n\n",
    "    four\n\t\ttabs\r\n  \r\n", "…—“quoted”‘x’", "\u0301 leading mark", "a\u0300\u0316\u0301b", "_under_score_ snake_case CamelCase",
]
POOL = [" ", " ", " ", "\n", "\r", "\t", "'", "s", "ll", "\u180e", "\u00a0", "\u3000", "\x85", "1", "٣", "½", "a", "Ω", "é", "e\u0301", "ſ", "中", "👍", "🏽",
        "\u200d", "-", "_", "<|endoftext|>", "<|mask|>", "\ufeff", "\x00", "\u0308", "\uac00", "\u1161", "\u11a8", "'T", "<", "|", ".", "\u2028"]


def samples():
    rng = random.Random(7)
    out = list(NASTY)
    out += ["".join(rng.choice(POOL) for _ in range(rng.randrange(1, 40))) for _ in range(800)]
    assigned = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cn", "Cs")]
    out += ["".join(rng.choice(assigned) for _ in range(rng.randrange(1, 12))) for _ in range(1500)]
    out += ["a%sb %s%s1" % (c, c, c) for c in assigned if unicodedata.category(c)[0] in "ZC" and ord(c) < 0xE000]
    return [s for s in out if s]


def read_documents(prefix):
    """Ids of each sequence of a Megatron pair."""
    with open(prefix + ".idx", "rb") as f:
        raw = f.read()
    assert raw[:9] == b"MMIDIDX\0\0" and struct.unpack("<Q", raw[9:17])[0] == 1
    size = {8: 2, 4: 4}[raw[17]]
    n, documents = struct.unpack("<QQ", raw[18:34])
    lengths = struct.unpack("<%di" % n, raw[34:34 + 4 * n])
    starts = struct.unpack("<%dq" % n, raw[34 + 4 * n:34 + 12 * n])
    order = struct.unpack("<%dq" % documents, raw[34 + 12 * n:34 + 12 * n + 8 * documents])
    assert list(order) == list(range(n + 1))
    with open(prefix + ".bin", "rb") as f:
        data = f.read()
    return [list(struct.unpack("<%d%s" % (k, {2: "H", 4: "i"}[size]), data[at:at + k * size])) for at, k in zip(starts, lengths)]


def run(*args):
    done = subprocess.run([levee, "tokenize", *args], capture_output=True, text=True, errors="replace")
    return done.returncode, done.stderr.strip()


def write_jsonl(path, texts):
    with open(path, "w", encoding="utf-8") as f:
        for i, text in enumerate(texts):
            f.write(json.dumps({"text": text}, ensure_ascii=i % 2 == 0) + "\n")


def compare(tokenizer_path, texts):
    """First difference between both sides on these texts, None if there is none."""
    theirs = Tokenizer.from_file(tokenizer_path)
    kept = [(t, ids) for t, ids in ((t, theirs.encode(t).ids) for t in texts) if ids]
    jsonl, out = os.path.join(work, "texts.jsonl"), os.path.join(work, "texts")
    write_jsonl(jsonl, [t for t, _ in kept])
    code, err = run(jsonl, "--tokenizer", tokenizer_path, "--output", out)
    if code:
        return "exit %d: %s" % (code, err)
    ours = read_documents(out + ".train")
    if len(ours) != len(kept):
        return "%d documents, expected %d" % (len(ours), len(kept))
    for (text, ids), got in zip(kept, ours):
        if got != ids:
            return "%r: %r, expected %r" % (text[:200], got[:60], ids[:60])
    return None


def test(name):
    def register(fn):
        print("- " + name)
        try:
            problem = fn()
        except Exception as e:  # a failed test, whatever it is
            problem = "%s: %s" % (type(e).__name__, e)
        if problem == "skip":
            print("  skipped: no `bible` command (Debian package bible-kjv)")
            counts["skipped"] += 1
        elif problem:
            print("  FAILED: " + problem)
            counts["failed"] += 1
        else:
            counts["passed"] += 1
        sys.stdout.flush()
    return register


def file(name):
    return os.path.join(work, name)


TEXT = None
if os.path.exists(file("text.txt")):
    with open(file("text.txt"), encoding="utf-8", newline="") as f:
        TEXT = f.read()
SAMPLES = samples()
# Something to learn from that has more than English in it.
CORPUS = SAMPLES[:600] + ["the quick brown fox 'll don't 1234 jumps\n\nover   the lazy dog", "naïve café déjà vu"] * 30


def train(pre_tokenizer, normalizer=None, vocab=900, added=(), ignore_merges=False, specials=("<|endoftext|>",), decoder=True):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    t.pre_tokenizer = pre_tokenizer
    if normalizer:
        t.normalizer = normalizer
    if decoder:
        t.decoder = decoders.ByteLevel()
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=vocab, special_tokens=list(specials), show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.add_tokens(list(added))
    return t


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(use_regex=False, space=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=use_regex)


def both_spellings(t, name):
    """Compares with merges as pairs and as "a b"."""
    path = file(name)
    root = json.loads(t.to_str())
    for pairs in (True, False):
        merges = [m.split(" ") if isinstance(m, str) else m for m in root["model"]["merges"]]
        root["model"]["merges"] = merges if pairs else [" ".join(m) for m in merges]
        with open(path, "w", encoding="utf-8") as f:
            json.dump(root, f, ensure_ascii=pairs)
        problem = compare(path, SAMPLES)
        if problem:
            return problem
    return None


@test("hf_loads_ours_same_ids_on_text")
def _():
    if TEXT is None:
        return "skip"
    code, err = run(file("text.txt"), "--train-bpe", "4096", "--output", file("kjv"))
    if code:
        return err
    theirs = Tokenizer.from_file(file("kjv.tokenizer.json"))
    ids = theirs.encode(TEXT).ids
    if read_documents(file("kjv.train")) != [ids]:
        return "other ids"
    if theirs.get_vocab_size() != 4096 or theirs.decode(ids) != TEXT:
        return "vocabulary %d, or the text does not come back" % theirs.get_vocab_size()


@test("hf_trainer_learns_the_same_merges")
def _():
    if TEXT is None:
        return "skip"
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = byte_level(True)
    t.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=4095, special_tokens=[], show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    theirs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in json.loads(t.to_str())["model"]["merges"]]
    with open(file("kjv.tokenizer.json"), encoding="utf-8") as f:
        root = json.load(f)
    ours = [tuple(m.split(" ")) for m in root["model"]["merges"]]
    if ours != theirs:
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        return "merge %d: %r, expected %r (%d and %d merges)" % (at, ours[at:at + 2], theirs[at:at + 2], len(ours), len(theirs))
    vocab = {k: v for k, v in root["model"]["vocab"].items() if v < 4095}
    if vocab != t.get_vocab():
        return "other vocabulary"


@test("hf_trainer_same_merges_on_unicode")
def _():
    write_jsonl(file("corpus.jsonl"), CORPUS)
    code, err = run(file("corpus.jsonl"), "--train-bpe", "1500", "--output", file("corpus"))
    if code:
        return err
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = byte_level(True)
    # There, too, added tokens are not learned from: the trainer is given the text without them here.
    with open(file("corpus.tokenizer.json"), encoding="utf-8") as f:
        ours = [tuple(m.split(" ")) for m in json.load(f)["model"]["merges"]]
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=1499, special_tokens=[], show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    theirs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in json.loads(t.to_str())["model"]["merges"]]
    if ours != theirs:
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        return "merge %d: %r, expected %r" % (at, ours[at:at + 2], theirs[at:at + 2])


@test("hf_same_ids_ours_on_nasty_samples")
def _():
    return compare(file("corpus.tokenizer.json"), SAMPLES)


@test("hf_same_ids_gpt2_form")
def _():
    return both_spellings(train(byte_level(True)), "gpt2.json")


@test("hf_same_ids_prefix_space")
def _():
    return both_spellings(train(byte_level(True, True), added=[AddedToken("<|mask|>", lstrip=True, special=True)]), "prefix.json")


@test("hf_same_ids_qwen_form")
def _():
    pre = pre_tokenizers.Sequence([split(QWEN), byte_level()])
    return both_spellings(train(pre, normalizers.NFC(), added=[AddedToken("<|mask|>", special=True)]), "qwen.json")


@test("hf_same_ids_llama3_form")
def _():
    t = train(pre_tokenizers.Sequence([split(LLAMA), byte_level()]), ignore_merges=True, specials=("<|endoftext|>", "<|bos|>"))
    bos, eos = t.token_to_id("<|bos|>"), t.token_to_id("<|endoftext|>")
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
        single="<|bos|> $A <|endoftext|>", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", bos), ("<|endoftext|>", eos)])])
    return both_spellings(t, "llama.json")


@test("hf_same_ids_neox_form")
def _():
    spaces = [AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)]
    return both_spellings(train(byte_level(True), normalizers.Sequence([normalizers.NFC()]), added=spaces + [
        AddedToken("<|mask|>", lstrip=True, rstrip=True, normalized=True), AddedToken("<tag\u00e9>", normalized=True)]), "neox.json")


@test("hf_same_ids_digits")
def _():
    for individual in (True, False):
        pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=individual), byte_level(True)])
        problem = both_spellings(train(pre, decoder=False), "digits.json")
        if problem:
            return problem


@test("hf_other_kinds_are_refused_by_name")
def _():
    base = json.loads(train(byte_level(True)).to_str())
    changes = {
        "Metaspace": ("pre_tokenizer", {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}),
        "Lowercase": ("normalizer", {"type": "Lowercase"}),
        "RobertaProcessing": ("post_processor", {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", 2]}),
        "WordPiece": ("decoder", {"type": "WordPiece", "prefix": "##", "cleanup": True}),
        "Unigram": ("model", {"type": "Unigram", "vocab": []}),
        "Removed": ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Removed", "invert": False}),
    }
    for word, (key, value) in changes.items():
        with open(file("other.json"), "w", encoding="utf-8") as f:
            json.dump({**base, key: value}, f)
        code, err = run(file("texts.jsonl"), "--tokenizer", file("other.json"), "--output", file("other"))
        if code != 14 or word not in err or len(err.splitlines()) > 3:
            return "%s: exit %d, %s" % (word, code, err)


print("%(passed)d passed, %(failed)d failed, %(skipped)d skipped" % counts)
sys.exit(counts["failed"] != 0)
