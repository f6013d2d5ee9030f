"""From scores to pages per head and kept positions without sorting: cf. `kvc_kernels.select`.

What is kept are all keys above a score, and of those equal to it some. That score is found by its
digits, the highest first (radix select): a pass over the scores counts how many there are of each
digit's 256 values among those that begin as what is known already.

A head's kept keys are found by a program that passes over its scores four times, and once more to
write positions. For heads that compete every pass is a launch: each head counts, for every value of
the digit, the pages it would have if that were where pages begin to be kept, and all add to one
table, from which the next pass reads the digit. Page ``c`` of a head is at or above a score if more
than ``c * P`` keys are, so no page has to be known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Positions of a row that a program reads, or lifts, at a time.
_TILE, _LIFTED = 1024, 64


@triton.jit
def _key(score):
    """uint32 of the same order: NaN and infinity first, both zeros alike."""
    score = tl.where(score != score, float("inf"), score)
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _keys(scores, position, total, weight, limit, WEIGHTED: tl.constexpr):
    """Keys of a row's scores; those behind its end are 0, and have to be masked."""
    score = tl.load(scores + position, mask=position < total, other=0.0)
    if WEIGHTED:
        product = tl.where(score > 0, score * weight, tl.div_rn(score, weight))
        score = tl.where(score > limit, score, tl.minimum(product, limit))
    return _key(score)


@triton.jit
def _nothing():
    """No digit is known: prefix, known and shift of `_count_digit`."""
    return tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32), tl.full([], 24, tl.int32)


@triton.jit
def _next(prefix, known, shift, value):
    """The digit at `shift` is known to be `value` (int32)."""
    bits = shift.to(tl.uint32)
    digit, whole = value.to(tl.uint32) << bits, tl.full([], 255, tl.uint32) << bits
    return prefix | digit, known | whole, shift - 8


