"""The `decay` objective: slot k weighs exp(-(k-1)/γ), the schedule's `train.gamma`.

A server throws away what stands behind the first wrong token, so early slots are worth more. The
formula is `engine.dflash.objective.decay_weights`; it needs nothing but the slot's number.
"""

import attrs

from engine.dflash.objective import BlockWeights, decay_weights
from engine.hookspecs import hookimpl
from engine.schedule import Train


@attrs.frozen(kw_only=True)
class Options:
    """None: γ is `train.gamma`."""


class Decay:
    @hookimpl
    def make_objective(self, name: str, train: Train) -> BlockWeights | None:
        return decay_weights(train.gamma) if name == "decay" else None


def make(options: Options) -> Decay:
    return Decay()
