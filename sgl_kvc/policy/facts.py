"""What methods may know about the model they compress for."""

from __future__ import annotations

import dataclasses
import functools

import torch

#: Minimum of a head's profile / the mean, so that scores of such heads stay ordered.
_MIN_WEIGHT = 1e-3


class FactsError(ValueError):
    """Facts about a model that cannot be used. The message names their file and says why."""


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What methods may know about the model. None where the model or server has no such thing.

    Attributes
    ----------
    cos_sin : float32 [positions, R], the rotary embedding's cosines, then sines, of R/2 angles;
        R <= D dims are rotated.
    neox : whether rotation pairs dim i with i + R/2 (else 2i with 2i + 1).
    output_projection : per layer [hidden, H*G*Dv], the weight applied to attention's output.
    special_tokens, punctuation : int64, token ids of each class.
    head_profile : float32 [L, H] in [0, 1], how much a head retrieves (docs/adding-a-policy.md).
    """

    cos_sin: torch.Tensor | None = None
    neox: bool = True
    output_projection: list[torch.Tensor] | None = None
    special_tokens: torch.Tensor | None = None
    punctuation: torch.Tensor | None = None
    head_profile: torch.Tensor | None = None

    def head_weights(self, power: float) -> torch.Tensor | None:
        """float32 [L, H], (the head's profile / the mean) to a power; None without a profile.

        Kept, as every layer or prompt asks for the same.
        """
        if self.head_profile is None:
            return None
        if power not in self._weights:
            share = self.head_profile.float() / self.head_profile.float().mean()
            self._weights[power] = share.nan_to_num(1.0).clamp(min=_MIN_WEIGHT) ** power
        return self._weights[power]

    def half_lives(self, half_life: float, reach: float) -> torch.Tensor | None:
        """float64 [L, H], `half_life` times profile / mean, within [1 / `reach`, `reach`]; or None.

        None without a profile. Kept likewise.
        """
        weights = self.head_weights(1.0)
        if weights is not None and (half_life, reach) not in self._half_lives:
            longer = weights.double().clamp(1 / reach, reach)
            self._half_lives[half_life, reach] = half_life * longer
        return None if weights is None else self._half_lives[half_life, reach]

    @functools.cached_property
    def _weights(self) -> dict[float, torch.Tensor]:
        return {}

    @functools.cached_property
    def _half_lives(self) -> dict[tuple[float, float], torch.Tensor]:
        return {}


#: Of a model that nothing is known of.
NO_FACTS = ModelFacts()
