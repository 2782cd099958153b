"""What a cache is, by what was measured, and where that contradicts what it claims."""

import math

from hf_kvcache.evaluation.proofs import Audit, Kind, Proof


def judge(
    declared: Kind, identical: bool | None, difference: float, proof: Proof | None, audit: Audit | None = None
) -> tuple[Kind, tuple[str, ...]]:
    """Give the class that the measurements support, and where they contradict the claim.

    Args:
        declared: What the cache claims.
        identical: Whether all working-dtype logits were bitwise those of the reference; None if the reference is of
            another run, so that they cannot be.
        difference: The largest of those logit differences; not finite if there were NaNs.
        proof: The float64 proof, if it was run.
        audit: What became of stored states, if that was looked at.
    """
    measured: Kind
    if declared == "uncached":
        return "uncached", ()
    if proof is not None and not proof.complaints:
        measured = "bitwise" if identical else "rounding"
    elif proof is None:
        measured = "bitwise" if identical else "approximate" if declared == "approximate" else "unproven"
    else:
        measured = "approximate"
    failures: list[str] = []
    if not math.isfinite(difference):
        failures.append("logits are not finite numbers where the reference's are")
    if declared == "approximate" and identical:
        failures.append(
            "declares itself approximate, but every logit is bitwise the reference's: it never engaged. "
            "Score a longer window, or look whether its parameters leave it anything to do"
        )
    if declared == "bitwise" and identical is False:
        failures.append(
            f"declares itself bitwise exact, but logits differ by up to {difference:.3g} in the working dtype"
        )
    if declared in ("bitwise", "rounding") and proof is not None:
        texts = proof.complaints + proof.generation_refusals
        failures.extend(f"declares itself exact ({declared}), but in float64, {text}" for text in texts)
    if declared in ("bitwise", "rounding") and audit is not None and audit.complaint:
        failures.append(f"declares itself exact ({declared}), but {audit.complaint}")
    return measured, tuple(failures)
