"""Small tokenizers of the three kinds that matter, trained here, and the bundles an executor would make of them."""

import io
import json
import zipfile

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the lazy dog sleeps on.",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    "Größe, naïve façade; Привет, мир. 1234567890 (x + y) * z != 0 lm nopqrstu ZZ abc",
] * 4
HARD_TEXT = "d\u030c ď e\u0301 😀 👨‍👩‍👧‍👦 🇨🇭🇯🇵 สวัสดี क्षत्रिय 漢字かな  two spaces\n\n    code \t end\u00a0."
SPECIAL = ["<s>", "</s>", "<unk>", "<|mark|>"]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2-like: bytes as printable characters, no begin token, an added token that is not special."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    library.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("été", normalized=False), "汉\u00a0"])
    return library


def byte_fallback(strip: bool = True) -> tokenizers.Tokenizer:
    """Llama-2-like (one leading space is stripped) or Gemma-like: metaspaces, bytes `<0x..>`, a begin token."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL))
    state = json.loads(trained.to_str())["model"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    for token in state["vocab"]:
        vocab.setdefault(token, len(vocab))
    vocab.setdefault("▁", len(vocab))
    merges = [tuple(merge) for merge in state["merges"]]
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    replace = normalizers.Replace(" ", "▁")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    library.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    library.add_tokens([AddedToken("<tool>", normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    return library


def word_piece() -> tokenizers.Tokenizer:
    """BERT-like: words and `##` continuations, spaces made by the decoder, unknown words become one token."""
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL))
    return library


def metaspace() -> tokenizers.Tokenizer:
    """T5-like: unigrams, the decoder drops the space before the first word."""
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>")
    )
    return library


KINDS = {
    "byte_level": byte_level(),
    "byte_fallback": byte_fallback(strip=False),
    "byte_fallback_strip": byte_fallback(),
    "word_piece": word_piece(),
    "metaspace": metaspace(),
}


def bundle_of(library: tokenizers.Tokenizer, files: dict[str, object] | None = None) -> bytes:
    """The zip that an executor sends: tokenizer.json and `files`; what is not text is written as JSON."""
    everything: dict[str, object] = {"tokenizer.json": library.to_str(), **(files or {})}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in everything.items():
            archive.writestr(name, content if isinstance(content, str | bytes) else json.dumps(content))
    return buffer.getvalue()
