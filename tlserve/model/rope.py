"""Rotary embedding: the frequency each pair of a head turns with, and the ways files stretch it to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlserve.model.fields import Fields
from tlserve.model.files import shown

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every position divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float  # wavelengths above original / low_freq_factor are divided
    high_freq_factor: float  # wavelengths below original / high_freq_factor are kept
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp over the pairs between dividing by `factor` and leaving alone."""

    factor: float
    attention_factor: float  # multiplies cosines and sines
    beta_fast: float  # pairs that turn more often than this over the original context are kept
    beta_slow: float  # pairs that turn less often than this are divided
    original_max_position_embeddings: int
    truncate: bool  # the ramp begins and ends at whole pairs


@dataclass(frozen=True, slots=True)
class PairFactors:
    """One divisor for each pair: what GGUF files hold in place of the parameters of Llama3Scaling."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | PairFactors


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Floats, float]:
    """Radians per position of each pair, float32 [head_dim / 2], and the factor on cosines and sines.

    Pair i is made of elements i and i + head_dim / 2 of a head. Calculated in float32 in the order of operations
    of the reference implementation, because a frequency one bit off is radians off after 100,000 positions.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods: Floats = np.power(np.float32(theta), exponents, dtype=np.float32)
    frequencies: Floats = np.float32(1) / periods
    match scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling():
            return np.divide(frequencies, scaling.factor, dtype=np.float32), 1.0
        case PairFactors():
            return np.divide(frequencies, scaling.factors, dtype=np.float32), 1.0
        case Llama3Scaling():
            return _llama3(frequencies, scaling), 1.0
        case YarnScaling():
            return _yarn(periods, head_dim, theta, scaling), scaling.attention_factor


def _llama3(frequencies: Floats, scaling: Llama3Scaling) -> Floats:
    original = np.float32(scaling.original_max_position_embeddings)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    factor = np.float32(scaling.factor)
    wavelengths = np.float32(2 * math.pi) / frequencies
    with np.errstate(over="ignore", invalid="ignore"):  # far outside the band between, where it is not used
        blend = (original / wavelengths - low) / (high - low)
        blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = np.where(wavelengths > original / low, frequencies / factor, blended)
    result: Floats = np.where(wavelengths < original / high, frequencies, scaled)
    return result


def _yarn(periods: Floats, head_dim: int, theta: float, scaling: YarnScaling) -> Floats:
    def pair_turning(turns: float) -> float:
        """The pair, as a real number, that turns so many times over the original context."""
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    kept = 1 - np.clip((pairs - np.float32(first)) / np.float32(last - first), 0, 1, dtype=np.float32)
    divided = np.float32(1) / (np.float32(scaling.factor) * periods)
    result: Floats = divided * (1 - kept) + np.float32(1) / periods * kept
    return result


def rope_from_hf(fields: Fields, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """theta and scaling from config.json.

    Older files have rope_theta and rope_scaling at the top, newer ones both in rope_parameters; where a file has
    both, rope_scaling is the one that counts, and a theta inside it wins over the one outside.
    """
    section = fields.section("rope_scaling") or fields.section("rope_parameters")
    for owner in (fields, section or fields):
        if owner.number("partial_rotary_factor", default=1.0) != 1:
            raise owner.fault("partial_rotary_factor", "other than 1 is not supported")
    if section is None:
        return fields.number("rope_theta", default=10000.0), None
    for key, value in section.values.items():
        if isinstance(value, dict):
            raise section.fault("*", f"must not be settings by kind of layer, got an object under {shown(key)}")
    owner = section if section.has("rope_theta") else fields
    theta = owner.number("rope_theta", default=10000.0)
    return theta, _hf_scaling(section, fields, theta, max_position_embeddings)


def _hf_scaling(section: Fields, config: Fields, theta: float, max_position_embeddings: int) -> RopeScaling | None:
    if not (section.has("rope_type") or section.has("type")) and section.has("factor"):
        raise section.fault("rope_type", "is missing beside a factor")
    key = "rope_type" if section.has("rope_type") else "type"
    kind = section.text(key, default="default")
    owner = config if config.has("original_max_position_embeddings") else section
    original = owner.integer("original_max_position_embeddings", default=max_position_embeddings)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(section.number("factor"))
        case "llama3":
            low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
            if np.float32(low) >= np.float32(high):
                raise section.fault("high_freq_factor", f"must be above low_freq_factor {low}, got {high}")
            return Llama3Scaling(section.number("factor"), low, high, original)
        case "yarn":
            _check_yarn_theta(section, theta)
            return YarnScaling(
                factor=section.number("factor"),
                attention_factor=_yarn_attention_factor(section),
                beta_fast=section.number("beta_fast", default=32.0),
                beta_slow=section.number("beta_slow", default=1.0),
                original_max_position_embeddings=original,
                truncate=section.flag("truncate", default=True),
            )
    raise section.fault(key, f"{shown(kind)} is not supported (default, linear, llama3, yarn)")


def _yarn_attention_factor(section: Fields) -> float:
    if section.has("attention_factor"):
        return section.number("attention_factor")
    factor = section.number("factor")
    if section.has("mscale") and section.has("mscale_all_dim"):
        return _mscale(factor, section.number("mscale")) / _mscale(factor, section.number("mscale_all_dim"))
    return _mscale(factor)


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _check_yarn_theta(fields: Fields, theta: float) -> None:
    if theta <= 1:
        raise fields.fault("rope_theta", f"must be above 1 for yarn, got {theta}")


def rope_from_gguf(
    fields: Fields, max_position_embeddings: int, pair_factors: tuple[float, ...] | None
) -> tuple[float, RopeScaling | None]:
    """theta and scaling from the `<architecture>.rope.*` keys and the rope_freqs tensor of a GGUF file."""
    theta = fields.number("rope.freq_base", default=10000.0)
    kind = fields.text("rope.scaling.type", default="none")
    if pair_factors is not None:
        if kind != "none":
            raise fields.fault("rope.scaling.type", f"{shown(kind)} together with a rope_freqs tensor is not supported")
        return theta, PairFactors(pair_factors)
    match kind:
        case "none":
            # The key of files older than rope.scaling.type.
            factor = fields.number("rope.scale_linear", default=1.0)
            return theta, LinearScaling(factor) if factor != 1 else None
        case "linear":
            return theta, LinearScaling(fields.number("rope.scaling.factor"))
        case "yarn":
            _check_yarn_theta(fields, theta)
            return theta, _gguf_yarn(fields, max_position_embeddings)
    raise fields.fault("rope.scaling.type", f"{shown(kind)} is not supported (none, linear, yarn)")


def _gguf_yarn(fields: Fields, max_position_embeddings: int) -> YarnScaling:
    for key in ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        if fields.has(key):
            raise fields.fault(key, "is not supported")
    factor = fields.number("rope.scaling.factor")
    return YarnScaling(
        factor=factor,
        attention_factor=_mscale(factor) * fields.number("rope.scaling.attn_factor", default=1.0),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", default=1.0),
        original_max_position_embeddings=fields.integer(
            "rope.scaling.original_context_length", default=max_position_embeddings
        ),
        truncate=True,
    )
