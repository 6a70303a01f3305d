"""The `dpace` objective (arXiv 2605.18810): a slot weighs as much as the tokens that stand or fall with it.

It replaces the fixed decay by the drafter's own probability of getting that far, so the weight moves
to later slots as the early ones are learnt. Its α is the schedule's `train.dpace_alpha`; the formula
is `engine.dflash.objective.dpace_weights`.
"""

import attrs

from engine.dflash.objective import BlockWeights, dpace_weights
from engine.hookspecs import hookimpl
from engine.schedule import Train


@attrs.frozen(kw_only=True)
class Options:
    """None: α is `train.dpace_alpha`."""


class Dpace:
    @hookimpl
    def make_objective(self, name: str, train: Train) -> BlockWeights | None:
        return dpace_weights(train.dpace_alpha) if name == "dpace" else None


def make(options: Options) -> Dpace:
    return Dpace()
