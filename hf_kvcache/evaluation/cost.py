"""What a cache costs: bytes and time, measured by the benchmark's rules (see docs/benchmarks.md)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_kvcache.evaluation.caches import resolve_cache
from hf_kvcache.evaluation.high_water import HighWater, allocated_bytes
from hf_kvcache.evaluation.memory import measured_bytes, reachable_tensors
from hf_kvcache.evaluation.models import LoadedModel
from hf_kvcache.evaluation.outcomes import Cost, TokenCost
from hf_kvcache.evaluation.peak import PeakBytes
from hf_kvcache.evaluation.protocols import forward

CONTEXTS = (128, 1024)
PROMPT_TOKENS = 512
STEPS = 10


class _Peaks(NamedTuple):
    """The last fields of `Cost`."""

    peak_bytes: int
    allocator_peak_bytes: int | None
    process_peak_bytes: int | None
    dropped_tokens: int | None


def measure_cost(
    loaded: LoadedModel,
    specs: Sequence[str],
    contexts: Sequence[int] = CONTEXTS,
    seed: int = 0,
    progress: bool = True,
) -> list[Cost]:
    """Time prefill and decode of all caches side by side, and measure what they hold; one record for each spec.

    Args:
        loaded: The model.
        specs: Caches, see `caches.py`; the reference first.
        contexts: Lengths of the history at which a token is timed; cut to the model's positions.
        seed: Of token ids and states.
        progress: Whether to show a progress bar.

    Raises:
        InputError: The contexts make no sense.
        EvaluationError: A cache raised while it ran with this model.
    """
    from hf_kvcache.bench import Measurement, Sizes, benchmark  # it imports this package

    speed = benchmark(
        loaded, specs, Sizes(tuple(contexts), PROMPT_TOKENS, beam_tokens=0, steps=STEPS), seed=seed, progress=progress
    )
    by_spec = {of.spec: of.measurements for of in speed.caches}
    peaks: dict[str, _Peaks] = {}

    def token_cost(of: Measurement) -> TokenCost:
        times, ratio = of.timing.milliseconds, of.timing.speedup
        held = 0 if of.held is None else of.held.total_bytes
        return TokenCost(
            of.context_tokens, times.median, times.low, times.high, None if ratio is None else ratio.median, held
        )

    found: list[Cost] = []
    for spec in specs:
        prefill = next(of for of in by_spec[spec] if of.task == "prefill")
        tokens = tuple(token_cost(of) for of in by_spec[spec] if of.task == "decode")
        if spec not in peaks:
            peaks[spec] = _peaks(loaded.model, spec, prefill.context_tokens, seed)
        first = prefill.timing.milliseconds.median
        found.append(
            Cost(
                prompt_tokens=prefill.context_tokens,
                first_token_ms=first,
                prompt_tokens_per_second=1e3 * prefill.context_tokens / first,
                tokens=tokens,
                **peaks[spec]._asdict(),
            )
        )
    return found


def _peaks(model: PreTrainedModel, spec: str, tokens: int, seed: int) -> _Peaks:
    """What one token takes that is read after a prompt of `tokens` tokens."""
    from hf_kvcache.bench.filling import fill, observe_states  # it imports this package

    begin_bytes = allocated_bytes(model.device)
    cache = resolve_cache(spec, tokens + 2)(model.config)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, tokens + 2), generator=generator).to(model.device)
    if cache is not None:
        fill(model, cache, observe_states(model), tokens, rows=1, seed=seed)
        forward(model, ids[:, -2:-1], cache, keep=1)  # what is made once, with the first token
        ids = ids[:, -1:]
    peak = PeakBytes(() if cache is None else reachable_tensors(cache))
    with HighWater(model.device, begin_bytes) as marks, peak:
        forward(model, ids, cache, keep=1)
    held_bytes = 0 if cache is None else measured_bytes(cache)
    memory = getattr(cache, "memory", None)
    told = memory() if callable(memory) else None
    dropped = None if told is None else told.tokens_seen - told.tokens_held
    return _Peaks(max(peak.peak_bytes, held_bytes), marks.allocator_bytes, marks.process_bytes, dropped)
