"""Byte-level BPE of a GGUF file (tokenizer.ggml.model = gpt2, tokenizer.ggml.pre = smollm).

Text is cut at special tokens, then each digit stands alone, then the GPT-2 pattern cuts words;
each piece is merged by rank. Python's `re` has no \\p{L}, \\p{N}: the classes are built from
unicodedata, so they are exact for this Python's Unicode version.
"""

import functools
import re
import sys
import unicodedata

_WHITE_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_CONTROL = 3  # token_type of special tokens


def _character_class(first_letter):
    """The inside of [...] for all characters whose Unicode category starts with `first_letter`."""
    ranges, begin = [], None
    for code in range(sys.maxunicode + 2):
        inside = code <= sys.maxunicode and unicodedata.category(chr(code))[0] == first_letter
        if inside and begin is None:
            begin = code
        elif not inside and begin is not None:
            ranges.append(f"\\U{begin:08x}-\\U{code - 1:08x}")
            begin = None
    return "".join(ranges)


@functools.cache
def _patterns():
    letters, numbers = _character_class("L"), _character_class("N")
    digit = re.compile(f"([{numbers}])")
    word = re.compile(
        f"'(?:[sdmt]|ll|ve|re)| ?[{letters}]+| ?[{numbers}]+"
        f"| ?[^{_WHITE_SPACE}{letters}{numbers}]+"
        f"|[{_WHITE_SPACE}]+(?![^{_WHITE_SPACE}])|[{_WHITE_SPACE}]+"
    )
    return digit, word


@functools.cache
def _byte_letters():
    """GPT-2's printable stand-in for each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in kept]
    table = {byte: chr(byte) for byte in kept}
    table.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return table


def split_words(text):
    """The pieces that BPE never merges across; they concatenate to `text`."""
    digit, word = _patterns()
    return [piece for part in digit.split(text) if part for piece in word.findall(part)]


class Tokenizer:
    """tokens: list of str by id; merges: list of 'left right' by rank; token_types: list of int."""

    def __init__(self, tokens, merges, token_types):
        self._tokens = tokens
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._special = {tokens[i] for i, kind in enumerate(token_types) if kind == _CONTROL}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile(
            "(" + "|".join(re.escape(token) for token in longest_first) + ")"
            if longest_first
            else r"(?!)()"
        )
        self._cache = {}

    def encode(self, text):
        """Token ids; the text of a special token becomes that token. No token is added."""
        ids = []
        for part in self._special_pattern.split(text):
            if part in self._special:
                ids.append(self._ids[part])
            elif part:
                for piece in split_words(part):
                    ids += self._encode_piece(piece)
        return ids

    def decode(self, ids):
        """Text; bytes that are not UTF-8 become U+FFFD."""
        byte_of = {letter: byte for byte, letter in _byte_letters().items()}
        out = bytearray()
        for token in (self._tokens[i] for i in ids):
            out += (
                token.encode("utf-8")
                if token in self._special
                else bytes(byte_of[c] for c in token)
            )
        return out.decode("utf-8", "replace")

    def _encode_piece(self, piece):
        if piece not in self._cache:
            table = _byte_letters()
            self._cache[piece] = [
                self._ids[part] for part in self._merge([table[b] for b in piece.encode("utf-8")])
            ]
        return self._cache[piece]

    def _merge(self, parts):
        """Joins the adjacent pair of lowest rank, wherever it occurs, until no pair has one."""
        no_rank = len(self._ranks)
        while len(parts) > 1:
            best = min(zip(parts, parts[1:]), key=lambda pair: self._ranks.get(pair, no_rank))
            if best not in self._ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                if tuple(parts[i : i + 2]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return parts
