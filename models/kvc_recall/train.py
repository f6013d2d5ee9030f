"""Train the recall model: `python -m kvc_recall.train --out DIR --seed N`.

The schedule counts steps, never seconds, so that a run with the same seed, threads and library
versions repeats. Rows start at 64 tokens and lengthen when the running accuracy of the answers
to dense needles passes a mark; the last steps mix in rows of 2,048.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor

from .mixture import GO_ON_OR_STOP, NO_ANSWER, batch
from .model import Model, Shape, save

logger = logging.getLogger("kvc_recall.train")


@dataclass(frozen=True)
class Plan:
    """The schedule. Lengths in tokens, everything else in steps unless named otherwise."""

    steps: int = 2400
    warm_up: int = 100
    decay_from: int = 1000
    long_from: int = 1600
    long_share: float = 0.2
    rate: float = 4e-3
    final_rate: float = 0.03
    weight_decay: float = 0.1
    clip: float = 1.0
    stages: tuple[tuple[int, int], ...] = ((64, 64), (128, 48), (256, 32), (512, 16), (1024, 8))
    advance_at: tuple[float, ...] = (0.85, 0.90, 0.93, 0.95)
    least: int = 60  # steps in a stage before the next
    back_share: float = 0.25  # batches drawn from the stage before
    last_back_share: float = 0.4  # in the last stage: from any before but the first
    long_stage: tuple[int, int] = (2048, 4)
    others: int = 512  # tokens outside answers that count in the loss
    others_weight: float = 0.2
    # In the last stage, so that few tokens do not drown among many:
    rows_weight: float = 0.5  # of the mean over rows, for short answers
    ends_weight: float = 0.5  # of the mean over what goes on with an answer or ends it


def learning_rate(plan: Plan, step: int) -> float:
    """Linear warm-up, constant, linear decay to `final_rate` of the peak."""
    if step < plan.decay_from:
        return plan.rate * min(1.0, (step + 1) / plan.warm_up)
    done = (step - plan.decay_from) / max(1, plan.steps - plan.decay_from)
    return plan.rate * (1 - (1 - plan.final_rate) * done)


def optimizers(model: Model, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [
        torch.optim.Muon(
            matrices, lr=plan.rate, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def step_loss(
    model: Model, ids: Tensor, wanted: Tensor, plan: Plan, last: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, mean loss of answer tokens, and whether each token was right `[B, T-1]` (or no answer).

    `ids` and `wanted` (as `mixture.pack` makes them) are `[B, T]`; the last token is predicted and
    never read. `last`: the last stage.
    """
    targets, kinds = ids[:, 1:].flatten(), wanted[:, 1:].flatten()
    marks = kinds != NO_ANSWER
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(ids[:, :-1].contiguous()).flatten(0, 1)
    answers = marks.nonzero().squeeze(1)
    plain = (~marks & (targets != 0)).nonzero().squeeze(1)
    plain = plain[torch.randint(len(plain), (plan.others,), generator=generator)]
    chosen = torch.cat((answers, plain))
    logits = model.logits(hidden[chosen].float())
    losses = F.cross_entropy(logits, targets[chosen], reduction="none")
    answer_loss = losses[: len(answers)].mean()
    loss = answer_loss + plan.others_weight * losses[len(answers) :].mean()
    if last:
        of_answers = losses[: len(answers)]
        loss = loss + plan.rows_weight * (of_answers * _row_shares(wanted)).sum()
        loss = loss + plan.ends_weight * of_answers[kinds[answers] == GO_ON_OR_STOP].mean()
    right = torch.ones_like(marks)
    right[answers] = logits[: len(answers)].argmax(-1) == targets[answers]
    return loss, answer_loss.detach(), right.view(ids.shape[0], -1)


def _row_shares(wanted: Tensor) -> Tensor:
    """The weight of each answer token in a mean over rows of the mean over a row's tokens."""
    marks = wanted[:, 1:] != NO_ANSWER
    shares = marks / marks.sum(1, keepdim=True).clamp(min=1) / len(marks)
    return shares[marks]


