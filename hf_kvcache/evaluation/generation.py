"""Every generation mode of `generate`, with one cache and with the reference, compared token for token."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvcache.evaluation.proofs import GenerationCheck
from hf_kvcache.evaluation.protocols import cache_argument

NEW_TOKENS = 12
_DRAWING = Lock()
PAD_TOKENS = 7
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "4 beams": {"num_beams": 4},
    "3 return sequences": {"do_sample": True, "num_return_sequences": 3},
    "left-padded batch": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}


class Generated(NamedTuple):
    """What one run of `generate` gave: the ids, and the scores of each step."""

    sequences: Int[Tensor, "rows tokens"]
    scores: tuple[Tensor, ...]


def generate(model: PreTrainedModel, cache: Cache, prompt: Int[Tensor, " tokens"], mode: str, seed: int) -> Generated:
    """Generate `NEW_TOKENS` tokens in one of `MODES`; the random state of torch is left as it was."""
    ids, mask = _inputs(prompt.to(model.device), mode)
    settings = {"do_sample": False} | MODES[mode]
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **settings,
    )
    with _seeded(model.device, seed) if config.do_sample else nullcontext():
        output = cast("Any", model).generate(
            ids, attention_mask=mask, generation_config=config, **{cache_argument(model): cache}
        )
    return Generated(output.sequences, tuple(output.scores))


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from a seed; the random state is the process's, so threads take turns, and it is as it was afterwards."""
    devices = [] if device.type == "cpu" else [device]
    with _DRAWING, torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def compare(mode: str, reference: Generated, candidate: Generated) -> GenerationCheck:
    """Find where two runs split, how close a call it was there, and how far scores differ up to there."""
    split = (reference.sequences != candidate.sequences).any(dim=0).nonzero()
    prompt_tokens = reference.sequences.shape[1] - NEW_TOKENS
    first = None if not len(split) else int(split[0]) - prompt_tokens
    both = list(zip(reference.scores, candidate.scores, strict=False))[: None if first is None else first + 1]
    # Scores of forbidden tokens are -inf in both; their difference is no number.
    score_difference = max(float((a - b).abs().nan_to_num(0.0).max()) for a, b in both)
    margin = None
    if first is not None and "beams" not in mode:
        row = int((reference.sequences != candidate.sequences)[:, split[0, 0]].nonzero()[0])
        best = reference.scores[first][row].topk(2).values
        margin = float(best[0] - best[1])
    return GenerationCheck(mode, first is None, first, margin, score_difference)


def _inputs(prompt: Int[Tensor, " tokens"], mode: str) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask; the padded batch has a shorter first row, filled up on the left."""
    if mode != "left-padded batch":
        return prompt[None], torch.ones_like(prompt)[None]
    ids, mask = prompt.repeat(2, 1), torch.ones_like(prompt).repeat(2, 1)
    ids[0, :PAD_TOKENS] = 0
    mask[0, :PAD_TOKENS] = 0
    return ids, mask
