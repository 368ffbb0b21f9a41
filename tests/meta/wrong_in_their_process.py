"""Plugins of every kind whose product takes numbers alone that change the process they are called in, or ask for the rank they are on."""

import decimal
import gc
import logging
import os
import signal
import sys
import threading
import time
from typing import ClassVar

import collators_made_wrong
import numpy as np
import torch
import wrong_advantages
import wrong_group_filters
import wrong_losses
import wrong_mergers
import wrong_reducers

# --- settings ----------------------------------------------------------------------------------------------------------------------


class LossOfTensorFloats(wrong_losses.Plain):
    """Turns TF32 on by torch's newer switch, after which torch refuses to read the older one."""

    def __call__(self, tokens):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        return super().__call__(tokens)


class ReducerWithoutCollector(wrong_reducers.Plain):
    def of(self, structure, weight):
        gc.disable()
        return super().of(structure, weight)


class AdvantageThatRaises(wrong_advantages.Plain):
    def __call__(self, batch):
        np.seterr(divide="raise")
        return super().__call__(batch)


class FilterThatSilencesLogging(wrong_group_filters.Plain):
    def __call__(self, group):
        logging.disable(logging.ERROR)
        return super().__call__(group)


class FilterThatLeavesThreads(wrong_group_filters.Plain):
    def __call__(self, group):
        threading.Thread(target=time.sleep, args=(5,), daemon=True, name="watcher").start()
        return super().__call__(group)


class MergerOfFewDigits(wrong_mergers.Plain):
    def merge(self, outputs, plan):
        decimal.getcontext().prec = 9
        return super().merge(outputs, plan)


class CollatorThatSetsPaths(collators_made_wrong.Delegating):
    def build(self, columns, micro_batch, *, fields=None):
        sys.path.append("rows")
        return super().build(columns, micro_batch, fields=fields)


class ReducerThatIgnoresInterrupts(wrong_reducers.Plain):
    def of(self, structure, weight):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        return super().of(structure, weight)


# --- another rank ------------------------------------------------------------------------------------------------------------------


class ReducerByHash(wrong_reducers.Plain):
    def of(self, structure, weight):
        return super().of(structure, weight) * (1 + hash("a salt") % 97)


class AdvantageOfTheFirstRank(wrong_advantages.Plain):
    def values(self, batch, rewards, groups, finished):
        return super().values(batch, rewards, groups, finished) * (os.environ.get("RANK", "0") == "0")


class FilterOfTheFirstRank(wrong_group_filters.Plain):
    def __call__(self, group):
        return super().__call__(group) if os.environ.get("RANK", "0") == "0" else None


class MergerOnTheFirstRank(wrong_mergers.Plain):
    """Fails everywhere else."""

    def merge(self, outputs, plan):
        assert os.environ.get("LOCAL_RANK", "0") == "0"
        return super().merge(outputs, plan)


class CollatorByHash(collators_made_wrong.Delegating):
    """Leads the samples on by a number that every process draws for itself."""

    def plan(self, lengths, layout):
        plan = super().plan(lengths, layout)
        return collators_made_wrong.change_ranks(plan, lambda ranks: ranks[::-1] if hash("a salt") % 2 else ranks)


# --- right -------------------------------------------------------------------------------------------------------------------------


class PutsItBack(wrong_reducers.Plain):
    """Does all of it in with statements, and waits for its thread."""

    def of(self, structure, weight):
        with np.errstate(divide="ignore"), decimal.localcontext() as context, torch.no_grad():
            context.prec = 9
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
            return super().of(structure, weight)


class ImportsLate(wrong_reducers.Plain):
    """Imports what changes a setting when it is imported, once."""

    def of(self, structure, weight):
        import sets_when_imported  # noqa: F401 - for what it does

        return super().of(structure, weight)


class KeepsAThread(wrong_reducers.Plain):
    """Starts one thread for all calls of the process."""

    started: ClassVar[list[threading.Event]] = []

    def of(self, structure, weight):
        if not self.started:
            self.started.append(threading.Event())
            threading.Thread(target=self.started[0].wait, daemon=True, name="kept").start()
        return super().of(structure, weight)
