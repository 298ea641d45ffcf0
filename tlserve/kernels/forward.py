"""The forward pass of one step, the same code for every model: all tokens of all requests, all layers, one call.

Every thread runs ``_step``: a sequence of stages, each cut into pieces that threads claim as they come (threads.py has
the rules). Pieces are whole rows of weights, whole tokens, or whole heads, so nobody's sum is ever shared and the bits
do not depend on who took what, nor on how many pieces there are.

    embedding               a few tokens a piece
    norm, quantise          a few tokens
    q, k, v                 a few heads of one of the three; then QK norm, rope, and k and v into the cache
    attention, quantise     a run of tokens of one request, and one head of keys
    output + residual       a few rows of weights
    norm, quantise          a few tokens
    gate, up, silu(gate)*up,
    quantise                a few rows of both
    down + residual         a few rows of weights
    ... for each layer, then
    final norm              a row whose logits or hidden state are wanted
    head                    a few rows of weights
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator, arg-type"
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from tlserve.kernels.attention import attend
from tlserve.kernels.jit import entry, inline, jit
from tlserve.kernels.kv_cache import sub_block_at, sub_block_bytes, write_kv
from tlserve.kernels.layout import GROUP, ROWS
from tlserve.kernels.matmul import TILES, matmul
from tlserve.kernels.pointwise import rms_norm, rope, silu_times
from tlserve.kernels.product import Bytes, Product, is_quantised, lanes_for, put_column
from tlserve.kernels.state import DIMS, WEIGHTS, WORK, Dims, Field, Floats, Matrix, Norm, Numbers, Weights, Work
from tlserve.kernels.threads import (
    MAX_PIECES,
    Sync,
    Team,
    begin,
    claim,
    end,
    finish,
    is_current,
    new_sync,
    next_epoch,
    share_of,
    wait_stage,
)
from tlserve.kernels.unpack import unpack_row

TOKENS_A_PIECE = 4
# Pieces of a product, few enough to be cheap and enough that threads end together: so many for each thread, and more
# where one would have more weights than this, but none of fewer rows than are multiplied together.
PIECES_A_THREAD = 4
PIECE_WEIGHTS = 1 << 19
PIECE_ROWS = ROWS * TILES
STAGES_A_LAYER = 7
OTHER_STAGES = 3

FORMAT, AT, ROW_COUNT, COLUMNS, BIAS = (int(field) for field in Field)
Q, K, V, OUTPUT, GATE, UP, DOWN = (int(matrix) for matrix in Matrix)
INPUT, POST_ATTENTION, Q_NORM, K_NORM = (int(norm) for norm in Norm)


class Now(NamedTuple):
    """One step as one thread sees it. What is here was read while the epoch was current, and holds until its end."""

    sync: Sync
    epoch: int
    thread: int
    threads: int
    share: int  # of the pieces of each stage that this thread begins with
    num_tokens: int
    num_logits: int
    num_hidden: int
    num_runs: int


class Forward:
    """Runs steps of one model on a team of threads."""

    def __init__(self, dims: Dims, weights: Weights, work: Work, threads: int) -> None:
        sync = new_sync(dims.num_layers * STAGES_A_LAYER + OTHER_STAGES)
        self._arguments = dims, weights, work, sync
        self._threads = threads
        self._team = Team(sync, threads, lambda thread: run(*self._arguments, thread, threads))

    def __call__(self) -> None:
        """One step over the batch in ``work``, whose logits and hidden states are then there. Releases the GIL."""
        run(*self._arguments, 0, self._threads)

    def close(self) -> None:
        """Ends the threads; idempotent."""
        self._team.close()


@inline
def _take(now: Now, stage: int, pieces: int, done: int) -> int:
    """The next piece of a stage, after ``done`` (-1 before the first); -1 once all of them are done.

    A thread that comes too late for the epoch finds every stage done, and touches nothing.
    """
    if done < 0:
        piece = claim(now.sync, stage, now.epoch, pieces, now.share)
    else:
        piece = finish(now.sync, stage, now.epoch, pieces, now.share, done)
    if piece < 0:
        wait_stage(now.sync, stage, now.epoch, pieces)
    return piece


@inline
def _share(items: int, least: int) -> int:
    """Items of one piece, when there may be no more than MAX_PIECES."""
    return max(least, (items + MAX_PIECES - 1) // MAX_PIECES)


@inline
def _rows_a_piece(rows: int, k: int, threads: int, unit: int) -> int:
    """Rows of weights of one piece, which have k each; a multiple of ``unit``, which is whole tiles."""
    units = (rows + unit - 1) // unit
    most = max(PIECE_ROWS, PIECE_WEIGHTS // k) // unit
    return _share(units, max(1, min(most, units // (PIECES_A_THREAD * threads)))) * unit


@inline
def _pieces(items: int, share: int) -> int:
    return (items + share - 1) // share


# ---- products ----


@jit
def _prepare(users: Numbers, values: Floats, size: int, work: Work, t: int, columns: int) -> None:
    """Row t of ``values`` [columns, size], in each form that the matrices ``users`` [any, fields] need."""
    quantised = 0
    for user in range(users.shape[0]):
        quantised += is_quantised(users[user, FORMAT])
    lanes = lanes_for(columns)
    if quantised > 0:
        put_column(True, values, t * size, 0, size, size, work.quantised, 0, t, lanes)
    if quantised < users.shape[0]:
        put_column(False, values, t * size, 0, size, size, work.spread, 0, t, lanes)


@jit
def _multiply(
    weights: Weights, matrix: Numbers, first: int, last: int, quantised: Bytes, spread: Bytes, columns: int,
    y: Floats, y_at: int, y_stride: int, accumulate: bool,
) -> None:  # fmt: skip
    """y[t, first:last] = (y +) bias + rows first..last of the matrix times what was prepared; whole tiles of rows.

    Of the activations only those in the form that the matrix needs are read.
    """
    act = quantised if is_quantised(matrix[FORMAT]) else spread
    product = Product(
        weights.kernels, weights.arena, matrix[FORMAT], matrix[AT], matrix[ROW_COUNT], matrix[COLUMNS], matrix[BIAS],
        act, 0, columns, lanes_for(columns), y, y_at, y_stride, accumulate,
    )  # fmt: skip
    matmul(product, first // ROWS, (last + ROWS - 1) // ROWS)


# ---- stages ----


@jit
def _embed(dims: Dims, weights: Weights, work: Work, now: Now, stage: int) -> None:
    matrix, n = weights.embedding, now.num_tokens
    share = _share(n, TOKENS_A_PIECE)
    pieces = _pieces(n, share)
    piece = _take(now, stage, pieces, -1)
    while piece >= 0:
        for t in range(piece * share, min(n, (piece + 1) * share)):
            at = t * dims.hidden_size
            unpack_row(matrix[FORMAT], weights.arena, matrix[AT], work.token_ids[t], matrix[COLUMNS], work.x, at)
        piece = _take(now, stage, pieces, piece)


@jit
def _norm(dims: Dims, weights: Weights, norm_at: int, users: Numbers, work: Work, now: Now, stage: int) -> None:
    """The norm of each row of x, prepared for the matrices ``users``."""
    n, size = now.num_tokens, dims.hidden_size
    share = _share(n, TOKENS_A_PIECE)
    pieces = _pieces(n, share)
    piece = _take(now, stage, pieces, -1)
    while piece >= 0:
        for t in range(piece * share, min(n, (piece + 1) * share)):
            rms_norm(work.x, t * size, size, weights.arena, norm_at, weights.constants[0], work.normed, t * size)
            _prepare(users, work.normed, size, work, t, n)
        piece = _take(now, stage, pieces, piece)


@jit
def _project(
    weights: Weights, matrix: Numbers, quantised: Bytes, spread: Bytes, work: Work, now: Now, stage: int
) -> None:
    """x += matrix times what was prepared."""
    rows = matrix[ROW_COUNT]
    share = _rows_a_piece(rows, matrix[COLUMNS], now.threads, ROWS)
    pieces = _pieces(rows, share)
    piece = _take(now, stage, pieces, -1)
    while piece >= 0:
        first, last = piece * share, min(rows, (piece + 1) * share)
        _multiply(weights, matrix, first, last, quantised, spread, now.num_tokens, work.x, 0, rows, True)
        piece = _take(now, stage, pieces, piece)


@jit
def _qkv(dims: Dims, weights: Weights, layer: int, work: Work, now: Now, stage: int) -> None:
    """q, k and v of all tokens, normed and rotated, k and v in the cache."""
    heads = _heads_to_fill(ROWS, dims.head_dim, ROWS)
    q_pieces, k_pieces = _pieces(dims.num_heads, heads), _pieces(dims.num_kv_heads, heads)
    pieces = q_pieces + 2 * k_pieces
    piece = _take(now, stage, pieces, -1)
    while piece >= 0:
        if piece < q_pieces:
            _some_heads(dims, weights, layer, Q, 0, piece * heads, heads, dims.num_heads, work, now)
        elif piece < q_pieces + k_pieces:
            first = (piece - q_pieces) * heads
            _some_heads(dims, weights, layer, K, dims.num_heads, first, heads, dims.num_kv_heads, work, now)
        else:
            first, start = (piece - q_pieces - k_pieces) * heads, dims.num_heads + dims.num_kv_heads
            _some_heads(dims, weights, layer, V, start, first, heads, dims.num_kv_heads, work, now)
        piece = _take(now, stage, pieces, piece)


@inline
def _heads_to_fill(unit: int, values: int, most: int) -> int:
    """The fewest heads, of so many values each, that fill whole units; ``most`` if no fewer do."""
    heads = 1
    while heads < most and heads * values % unit:
        heads += 1
    return heads


@jit
def _some_heads(
    dims: Dims, weights: Weights, layer: int, which: int, start: int, first: int, heads: int, num_heads: int,
    work: Work, now: Now,
) -> None:  # fmt: skip
    """``heads`` heads of q, k or v from ``first`` on, which has ``num_heads``; it begins at head ``start`` of a row."""
    d = dims.head_dim
    row = (dims.num_heads + 2 * dims.num_kv_heads) * d
    last = min(first + heads, num_heads)
    matrix, norms = weights.matrices[layer, which], weights.norms[layer]
    _multiply(
        weights, matrix, first * d, last * d, work.quantised, work.spread, now.num_tokens,
        work.qkv, start * d, row, False,
    )  # fmt: skip
    for t in range(now.num_tokens):
        for head in range(first, last):
            at = t * row + (start + head) * d
            if which != V:
                _norm_and_rotate(dims, weights, norms[Q_NORM] if which == Q else norms[K_NORM], work, t, at)
            if which != Q:
                _keep(dims, layer, head, which == K, work, t, at)


@jit
def _norm_and_rotate(dims: Dims, weights: Weights, norm_at: int, work: Work, t: int, at: int) -> None:
    if norm_at >= 0:
        rms_norm(work.qkv, at, dims.head_dim, weights.arena, norm_at, weights.constants[0], work.qkv, at)
    half = dims.head_dim // 2
    rope(work.qkv, at, half, weights.cosines, weights.sines, work.positions[t] * half)


@inline
def _cache_at(dims: Dims, layer: int, head: int) -> tuple[int, int]:
    """The byte where this layer and head begin in block 0, and the bytes from a block to the next."""
    head_bytes = dims.block_size // 16 * sub_block_bytes(dims.head_dim, dims.kv_number_bytes)
    layer_bytes = dims.num_kv_heads * head_bytes
    return layer * layer_bytes + head * head_bytes, dims.num_layers * layer_bytes


@jit
def _keep(dims: Dims, layer: int, head: int, is_key: bool, work: Work, t: int, at: int) -> None:
    base, block_stride = _cache_at(dims, layer, head)
    position = np.int64(work.positions[t])
    block = work.block_tables[work.request_rows[t], position // dims.block_size]
    sub_bytes = sub_block_bytes(dims.head_dim, dims.kv_number_bytes)
    sub_block = base + sub_block_at(block, position, dims.block_size, block_stride, sub_bytes)
    write_kv(dims.kv_number_bytes, is_key, work.kv, sub_block, position % 16, dims.head_dim, work.qkv, at)


@jit
def _attention(dims: Dims, weights: Weights, layer: int, work: Work, now: Now, stage: int) -> None:
    """Attention of all tokens, prepared for OUTPUT."""
    num_heads = dims.num_kv_heads
    heads = _heads_to_fill(GROUP, dims.num_heads // num_heads * dims.head_dim, num_heads)
    parts = _pieces(num_heads, heads)
    items = now.num_runs * parts
    share = _share(items, 1)
    pieces = _pieces(items, share)
    piece = _take(now, stage, pieces, -1)
    while piece >= 0:
        for item in range(piece * share, min(items, (piece + 1) * share)):
            # The last runs, which see most, come first, so that threads end together.
            run, head = now.num_runs - 1 - item // parts, item % parts * heads
            _attend_run(dims, weights, layer, head, min(num_heads, head + heads), run, work, now)
        piece = _take(now, stage, pieces, piece)


@jit
def _attend_run(dims: Dims, weights: Weights, layer: int, head: int, end: int, run: int, work: Work, now: Now) -> None:
    """Heads [head, end) of keys for the tokens of a run."""
    first, last = work.runs[run], work.runs[run + 1]
    d, group = dims.head_dim, dims.num_heads // dims.num_kv_heads
    q_row, out_row = (dims.num_heads + 2 * dims.num_kv_heads) * d, dims.num_heads * d
    for h in range(head, end):
        base, block_stride = _cache_at(dims, layer, h)
        # What this thread is likely to do next.
        then, h_then = (run, h + 1) if h + 1 < dims.num_kv_heads else (max(run - 1, 0), 0)
        base_then, _ = _cache_at(dims, layer, h_then)
        attend(
            weights.attention, work.qkv, first * q_row + h * group * d, q_row, last - first, group, d,
            work.positions[first], work.kv, base, work.block_tables, work.request_rows[first], dims.block_size,
            block_stride, work.normed, first * out_row + h * group * d, out_row, work.attention[now.thread],
            base_then, work.request_rows[work.runs[then]], work.positions[work.runs[then + 1] - 1],
        )  # fmt: skip
    matrix = weights.matrices[layer, OUTPUT]
    quantised, lanes = is_quantised(matrix[FORMAT]), lanes_for(now.num_tokens)
    act = work.quantised if quantised else work.spread
    for t in range(first, last):
        put_column(quantised, work.normed, t * out_row, head * group * d, end * group * d, out_row, act, 0, t, lanes)


@jit
def _gate_up(dims: Dims, weights: Weights, layer: int, work: Work, now: Now, stage: int) -> None:
    """silu(gate) * up, prepared for DOWN."""
    matrices, n, size = weights.matrices[layer], now.num_tokens, dims.intermediate_size
    share = _rows_a_piece(size, 2 * matrices[GATE, COLUMNS], now.threads, GROUP)
    pieces = _pieces(size, share)
    piece = _take(now, stage, pieces, -1)
    while piece >= 0:
        first, last = piece * share, min(size, (piece + 1) * share)
        for half in range(2):
            _multiply(
                weights, matrices[GATE + half], first, last, work.quantised, work.spread, n,
                work.gate_up, half * size, 2 * size, False,
            )  # fmt: skip
        quantised, lanes = is_quantised(matrices[DOWN, FORMAT]), lanes_for(n)
        for t in range(n):
            gate = t * 2 * size
            at = gate + first
            silu_times(work.gate_up, at, work.gate_up, at + size, last - first, work.gate_up, at)
            put_column(quantised, work.gate_up, gate, first, last, size, work.acted, 0, t, lanes)
        piece = _take(now, stage, pieces, piece)


@jit
def _final_norm(dims: Dims, weights: Weights, work: Work, now: Now, stage: int) -> None:
    """The final norm of the rows whose logits are wanted, prepared for the head, and of the hidden rows."""
    size, norm_at, eps = dims.hidden_size, weights.final_norm[0], weights.constants[0]
    items = now.num_logits + now.num_hidden
    share = _share(items, 1)
    pieces = _pieces(items, share)
    piece = _take(now, stage, pieces, -1)
    while piece >= 0:
        for item in range(piece * share, min(items, (piece + 1) * share)):
            if item < now.num_logits:
                row = work.logits_rows[item] * size
                rms_norm(work.x, row, size, weights.arena, norm_at, eps, work.normed, item * size)
                _prepare(weights.head.reshape(1, -1), work.normed, size, work, item, now.num_logits)
            else:
                out = item - now.num_logits
                rms_norm(
                    work.x, work.hidden_rows[out] * size, size, weights.arena, norm_at, eps, work.hidden, out * size
                )
        piece = _take(now, stage, pieces, piece)


@jit
def _logits(weights: Weights, work: Work, now: Now, stage: int) -> None:
    n, rows = now.num_logits, weights.head[ROW_COUNT]
    share = _rows_a_piece(rows, weights.head[COLUMNS], now.threads, ROWS)
    pieces = _pieces(rows, share) if n else 0
    piece = _take(now, stage, pieces, -1)
    while piece >= 0:
        first, last = piece * share, min(rows, (piece + 1) * share)
        _multiply(weights, weights.head, first, last, work.quantised, work.spread, n, work.logits, 0, rows, False)
        piece = _take(now, stage, pieces, piece)


# ---- the step ----


@jit
def _step(dims: Dims, weights: Weights, work: Work, now: Now) -> None:
    _embed(dims, weights, work, now, 0)
    stage = 1
    for layer in range(dims.num_layers):
        matrices, norms = weights.matrices[layer], weights.norms[layer]
        _norm(dims, weights, norms[INPUT], matrices[Q : V + 1], work, now, stage)
        _qkv(dims, weights, layer, work, now, stage + 1)
        _attention(dims, weights, layer, work, now, stage + 2)
        _project(weights, matrices[OUTPUT], work.quantised, work.spread, work, now, stage + 3)
        _norm(dims, weights, norms[POST_ATTENTION], matrices[GATE : UP + 1], work, now, stage + 4)
        _gate_up(dims, weights, layer, work, now, stage + 5)
        _project(weights, matrices[DOWN], work.acted, work.acted, work, now, stage + 6)
        stage += STAGES_A_LAYER
    _final_norm(dims, weights, work, now, stage)
    _logits(weights, work, now, stage + 1)


@jit
def _find_runs(work: Work) -> int:
    """Cuts the tokens into runs of one request and one sub-block; gives how many."""
    count = 0
    for t in range(work.sizes[0]):
        same = t > 0 and work.request_rows[t] == work.request_rows[t - 1] and work.positions[t] % 16 != 0
        if not same:
            work.runs[count] = t
            count += 1
    work.runs[count] = work.sizes[0]
    return count


@jit
def _now(work: Work, sync: Sync, epoch: int, thread: int, threads: int) -> Now:
    sizes = work.sizes
    return Now(sync, epoch, thread, threads, share_of(thread, threads), sizes[0], sizes[1], sizes[2], sizes[3])


@entry(types.void(DIMS, WEIGHTS, WORK, types.int64[::1], types.int64, types.int64))
def run(dims: Dims, weights: Weights, work: Work, sync: Sync, thread: int, threads: int) -> None:
    """Thread 0: one step. The others: their part of every step until the team is closed."""
    if thread == 0:
        work.sizes[3] = _find_runs(work)
        epoch = begin(sync)
        _step(dims, weights, work, _now(work, sync, epoch, thread, threads))
        end(sync, epoch)
        return
    epoch = next_epoch(sync, 0)
    while epoch >= 0:
        now = _now(work, sync, epoch, thread, threads)
        if is_current(sync, epoch):
            _step(dims, weights, work, now)
        epoch = next_epoch(sync, epoch)
