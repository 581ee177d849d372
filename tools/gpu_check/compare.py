"""One output beside the reference."""

from dataclasses import dataclass, field

import torch

#: Largest ‖found - expected‖ / ‖expected‖ by element type; TF32 has 10 bits as f16 has.
TOLERANCE = {"f32": 1e-5, "tf32": 1e-3, "f16": 2e-3, "bf16": 1e-2}

#: Logit margins under which rounding may choose another expert.
NEAR_TIE = 1e-4


def relative(found, expected):
    """‖found - expected‖ / ‖expected‖ in f64; infinite where `found` holds a NaN."""
    error = (found.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    return float("inf") if torch.isnan(error) else error.item()


@dataclass
class Verdict:
    """What one comparison found; `problems` is empty where everything holds."""

    errors: dict = field(default_factory=dict)
    swapped: int = 0
    problems: list = field(default_factory=list)


def compare(found, evaluate, kind):
    """Compares `found` with the reference, which `evaluate` computes for a choice of experts or for its own.

    A token whose experts differ from the reference's must have a margin under `NEAR_TIE`; everything else is then
    compared under the experts that were found.
    """
    verdict = Verdict()
    own = evaluate(None)
    chosen = found.get("topk_indices")
    expected = own
    if chosen is not None:
        differs = (chosen.sort(-1).values != own["topk_indices"].sort(-1).values).any(-1) & ~own["skipped"]
        verdict.swapped = int(differs.sum())
        far = int((differs & (own["margin"] > NEAR_TIE)).sum())
        if far:
            verdict.problems.append(f"{far} tokens chose other experts although no tie is near")
        if out_of_range := int(((chosen < 0) | (chosen >= 1 << 16)).sum()):
            verdict.problems.append(f"{out_of_range} expert indices were never written")
            return verdict
        if verdict.swapped:
            expected = evaluate(torch.where(own["skipped"][..., None], own["topk_indices"], chosen))
    for name in ("output", "present_key", "present_value"):
        if found.get(name) is not None:
            _check(verdict, name, found[name], expected[name], TOLERANCE[kind])
    if found.get("topk_weights") is not None and chosen is not None:
        _check_weights(verdict, found, expected)
    if own["skipped"].any() and found["output"][own["skipped"]].abs().max() != 0:
        verdict.problems.append("the output of a padded query is not 0")
    return verdict


def _check(verdict, name, found, expected, limit):
    if found.shape != expected.shape:
        verdict.problems.append(f"`{name}` has shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
        return
    verdict.errors[name] = relative(found, expected)
    if not verdict.errors[name] <= limit:
        verdict.problems.append(f"`{name}` is off by {verdict.errors[name]:.2e}, {limit:.0e} is allowed")


def _check_weights(verdict, found, expected):
    """Weights are compared expert by expert: the order of slots is free."""
    kept = ~expected["skipped"]
    order, wanted = found["topk_indices"].argsort(-1), expected["topk_indices"].argsort(-1)
    weights = found["topk_weights"].gather(-1, order)[kept].double()
    error = (
        (weights - expected["topk_weights"].gather(-1, wanted)[kept]).abs().max() if kept.any() else torch.tensor(0.0)
    )
    verdict.errors["topk_weights"] = error.item()
    if not error <= 1e-4:
        verdict.problems.append(f"`topk_weights` is off by {error:.2e}, 1e-04 is allowed")
