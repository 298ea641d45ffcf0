"""The forward pass of one step, the same code for every model: all tokens of all requests, all layers, one call.

Every thread runs ``step``: a sequence of stages, each cut into pieces that threads claim as they come. A stage begins
when all pieces of the one before are done. Pieces are whole rows of weights, whole tokens, or whole heads, so nobody's
sum is ever shared and the bits do not depend on who took what.

    norm, quantise          a few tokens a piece
    q, k, v                 a few heads a piece; then bias, QK norm, rope, and k and v into the cache
    attention               a run of tokens of one request and one head of keys a piece
    quantise                a few tokens
    output + residual       a few rows of weights
    norm, quantise
    gate, up, silu(gate)*up a few rows of both
    quantise
    down + residual         a few rows of weights
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from tlserve.kernels.attention import attend, sub_block_at, sub_block_size, write_kv
from tlserve.kernels.jit import entry, inline, jit
from tlserve.kernels.layout import ROWS
from tlserve.kernels.matmul import matmul
from tlserve.kernels.pack import unpack_row
from tlserve.kernels.pointwise import rms_norm, rope, silu_times
from tlserve.kernels.product import Product, is_quantised, lanes_for, put_column
from tlserve.kernels.state import ABSENT, DIMS, WEIGHTS, Dims, Field, Matrix, Norm, Weights, Work, work_type

TOKENS_A_PIECE = 4
PIECES_A_THREAD = 4

FORMAT, AT, ROWS_FIELD, COLUMNS, BIAS = (int(field) for field in Field)
Q, K, V, OUTPUT, GATE, UP, DOWN = (int(matrix) for matrix in Matrix)
INPUT, POST_ATTENTION, Q_NORM, K_NORM = (int(norm) for norm in Norm)


class Threads(NamedTuple):
    threads: int


@jit
def take(team, stage, pieces, previous):
    piece = previous + 1
    return piece if piece < pieces else -1


class Team:
    """Runs steps."""

    def __init__(self, dims: Dims, weights: Weights, work: Work, threads: int) -> None:
        self._arguments = dims, weights, work

    def run(self) -> None:
        forward(*self._arguments)

    def close(self) -> None:
        """Ends the threads."""


@inline
def _rows_a_piece(tiles, threads):
    """Rows of weights that one piece computes: few enough that threads end together, and whole tiles."""
    return max(1, tiles // (PIECES_A_THREAD * threads)) * ROWS


@jit
def _find_runs(work, num_tokens):
    """Cuts the tokens into runs of one request and one sub-block."""
    count = 0
    for t in range(num_tokens):
        same = t > 0 and work.request_rows[t] == work.request_rows[t - 1] and work.positions[t] % 16 != 0
        if not same:
            work.runs[count] = t
            count += 1
    work.runs[count] = num_tokens
    return count


@jit
def _prepare(users, values, size, work, t, columns):
    """Row t of ``values`` [columns, size], in each form that the matrices ``users`` [any, fields] need."""
    quantised = np.int64(0)
    for user in range(users.shape[0]):
        quantised += is_quantised(users[user, FORMAT])
    lanes = lanes_for(columns)
    if quantised > 0:
        put_column(True, values, t * size, size, work.quantised, 0, t, lanes)
    if quantised < users.shape[0]:
        put_column(False, values, t * size, size, work.spread, 0, t, lanes)


@jit
def _multiply(weights, matrix, first, last, work, thread, columns, y, y_at, y_stride, accumulate):
    """y[t, first:last] = (y +) bias + rows first..last of the matrix times what was prepared; whole tiles of rows."""
    act = work.quantised if is_quantised(matrix[FORMAT]) else work.spread
    product = Product(
        weights.kernels, weights.arena, matrix[FORMAT], matrix[AT], matrix[ROWS_FIELD], matrix[COLUMNS], matrix[BIAS],
        act, 0, columns, lanes_for(columns), y, y_at, y_stride, accumulate,
    )  # fmt: skip
    matmul(product, first // ROWS, (last + ROWS - 1) // ROWS, work.scratch[thread], 0)


@jit
def _embed_and_find_runs(dims, weights, work, team, stage):
    n, e = work.sizes[0], weights.embedding
    pieces = (n + TOKENS_A_PIECE - 1) // TOKENS_A_PIECE
    piece = take(team, stage, pieces, -1)
    while piece >= 0:
        if piece == 0:
            work.runs[-1] = _find_runs(work, n)
        for t in range(piece * TOKENS_A_PIECE, min(n, (piece + 1) * TOKENS_A_PIECE)):
            unpack_row(e[FORMAT], weights.arena, e[AT], work.token_ids[t], e[COLUMNS], work.x, t * dims.hidden_size)
        piece = take(team, stage, pieces, piece)


@jit
def _norm(dims, weights, norm_at, users, work, team, stage):
    """normed = the norm of each row of x, ready for the matrices ``users``."""
    n, size = work.sizes[0], dims.hidden_size
    pieces = (n + TOKENS_A_PIECE - 1) // TOKENS_A_PIECE
    piece = take(team, stage, pieces, -1)
    while piece >= 0:
        for t in range(piece * TOKENS_A_PIECE, min(n, (piece + 1) * TOKENS_A_PIECE)):
            rms_norm(work.x, t * size, size, weights.arena, norm_at, weights.constants[0], work.normed, t * size)
            _prepare(users, work.normed, size, work, t, n)
        piece = take(team, stage, pieces, piece)


@jit
def _prepare_all(users, values, work, team, stage):
    n, size = work.sizes[0], users[0, COLUMNS]
    pieces = (n + TOKENS_A_PIECE - 1) // TOKENS_A_PIECE
    piece = take(team, stage, pieces, -1)
    while piece >= 0:
        for t in range(piece * TOKENS_A_PIECE, min(n, (piece + 1) * TOKENS_A_PIECE)):
            _prepare(users, values, size, work, t, n)
        piece = take(team, stage, pieces, piece)


@jit
def _project(weights, matrix, work, team, thread, stage):
    """x += matrix times what was prepared."""
    n, rows = work.sizes[0], matrix[ROWS_FIELD]
    step = _rows_a_piece((rows + ROWS - 1) // ROWS, team.threads)
    pieces = (rows + step - 1) // step
    piece = take(team, stage, pieces, -1)
    while piece >= 0:
        first, last = piece * step, min(rows, (piece + 1) * step)
        _multiply(weights, matrix, first, last, work, thread, n, work.x, 0, rows, True)
        piece = take(team, stage, pieces, piece)


@jit
def _qkv(dims, weights, layer, work, team, thread, stage):
    """q, k and v of all tokens, normed and rotated, k and v in the cache. A piece is a few heads of one of the three."""
    matrices, norms = weights.matrices[layer], weights.norms[layer]
    heads = _heads_a_tile(dims.head_dim)
    q_pieces, k_pieces = (dims.num_heads + heads - 1) // heads, (dims.num_kv_heads + heads - 1) // heads
    row = (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim
    pieces = q_pieces + 2 * k_pieces
    piece = take(team, stage, pieces, -1)
    while piece >= 0:
        which = Q if piece < q_pieces else K if piece < q_pieces + k_pieces else V
        offset = (0, q_pieces, q_pieces + k_pieces)[which]
        start = (0, dims.num_heads, dims.num_heads + dims.num_kv_heads)[which]
        first = (piece - offset) * heads
        last = min(first + heads, dims.num_heads if which == Q else dims.num_kv_heads)
        _multiply(
            weights, matrices[which], first * dims.head_dim, last * dims.head_dim, work, thread, work.sizes[0],
            work.qkv, start * dims.head_dim, row, False,
        )  # fmt: skip
        for t in range(work.sizes[0]):
            for head in range(first, last):
                at = t * row + (start + head) * dims.head_dim
                if which != V:
                    _norm_and_rotate(dims, weights, norms[Q_NORM + which - Q], work, t, at)
                if which != Q:
                    _keep(dims, layer, head, which == K, work, t, at)
        piece = take(team, stage, pieces, piece)


@inline
def _heads_a_tile(head_dim):
    """The fewest heads whose rows fill whole tiles."""
    heads = 1
    while heads * head_dim % ROWS:
        heads += 1
    return heads


@jit
def _norm_and_rotate(dims, weights, norm_at, work, t, at):
    if norm_at != ABSENT:
        rms_norm(work.qkv, at, dims.head_dim, weights.arena, norm_at, weights.constants[0], work.qkv, at)
    half = dims.head_dim // 2
    rope(work.qkv, at, half, weights.cosines, weights.sines, work.positions[t] * half)


@inline
def _cache_at(dims, layer, head):
    """Where this layer and head begin in block 0, and how far apart blocks of one layer are."""
    head_size = dims.block_size // 16 * sub_block_size(dims.head_dim)
    block_stride = dims.num_kv_heads * head_size
    return layer * dims.num_blocks * block_stride + head * head_size, block_stride


@jit
def _keep(dims, layer, head, is_key, work, t, at):
    base, block_stride = _cache_at(dims, layer, head)
    position = np.int64(work.positions[t])
    sub_block = base + sub_block_at(
        work.block_tables, work.request_rows[t], position, dims.block_size, block_stride, sub_block_size(dims.head_dim)
    )
    write_kv(is_key, work.kv, sub_block, position % 16, dims.head_dim, work.qkv, at)


@jit
def _attention(dims, weights, layer, work, team, thread, stage):
    """normed = attention of all tokens; the last runs, which see most, first."""
    d, group = dims.head_dim, dims.num_heads // dims.num_kv_heads
    q_row = (dims.num_heads + 2 * dims.num_kv_heads) * d
    out_row = dims.num_heads * d
    num_runs = work.runs[-1]
    pieces = num_runs * dims.num_kv_heads
    piece = take(team, stage, pieces, -1)
    while piece >= 0:
        run, head = num_runs - 1 - piece // dims.num_kv_heads, piece % dims.num_kv_heads
        first, last = work.runs[run], work.runs[run + 1]
        base, block_stride = _cache_at(dims, layer, head)
        attend(
            work.qkv, first * q_row + head * group * d, q_row, last - first, group, d,
            weights.constants[1], work.positions[first],
            work.kv, base, work.block_tables, work.request_rows[first], dims.block_size, block_stride,
            work.normed, first * out_row + head * group * d, out_row, work.attention[thread],
        )  # fmt: skip
        piece = take(team, stage, pieces, piece)


@jit
def _gate_up(dims, weights, layer, work, team, thread, stage):
    """acted = silu(gate) * up"""
    gate, up = weights.matrices[layer, GATE], weights.matrices[layer, UP]
    n, size = work.sizes[0], dims.intermediate_size
    step = _rows_a_piece((size + ROWS - 1) // ROWS, team.threads)
    pieces = (size + step - 1) // step
    piece = take(team, stage, pieces, -1)
    while piece >= 0:
        first, last = piece * step, min(size, (piece + 1) * step)
        _multiply(weights, gate, first, last, work, thread, n, work.gate_up, 0, 2 * size, False)
        _multiply(weights, up, first, last, work, thread, n, work.gate_up, size, 2 * size, False)
        for t in range(n):
            at = t * 2 * size + first
            silu_times(work.gate_up, at, work.gate_up, at + size, last - first, work.acted, t * size + first)
        piece = take(team, stage, pieces, piece)


@jit
def _gather_last(dims, weights, work, team, stage):
    """normed = the final norm of the rows whose logits are wanted; hidden = that of the hidden rows."""
    size, norm_at, eps = dims.hidden_size, weights.final_norm[0], weights.constants[0]
    num_logits, num_hidden = work.sizes[1], work.sizes[2]
    piece = take(team, stage, num_logits + num_hidden, -1)
    while piece >= 0:
        if piece < num_logits:
            row = work.logits_rows[piece] * size
            rms_norm(work.x, row, size, weights.arena, norm_at, eps, work.normed, piece * size)
            _prepare(weights.head.reshape(1, -1), work.normed, size, work, piece, num_logits)
        else:
            row, out = work.hidden_rows[piece - num_logits] * size, (piece - num_logits) * size
            rms_norm(work.x, row, size, weights.arena, norm_at, eps, work.hidden, out)
        piece = take(team, stage, num_logits + num_hidden, piece)


@jit
def _logits(weights, work, team, thread, stage):
    n, rows = work.sizes[1], weights.head[ROWS_FIELD]
    step = _rows_a_piece((rows + ROWS - 1) // ROWS, 8 * team.threads)
    pieces = (rows + step - 1) // step if n else 0
    piece = take(team, stage, pieces, -1)
    while piece >= 0:
        first, last = piece * step, min(rows, (piece + 1) * step)
        _multiply(weights, weights.head, first, last, work, thread, n, work.logits, 0, rows, False)
        piece = take(team, stage, pieces, piece)


@jit
def step(dims, weights, work, team, thread):
    """One forward pass, as each thread of the team runs it."""
    _embed_and_find_runs(dims, weights, work, team, 0)
    stage = 1
    for layer in range(dims.num_layers):
        matrices, norms = weights.matrices[layer], weights.norms[layer]
        _norm(dims, weights, norms[INPUT], matrices[Q : V + 1], work, team, stage)
        _qkv(dims, weights, layer, work, team, thread, stage + 1)
        _attention(dims, weights, layer, work, team, thread, stage + 2)
        _prepare_all(matrices[OUTPUT : OUTPUT + 1], work.normed, work, team, stage + 3)
        _project(weights, matrices[OUTPUT], work, team, thread, stage + 4)
        _norm(dims, weights, norms[POST_ATTENTION], matrices[GATE : UP + 1], work, team, stage + 5)
        _gate_up(dims, weights, layer, work, team, thread, stage + 6)
        _prepare_all(matrices[DOWN : DOWN + 1], work.acted, work, team, stage + 7)
        _project(weights, matrices[DOWN], work, team, thread, stage + 8)
        stage += 9
    _gather_last(dims, weights, work, team, stage)
    _logits(weights, work, team, thread, stage + 1)


@entry(types.void(DIMS, WEIGHTS, work_type(types.uint16)))
def forward(dims, weights, work):
    step(dims, weights, work, Threads(1), 0)