class Trainer:
    """State of a run: model, optimizers, random streams, stage and running accuracy.

    With several workers (one process each, in a `torch.distributed` group) every one draws its
    share of the rows and they average gradients, so all hold the same model.
    """

    def __init__(
        self, shape: Shape, plan: Plan, seed: int, rank: int = 0, workers: int = 1,
        compiled: bool = True,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        self.plan, self.seed, self.rank, self.workers = plan, seed, rank, workers
        self.model = Model(shape)
        self.optimizers = optimizers(self.model, plan)
        if compiled:  # a layer at a time: all layers share one graph for each length
            torch._dynamo.config.recompile_limit = 32
            torch._inductor.config.cpp.threads = torch.get_num_threads()
            for layer in self.model.layers:
                layer.compile(dynamic=False)
        self.step = self.stage = self.entered = self.tokens = 0
        self.running = 0.0
        self.kinds: dict[str, list[float]] = defaultdict(list)
        self._seed_streams()

    def _seed_streams(self) -> None:
        self.lengths = Random(f"{self.seed} {self.step}")  # the same in all workers
        self.rows = Random(f"{self.seed} {self.step} {self.rank}")
        self.others = torch.Generator().manual_seed(self.rows.getrandbits(32))

    def _draw_stage(self) -> tuple[int, int]:
        plan = self.plan
        if self.step >= plan.long_from and self.lengths.random() < plan.long_share:
            return plan.long_stage
        return plan.stages[
            self.stage - (self.stage > 0 and self.lengths.random() < plan.back_share)
        ]

    def one_step(self) -> tuple[float, float]:
        """Draw a batch and learn from it; returns this worker's loss and that of its answers."""
        plan, (length, size) = self.plan, self._draw_stage()
        last = self.stage == len(plan.stages) - 1
        ids, wanted, kinds = batch(size // self.workers, length, self.rows, last)
        # One token of padding is predicted and never read, so that compiled shapes are round.
        tokens, answers = (F.pad(torch.from_numpy(a), (0, 1)) for a in (ids, wanted))
        loss, answer_loss, right = step_loss(self.model, tokens, answers, plan, last, self.others)
        loss.backward()
        marks = answers[:, 1:] != NO_ANSWER
        for kind, row, mark in zip(kinds, right, marks, strict=True):
            self.kinds[kind].append(row[mark].float().mean().item())
        dense = torch.tensor([kind == "dense" for kind in kinds])
        seen = marks[dense]
        counts = self._average(torch.tensor([right[dense][seen].sum(), seen.sum()]).float())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(plan, self.step)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), plan.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += size * length
        if (length, size) == plan.stages[self.stage] and counts[1] > 0:
            self.running += 0.05 * ((counts[0] / counts[1]).item() - self.running)
            self._advance()
        return loss.item(), answer_loss.item()

    def _average(self, counts: Tensor) -> Tensor:
        """Average the gradients in place, and `counts`, over the workers."""
        if self.workers == 1:
            return counts
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads] + [counts])
        torch.distributed.all_reduce(flat)
        flat /= self.workers
        sizes = [g.numel() for g in grads] + [len(counts)]
        *parts, counts = flat.split(sizes)
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
        return counts

    def _advance(self) -> None:
        plan = self.plan
        if self.stage == len(plan.advance_at) or self.step - self.entered < plan.least:
            return
        if self.running > plan.advance_at[self.stage]:
            self.stage, self.entered, self.running = self.stage + 1, self.step, 0.0

    def state(self) -> dict:
        """What a later run needs to go on from here."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counters": (self.step, self.stage, self.entered, self.tokens, self.running),
        }

    def load(self, state: dict) -> None:
        """Go on from a saved `state`."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.stage, self.entered, self.tokens, self.running = state["counters"]
        self._seed_streams()


def run(rank: int, args: argparse.Namespace) -> None:
    """One worker's run. The first logs to `train.log.jsonl` and saves in `args.out`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    if args.workers > 1:
        store = (args.out / "workers").resolve()
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=args.workers
        )
    shape, plan = Shape(head_dim=args.head_dim), Plan(steps=args.steps)
    trainer = Trainer(shape, plan, args.seed, rank, args.workers, not args.eager)
    if args.resume:
        trainer.load(torch.load(args.resume, weights_only=False))
    started = time.time()

    def record(**fields: Any) -> None:
        if rank:
            return
        fields |= {"wall_s": round(time.time() - started, 1)}
        fields |= {"cpu_s": round(time.process_time() * args.workers, 1)}  # workers are alike
        line = json.dumps(fields)
        with (args.out / "train.log.jsonl").open("a") as log:
            log.write(line + "\n")
        logger.info(line)

    parameters = sum(p.numel() for p in trainer.model.parameters())
    record(
        seed=args.seed, from_step=trainer.step, workers=args.workers, shape=asdict(shape),
        plan=asdict(plan), parameters=parameters,
    )  # fmt: skip
    while trainer.step < plan.steps:
        loss, answer_loss = trainer.one_step()
        if trainer.step % 20 == 0:
            by_kind = {k: round(sum(v) / len(v), 3) for k, v in sorted(trainer.kinds.items())}
            trainer.kinds.clear()
            record(
                step=trainer.step, length=plan.stages[trainer.stage][0], loss=round(loss, 4),
                answer_loss=round(answer_loss, 4), running=round(trainer.running, 4),
                tokens=trainer.tokens, accuracy=by_kind,
            )  # fmt: skip
        if not rank and (trainer.step % 100 == 0 or trainer.step == plan.steps):
            torch.save(trainer.state(), args.out / "checkpoint.tmp")
            (args.out / "checkpoint.tmp").replace(args.out / "checkpoint.pt")
    if not rank:
        save(trainer.model, args.out)
    record(done=True, step=trainer.step, tokens=trainer.tokens)


def main() -> None:
    """Start the workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="in each worker")
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--head-dim", type=int, default=Shape.head_dim)
    parser.add_argument("--resume", type=Path, help="a checkpoint.pt to go on from")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "workers").unlink(missing_ok=True)
    if args.workers == 1:
        run(0, args)
    else:
        torch.multiprocessing.spawn(run, (args,), args.workers)


if __name__ == "__main__":
    main()