@triton.jit
def _count_digit(
    scores, total, prefix, known, shift, weight, limit,
    WEIGHTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """How many of a row's keys that begin as `prefix` go on with each value or a higher one.

    Parameters
    ----------
    prefix, known : uint32: the first digits, zeros behind them; and which bits these are.
    shift : int32, bits behind the digit that is counted.

    Returns
    -------
    at_least : int32 [256], by the digit's value.
    above : int32, keys whose first digits are more than those of `prefix`.
    """
    each = tl.arange(0, TILE)
    counts = tl.zeros([256], tl.int32)
    above = tl.zeros([TILE], tl.int32)
    for start in range(0, total, TILE):
        position = start + each
        key = _keys(scores, position, total, weight, limit, WEIGHTED)
        there, first = position < total, key & known
        above += (there & (first > prefix)).to(tl.int32)
        digit = ((key >> shift.to(tl.uint32)) & 255).to(tl.int32)
        counts += tl.histogram(digit, 256, mask=there & (first == prefix))
    return tl.sum(counts) - tl.cumsum(counts) + counts, tl.sum(above)


@triton.jit(do_not_specialize=["row_pages", "rows", "begin"])
def _kept_kernel(
    scores, pages, positions, row_pages, rows, begin,
    P: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program writes one row's positions.

    Kept are all scores above the threshold, which is the least score kept, and of those equal to
    it as many as fill the pages, lowest positions first.
    """
    row, total = tl.program_id(0), row_pages * P
    count = tl.load(pages + row)
    if count == 0:
        return
    other = tl.arange(0, ROWS)
    before = tl.load(pages + other, mask=(other < row) & (other < rows), other=0)
    positions += tl.sum(before) * P
    scores += row.to(tl.int64) * total

    threshold, known, shift = _nothing()
    ties = (count * P).to(tl.int32)
    for _ in range(4):
        at_least, _above = _count_digit(
            scores, total, threshold, known, shift, 1.0, 0.0, False, TILE
        )
        value = tl.maximum(tl.sum((at_least >= ties).to(tl.int32)) - 1, 0)
        values = tl.arange(0, 256)
        ties -= tl.sum(tl.where(values == value + 1, at_least, 0))
        threshold, known, shift = _next(threshold, known, shift, value)

    each = tl.arange(0, TILE)
    written = 0
    tied = 0
    for start in range(0, total, TILE):
        position = start + each
        key = _keys(scores, position, total, 1.0, 0.0, False)
        there = position < total
        equal = (there & (key == threshold)).to(tl.int32)
        nth_equal = tied + tl.cumsum(equal)
        keep = (there & ((key > threshold) | ((equal > 0) & (nth_equal <= ties)))).to(tl.int32)
        nth = written + tl.cumsum(keep) - 1
        tl.store(positions + nth, (begin + position).to(tl.int64), mask=keep > 0)
        tied += tl.sum(equal)
        written += tl.sum(keep)


@triton.jit
def _number(given, group):
    """Of a group: a tensor's entry, or the number that is the same for all."""
    if given.type.is_ptr():  # noqa: SIM108 - compiled, so that only one of them is
        number = tl.load(given + group)
    else:
        number = given
    return number.to(tl.int32)


@triton.jit
def _digit(tables, nth, group, groups, won):
    """The largest value of a digit at which a group still has `won` pages."""
    values = tl.arange(0, 256)
    pages = tl.load(tables + (nth * groups + group) * 256 + values)
    return tl.maximum(tl.sum((pages >= won).to(tl.int32)) - 1, 0)


@triton.jit
def _contested(keys, safe, P: tl.constexpr):
    """Pages that begin among so many keys and are not safe."""
    return tl.maximum((keys + P - 1) // P - safe, 0)


@triton.jit(do_not_specialize=["row_pages", "per_group", "groups", "won", "safe", "digit"])
def _compete_kernel(
    scores, weights, tables, last, row_pages, per_group, groups, won, safe, limit, digit,
    P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row adds the pages it would have for each value of a digit to its group's table.

    The digits before it, 0 is the first, are read from the tables.

    `tables` [4, groups, 256], of every digit; `last` [R, 257] gets the row's keys at or above each
    value of the last digit, and at 256 those above all.
    """
    row, total = tl.program_id(0), row_pages * P
    group = row // per_group
    count = _number(won, group)
    prefix, known, shift = _nothing()
    for nth in range(digit):
        value = _digit(tables, nth, group, groups, count)
        prefix, known, shift = _next(prefix, known, shift, value)
    WEIGHTED: tl.constexpr = weights is not None
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + row)
    scores += row.to(tl.int64) * total
    at_least, above = _count_digit(
        scores, total, prefix, known, shift, weight, limit, WEIGHTED, TILE
    )
    at_least += above
    values = tl.arange(0, 256)
    pages = _contested(at_least, _number(safe, group), P)
    table = tables + (digit * groups + group) * 256
    tl.atomic_add(table + values, pages, sem="relaxed", mask=pages > 0)
    if digit == 3:
        tl.store(last + row * 257 + values, at_least)
        tl.store(last + row * 257 + 256, above)


@triton.jit(do_not_specialize=["per_group", "groups", "won", "safe"])
def _share_kernel(
    pages, tables, last, per_group, groups, won, safe, P: tl.constexpr, ROWS: tl.constexpr
):
    """One program writes the pages of one group's rows; equal ones go to the first of them."""
    group = tl.program_id(0)
    count, own = _number(won, group), _number(safe, group)
    value = _digit(tables, 3, group, groups, count)
    each = tl.arange(0, ROWS)
    row, mine = group * per_group + each, each < per_group
    at_least = tl.load(last + row * 257 + value, mask=mine, other=0)
    more = tl.load(last + row * 257 + value + 1, mask=mine, other=0)
    more = tl.where(mine, _contested(more, own, P), 0)
    equal = tl.where(mine, _contested(at_least, own, P), 0) - more
    left = count - tl.sum(more) - tl.cumsum(equal) + equal
    taken = more + tl.minimum(tl.maximum(left, 0), equal)
    tl.store(pages + row, (own + taken).to(tl.int64), mask=mine)


@triton.jit(do_not_specialize=["total", "sinks", "recent"])
def _protect_kernel(scores, first, total, sinks, recent, protected, TILE: tl.constexpr):
    """One program lifts a tile of what is protected in one row: its end, then its beginning."""
    row, nth_tile = tl.program_id(0), tl.program_id(1)
    begin = 0
    if first is not None:
        begin = tl.load(first + row).to(tl.int32)
    scores += row.to(tl.int64) * total
    each = nth_tile * TILE + tl.arange(0, TILE)
    last = total - recent + each
    late = (each < recent) & (last - begin >= sinks)  # who is both is the beginning's
    lifted = protected * (1.0 + tl.div_rn(last.to(tl.float32), total.to(tl.float32)))
    tl.store(scores + last, lifted, mask=late)
    lifted = protected * (3.0 - tl.div_rn(each.to(tl.float32), total.to(tl.float32)))
    tl.store(scores + begin + each, lifted, mask=(each < sinks) & (begin + each < total))


def kept_positions(
    scores: torch.Tensor, pages: torch.Tensor, page_size: int, total: int, begin: int = 0
) -> torch.Tensor:
    """`kvc_kernels.select.RankedPages.kept_positions`; one launch."""
    rows, length = scores.shape
    _check_pages("pages", pages, rows)
    positions = torch.empty(total * page_size, dtype=torch.int64, device=scores.device)
    if total:
        _kept_kernel[(rows,)](
            scores, pages, positions, length // page_size, rows, begin,
            P=page_size, ROWS=triton.next_power_of_2(rows), TILE=_TILE,
        )  # fmt: skip
    return positions


def compete(
    scores: torch.Tensor,
    page_size: int,
    won: int | torch.Tensor,
    safe: int | torch.Tensor,
    groups: int,
    weights: torch.Tensor | None,
    limit: float,
) -> torch.Tensor:
    """`kvc_kernels.select.RankedPages.compete`; six launches.

    Memory: 1 KiB a row and 4 KiB a group. ValueError on shapes that do not fit together.
    """
    rows, length = scores.shape
    if rows % groups:
        raise ValueError(f"{rows} rows are not {groups} groups of equal size")
    for name, given in (("won", won), ("safe", safe)):
        if isinstance(given, torch.Tensor):
            _check_pages(name, given, groups)
    if weights is not None and (weights.shape != (rows,) or weights.dtype != torch.float32):
        raise ValueError(f"weights are {weights.dtype} {list(weights.shape)}, not float32 [{rows}]")
    new, per_group = scores.new_empty, rows // groups
    tables = torch.zeros(4, groups, 256, dtype=torch.int32, device=scores.device)
    last, pages = new(rows, 257, dtype=torch.int32), new(rows, dtype=torch.int64)
    for digit in range(4):
        _compete_kernel[(rows,)](
            scores, weights, tables, last, length // page_size, per_group, groups,
            won, safe, limit, digit, P=page_size, TILE=_TILE,
        )  # fmt: skip
    _share_kernel[(groups,)](
        pages, tables, last, per_group, groups, won, safe,
        P=page_size, ROWS=triton.next_power_of_2(per_group),
    )  # fmt: skip
    return pages


def protect(
    scores: torch.Tensor, sinks: int, recent: int, first: torch.Tensor | None, protected: float
) -> None:
    """`kvc_kernels.select.protect` of scores [R, S]; one launch at most."""
    (rows, length), lifted = scores.shape, max(sinks, recent)
    if lifted <= 0 or not length:
        return
    grid = (rows, triton.cdiv(min(lifted, length), _LIFTED))
    _protect_kernel[grid](
        scores, first, length, min(sinks, length), min(recent, length), protected, TILE=_LIFTED
    )


def _check_pages(name: str, pages: torch.Tensor, length: int) -> None:
    if pages.dtype != torch.int64 or pages.shape != (length,) or not pages.is_contiguous():
        raise ValueError(f"{name} is {pages.dtype} {list(pages.shape)}, not int64 [{length}]")
