"""The bytes that each token stands for."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
UNREADABLE = (OSError, ValueError, KeyError, ImportError)
"""What transformers raises for files that are absent, broken or of an unknown kind."""


class Vocabulary:
    """The pieces of the token ids that were asked for."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._kinds = set() if tokenizer is None else decoder_kinds(tokenizer)
        self._pieces: dict[int, bytes | None] = {}

    def pieces(self, ids: Sequence[int]) -> list[bytes | None]:
        """The bytes of each token; None for all without a tokenizer."""
        if self._tokenizer is None:
            return [None] * len(ids)
        new = [token_id for token_id in dict.fromkeys(ids) if token_id not in self._pieces]
        self._pieces |= zip(new, token_pieces(self._tokenizer, self._kinds, new), strict=True)
        return [self._pieces[token_id] for token_id in ids]

    def spell(self, ids: Sequence[int]) -> str | None:
        """The text of the tokens; None where one of them is unknown."""
        pieces = [piece for piece in self.pieces(ids) if piece is not None]
        return b"".join(pieces).decode(errors="replace") if len(pieces) == len(ids) else None


def load_tokenizer(run: Path, config: dict[str, Any]) -> tuple[Any | None, list[str]]:
    """The tokenizer of a run (None: there is none), and why each place that was tried had none."""
    from transformers import AutoTokenizer

    tried = []
    for place in tokenizer_places(run, config):
        try:
            return AutoTokenizer.from_pretrained(place, local_files_only=True), tried
        except UNREADABLE as error:
            tried.append(f"{place}: {str(error).strip().splitlines()[0]}")
    return None, tried


def tokenizer_places(run: Path, config: dict[str, Any]) -> list[str]:
    """Where the tokenizer of a run may be, the best place first."""
    exported = run / "model"
    places = [str(exported)] if exported.is_dir() else []
    model = config.get("policy", {}).get("model")
    return [*places, model] if model else places


def token_pieces(tokenizer: Any, kinds: set[str], ids: Sequence[int]) -> list[bytes | None]:
    """The bytes of each token, which may be a part of a character; None for an unknown id."""
    names = tokenizer.convert_ids_to_tokens(list(ids))
    if "ByteLevel" in kinds:
        return [None if name is None else byte_level_piece(name) for name in names]
    if "ByteFallback" in kinds:
        return [None if name is None else byte_fallback_piece(name) for name in names]
    return [
        None if name is None else tokenizer.decode([token_id]).encode()
        for token_id, name in zip(ids, names, strict=True)
    ]


def decoder_kinds(tokenizer: Any) -> set[str]:
    """The parts of the decoder of a tokenizer from the tokenizers library; empty for others."""
    if not tokenizer.is_fast:
        return set()
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {"type": "none"}
    return {part["type"] for part in [decoder, *decoder.get("decoders", [])]}


def byte_level_piece(name: str) -> bytes:
    """Undoes GPT-2's spelling of bytes as printable characters; added tokens stay as they are."""
    if all(character in BYTE_OF for character in name):
        return bytes(BYTE_OF[character] for character in name)
    return name.encode()


def byte_fallback_piece(name: str) -> bytes:
    """SentencePiece: a low line for the space, <0xE2> for a byte."""
    match = BYTE_TOKEN.fullmatch(name)
    return bytes.fromhex(match[1]) if match else name.replace(SPACE_MARK, " ").encode()


def gpt2_bytes() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {chr(byte): byte for byte in plain}
    return spelled | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF = gpt2_bytes()
