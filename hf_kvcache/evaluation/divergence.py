"""How far predictions are from the reference's, in few passes over the vocabulary.

With the reference's probabilities p, and for a cache the change of its logits, v = candidate - reference, less its mean
under p, everything else follows from two sums of terms that are never negative, so that nothing cancels:

    a = sum p (e^v - 1 - v)        b = sum p v (e^v - 1)
    KL(reference || cache) = ln(1 + a)        KL(cache || reference) = b / (1 + a) - ln(1 + a)

(with what rounding leaves of the mean, s = sum p v, put right: Z = 1 + a + s, then ln(Z) - s and (b + s) / Z - ln(Z)).
Differences of float32 logits are all but exact, so p and v may be float32 where a log-softmax may not: rounding moves a
divergence by less than a thousandth of itself, at any size. Where a logit is infinite or a change so large that its
exponential overflows, the definition in `metrics` is followed in float64.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_kvcache.evaluation import metrics

SMALL = 1e-7
"""Below this b, changes are so small that e^v - 1 - v would be all rounding, and a is b / 2 to four digits."""

BLOCK = 128
"""Tokens of the vocabulary whose largest logit is looked at first, where the top ones are searched for."""


class Reference:
    """The reference's predictions of some positions.

    Args:
        logits: Of the reference cache.
        targets: The true tokens.
    """

    def __init__(self, logits: Float[Tensor, "positions vocabulary"], targets: Int[Tensor, " positions"]) -> None:
        self.logits = logits if logits.dtype == torch.float64 else logits.float()
        self.targets = targets
        log_sum = torch.logsumexp(self.logits.double(), dim=-1)
        self.nll = log_sum - self.logits.gather(1, targets[:, None]).squeeze(1)
        self._probabilities = (self.logits - log_sum[:, None].to(self.logits.dtype)).exp_()
        self._top, self._best = top_tokens(self.logits)
        self.confidence = (self.logits.gather(1, self._best[:, None]).squeeze(1) - log_sum).exp()

    def compare(self, logits: Float[Tensor, "positions vocabulary"]) -> dict[str, Tensor]:
        """What `Samples` holds, of a cache's logits at these positions; its docstring says what each is."""
        logits = logits.to(self.logits.dtype)
        change = logits - self.logits
        # Two reductions: on a CPU they take a seventh of the time of aminmax.
        difference = torch.maximum(-change.amin(dim=-1), change.amax(dim=-1)).double()
        if bool((difference == 0).all()):
            return self._equal()
        mean = _dot(self._probabilities, change)
        change -= mean[:, None]
        left = _dot(self._probabilities, change).double()
        grown = torch.expm1(change)
        a = _dot(self._probabilities, grown - change).double()
        b = _dot(grown.mul_(self._probabilities), change).double()
        a = torch.where(b < SMALL, b / 2, a)
        log_sum = torch.log1p(a + left)  # of e^v under p: by so much, and by the mean, the logarithm of the sum grew
        target_change = change.gather(1, self.targets[:, None]).squeeze(1).double()
        found = {
            "nll": self.nll - target_change + log_sum,
            "kl": (log_sum - left).clamp(min=0.0),
            "reverse_kl": ((b + left) / (1 + a + left) - log_sum).clamp(min=0.0),
        }
        strange = ~torch.stack([*found.values(), difference]).isfinite().all(dim=0)
        if bool(strange.any()):
            for name, values in self._by_definition(logits[strange], strange).items():
                found[name][strange] = values
            equal = (logits == self.logits).all(dim=-1)  # infinite logits have no difference
            difference = torch.where(equal, 0.0, difference)
        same = difference == 0
        for name, exact in (("nll", self.nll), ("kl", 0.0), ("reverse_kl", 0.0)):
            found[name] = torch.where(same, exact, found[name])
        top, best = top_tokens(logits)
        return found | {
            "delta_p": (-found["nll"]).exp() - (-self.nll).exp(),
            "top10": metrics.overlap(self._top, top),
            "agrees": best == self._best,
            "logit_difference": difference,
            "identical": same,
        }

    def _equal(self) -> dict[str, Tensor]:
        """What comparing equal predictions gives, without computing it."""
        zeros = torch.zeros_like(self.nll)
        yes = torch.ones_like(zeros, dtype=torch.bool)
        return {
            "nll": self.nll,
            "kl": zeros,
            "reverse_kl": zeros,
            "delta_p": zeros,
            "top10": zeros + 1,
            "agrees": yes,
            "logit_difference": zeros,
            "identical": yes,
        }

    def _by_definition(
        self, logits: Float[Tensor, "some vocabulary"], chosen: Tensor
    ) -> dict[str, Float[Tensor, " some"]]:
        theirs, ours = metrics.log_probabilities(self.logits[chosen]), metrics.log_probabilities(logits)
        return {
            "nll": metrics.negative_log_likelihood(ours, self.targets[chosen]),
            "kl": metrics.kl_divergence(theirs, ours),
            "reverse_kl": metrics.kl_divergence(ours, theirs),
        }


def top_tokens(
    logits: Float[Tensor, "positions vocabulary"],
) -> tuple[Int[Tensor, "positions top"], Int[Tensor, " positions"]]:
    """The `metrics.TOP` most likely tokens (of a small vocabulary, half of it), and the most likely one.

    The vocabulary is not sorted: the top tokens lie in as many blocks, those with the largest maxima. Of equally likely
    tokens the first one counts as the most likely.
    """
    vocabulary = logits.shape[-1]
    count = min(metrics.TOP, max(1, vocabulary // 2))
    whole = vocabulary // BLOCK * BLOCK
    if whole <= count * BLOCK:
        tokens = torch.arange(vocabulary, device=logits.device).expand(len(logits), -1)
    else:
        largest = logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(dim=-1).topk(count, dim=-1).indices
        inside = largest[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
        rest = torch.arange(whole, vocabulary, device=logits.device).expand(len(logits), -1)
        tokens = torch.cat([inside.flatten(1), rest], dim=1)
    values, places = logits.gather(1, tokens).topk(count, dim=-1)
    top = tokens.gather(1, places)
    return top, top.masked_fill(values != values[:, :1], vocabulary).amin(dim=-1)


def _dot(
    first: Float[Tensor, "positions vocabulary"], second: Float[Tensor, "positions vocabulary"]
) -> Float[Tensor, " positions"]:
    """Not einsum: its batched products of single rows take ten times as long on a CPU."""
    found: Tensor = torch.linalg.vecdot(first, second)
    return found
