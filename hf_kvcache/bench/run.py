"""Run a benchmark: the caches asked for and the reference, side by side on one model."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvcache.bench import measure
from hf_kvcache.bench.filling import observe_states
from hf_kvcache.bench.measure import Bench, Contender
from hf_kvcache.bench.results import BenchResults, CacheSpeed, Measurement
from hf_kvcache.bench.timing import WARM_UP_ROUNDS
from hf_kvcache.errors import InputError
from hf_kvcache.evaluation.caches import REFERENCE, resolve_cache
from hf_kvcache.evaluation.environment import environment
from hf_kvcache.evaluation.models import LoadedModel, position_limit

UNCACHED = "none"
UNCACHED_TOKENS = 1024
"""The longest text that is measured without a cache: the time of one token grows with it."""


@dataclass(frozen=True)
class Sizes:
    """What to measure, in tokens.

    Attributes:
        context_tokens: Lengths of the history for decoding.
        prompt_tokens: Length of the prompt for the prefill; 0 leaves it out.
        beam_tokens: Length of the prompt for 4 beams; 0 leaves them out.
        steps: Tokens timed at each length.

    Raises:
        InputError: No context at all, or a size below what can be measured.
    """

    context_tokens: tuple[int, ...] = (128, 1024, 4096, 8192)
    prompt_tokens: int = 1024
    beam_tokens: int = 2048
    steps: int = 20

    def __post_init__(self) -> None:
        if not self.context_tokens or min(self.context_tokens) < 1 or self.steps < 1:
            raise InputError(
                f"contexts and steps must be at least 1 token, got contexts {list(self.context_tokens)} and "
                f"{self.steps} steps"
            )
        if self.prompt_tokens < 0 or self.beam_tokens < 0:
            raise InputError(f"prompts cannot be negative, got {self.prompt_tokens} and {self.beam_tokens} tokens")

    @property
    def measured_tokens(self) -> int:
        """Tokens a cache grows by while it is measured."""
        return WARM_UP_ROUNDS + self.steps

    def within(self, positions: int | None) -> "Sizes":
        """These sizes, each cut to what a model with so many positions has room for.

        Raises:
            InputError: There is no room for the measured tokens themselves.
        """
        if positions is None:
            return self
        room = positions - self.measured_tokens
        if room < 1:
            raise InputError(
                f"{self.steps} steps and {WARM_UP_ROUNDS} to warm up do not fit into the {positions} positions of "
                "this model; use fewer steps"
            )
        contexts = tuple(sorted({min(tokens, room) for tokens in self.context_tokens}))
        return Sizes(contexts, min(self.prompt_tokens, room), min(self.beam_tokens, room), self.steps)


class _Plan(NamedTuple):
    """The sizes that fit, and the contexts measured without a cache."""

    sizes: Sizes
    uncached_tokens: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """Steps of the progress bar."""
        decodes = len(self.sizes.context_tokens) + bool(self.sizes.beam_tokens)
        prefills = (1 + measure.PREFILL_ROUNDS) * bool(self.sizes.prompt_tokens)
        uncached = (1 + measure.UNCACHED_ROUNDS) * len(self.uncached_tokens)
        return decodes * self.sizes.measured_tokens + prefills + uncached


def benchmark(
    loaded: LoadedModel, caches: Iterable[str], sizes: Sizes | None = None, *, seed: int = 0, progress: bool = True
) -> BenchResults:
    """Measure decoding, prefill, beams and bytes held of every cache, and of transformers' dynamic cache.

    All caches take turns, token by token, in one process: see docs/benchmarks.md.

    Args:
        loaded: The model, in the dtype and on the device to measure.
        caches: Specs, see `hf_kvcache.evaluation.caches`. The reference `dynamic` is always measured, first.
        sizes: What to measure; the defaults of `Sizes` if None. Cut to the model's positions.
        seed: Of token ids, states and beam choices.
        progress: Whether to show a progress bar.

    Raises:
        SpecError, ConfigError, InputError: Before anything is timed, if something asked for is impossible.
        EvaluationError: A cache raised while it ran with this model.
    """
    started = time.perf_counter()
    model = loaded.model
    plan, contenders = _prepare(model, tuple(dict.fromkeys((REFERENCE, *caches))), sizes or Sizes())
    with tqdm(total=plan.rounds, unit=" rounds", desc="timing", disable=not progress) as bar:
        bench = Bench(model, observe_states(model), contenders, seed, lambda: bar.update(1))
        found = _measure(bench, plan)
    return BenchResults(
        model=loaded.name,
        dtype=str(model.dtype).removeprefix("torch."),
        filling="random states" if bench.states.plain else "prefill",
        token_bytes=measure.formula_bytes(bench.states, tokens=1, rows=1),
        seed=seed,
        caches=tuple(CacheSpeed(spec, tuple(of)) for spec, of in found.items()),
        environment=environment(model),
        seconds=time.perf_counter() - started,
    )


def _prepare(model: PreTrainedModel, specs: Sequence[str], sizes: Sizes) -> tuple[_Plan, tuple[Contender, ...]]:
    """Refuse what cannot work, before anything is timed."""
    if model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} is an encoder-decoder; the benchmark times decoder-only models")
    sizes = sizes.within(position_limit(model))
    longest = max(*sizes.context_tokens, sizes.prompt_tokens, sizes.beam_tokens)
    contenders = tuple(Contender(spec, resolve_cache(spec, longest + sizes.measured_tokens)) for spec in specs)
    for contender in contenders:
        contender.build(model.config)
    uncached = [tokens for tokens in sizes.context_tokens if tokens <= UNCACHED_TOKENS and UNCACHED in specs]
    return _Plan(sizes, tuple(uncached)), contenders


def _measure(bench: Bench, plan: _Plan) -> dict[str, list[Measurement]]:
    """All measurements, by spec. Without a cache there is a prefill and a decode, but nothing to fill."""
    found: dict[str, list[Measurement]] = {of.spec: [] for of in bench.contenders}
    cached = bench._replace(contenders=tuple(of for of in bench.contenders if of.spec != UNCACHED))
    sizes = plan.sizes
    for context in sizes.context_tokens:
        _add(found, cached, measure.measure_decode(cached, context, sizes.steps))
    for context in plan.uncached_tokens:
        found[UNCACHED].append(measure.measure_uncached(bench, context))
    if sizes.prompt_tokens:
        _add(found, bench, measure.measure_prefill(bench, sizes.prompt_tokens))
    if sizes.beam_tokens:
        _add(found, cached, measure.measure_beams(cached, sizes.beam_tokens, sizes.steps))
    return found


def _add(found: dict[str, list[Measurement]], bench: Bench, measurements: list[Measurement]) -> None:
    for contender, measurement in zip(bench.contenders, measurements, strict=True):
        found[contender.spec].append(measurement)
