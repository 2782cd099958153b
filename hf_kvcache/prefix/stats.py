"""What a store has done so far."""

from __future__ import annotations

from typing import NamedTuple


class Stats(NamedTuple):
    """Counted when a cache is ready, never before."""

    hits: int
    """Prompts of which at least a block was found."""
    hit_tokens: int
    """Tokens found."""
    prompt_tokens: int
    """Tokens of all prompts, found or not."""
    misses: dict[str, int]
    """Prompts of which nothing was found, by reason: "nothing_shared"; "shorter_than_a_block" (its last token is always
    computed and does not count); "evicted" and "expired" (it was stored once); "other_media", "other_namespace" and
    "other_model" (its first block is stored, but with other images or none, or for another); "media_not_covered" (what
    is stored ends before the last placeholder); "assisted_decoding" and "chunked_prefill" (which compute every prompt
    from its first token, the latter before transformers 5.24); "padding_in_a_window" (prompts of different lengths in
    one batch, and layers with a window)."""
    blocks: int
    """Blocks stored now."""
    pinned_blocks: int
    """Of these, pinned ones."""
    blocks_in_use: int
    """Of these, blocks that caches read, or that lie in one piece of memory with some that are read."""
    evicted_blocks: int
    """Blocks that went for lack of room or because their lifetime was over."""
    held_bytes: dict[str, int]
    """Bytes of states by tier."""
    capacity_bytes: dict[str, int]
    """What each tier holds at most."""
    loaded_tokens: int
    """Of the tokens found, those read from files."""
    file_problems: dict[str, int]
    """What went wrong with files: "bad_file" (damaged or another's; set aside), "newer_format" (of a later release;
    left alone), "not_read", "not_written"."""
