"""The embedding of a text: the mean of its hidden states, made unit length."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def add_hidden(total: NDArray[np.float64], hidden: NDArray[np.float32]) -> None:
    """Add rows of ``hidden`` [T, d] to ``total`` [d], one after the other.

    One order of addition, so that the sum has the same bits however the rows were cut into steps.
    """
    for row in hidden:
        total += row


def finish_pooling(total: NDArray[np.float64], num_tokens: int) -> NDArray[np.float32]:
    """The unit vector [d] along the mean of ``num_tokens`` hidden states; zeros stay zeros."""
    mean = total / num_tokens
    norm = math.sqrt(math.fsum((mean * mean).tolist()))
    return (mean / norm if norm else mean).astype(np.float32)


def pool_embedding(hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    """The embedding [d] of the final-normed hidden states [T, d] of a text, T at least 1."""
    total = np.zeros(hidden.shape[1])
    add_hidden(total, hidden)
    return finish_pooling(total, len(hidden))
